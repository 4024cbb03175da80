"""The codec on keys and values of real models: lossless, and as small as was measured.

The counts are of another program than this one: the one that made the sample counted the blocks
whose exponents fit one window of 16, when the data was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
from bits import format_parameters, from_patterns, places_of, same_bits
from format.format_decoder import decode_page

from zf_cute import KVShape, PageStore, reference

TOKENS = 512
# Layers in the sample, KV heads, head_dim.
MODELS = {"qwen2.5-coder-1.5b": ((0, 7, 14, 23), 2, 128), "smollm2-135m": ((0, 15), 3, 64)}

# Blocks that compress without exceptions, of 256 or 192 a layer.  K partners: blocks of 16 tokens
# by 16 dims and their RoPE partners.  K neighbours and V: 16 tokens by 32 dims.
COMPRESSED = {
    "qwen2.5-coder-1.5b": {
        "K partners": (233, 227, 242, 247),
        "K neighbours": (161, 200, 239, 244),
        "V": (253, 239, 236, 242),
    },
    "smollm2-135m": {
        "K partners": (173, 183),
        "K neighbours": (176, 178),
        "V": (156, 177),
    },
}

SealedStore = Callable[..., PageStore]


@pytest.fixture(scope="module")
def kv_of(real_kv: dict) -> Callable[[str, int], tuple[torch.Tensor, torch.Tensor]]:
    """K and V of the n-th layer of a model in the sample."""

    def layer(model: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"{model}/layer{MODELS[model][0][n]}"
        return real_kv[f"{name}/k"], real_kv[f"{name}/v"]

    return layer


@pytest.fixture(scope="module")
def sealed_store(kv_of: Callable) -> SealedStore:
    """A store with a model's layers, all tokens appended in order and every page sealed."""

    @cache
    def make(model: str, page_size: int = 16, **options: object) -> PageStore:
        layers, heads, head_dim = MODELS[model]
        shape = KVShape(len(layers), heads, heads, head_dim, page_size=page_size, **options)
        store = PageStore(shape, TOKENS // page_size)
        for n in range(len(layers)):
            store.append(n, *kv_of(model, n), torch.arange(TOKENS))
            store.seal(n, range(store.num_pages))
        return store

    return make


@pytest.mark.parametrize("max_exceptions", [0, 4])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("model", MODELS)
def test_lossless(
    sealed_store: SealedStore, kv_of: Callable, model: str, page_size: int, max_exceptions: int
) -> None:
    store = sealed_store(model, page_size, max_exceptions=max_exceptions)
    for n in range(store.shape.num_layers):
        assert store.is_sealed(n, range(store.num_pages)).all()
        got = store.read(n, range(store.num_pages))
        for ours, theirs in zip(got, kv_of(model, n), strict=True):
            assert same_bits(ours, theirs)


@pytest.mark.parametrize("model", MODELS)
def test_the_independent_decoder_reads_sealed_pages(
    sealed_store: SealedStore, kv_of: Callable, model: str
) -> None:
    store = sealed_store(model, max_exceptions=4)
    pool = memoryview(store.pool.numpy())
    for n in range(store.shape.num_layers):
        kv, (k, v) = store.layer(n), kv_of(model, n)
        for page in range(store.num_pages):
            got = decode_page(pool, places_of(kv, page), **format_parameters(kv.layout))
            tokens = slice(16 * page, 16 * page + 16)
            assert same_bits(from_patterns(got[0]), k[tokens])
            assert same_bits(from_patterns(got[1]), v[tokens])


@pytest.mark.parametrize(
    ("rope", "keys"), [("half", "K partners"), ("interleaved", "K neighbours")]
)
@pytest.mark.parametrize("model", MODELS)
def test_compressed_blocks_without_exceptions(
    sealed_store: SealedStore, model: str, rope: str, keys: str
) -> None:
    # Both models rotate dim i with dim i + head_dim / 2; "interleaved" pairs neighbours, as a
    # count of plain 16 x 32 blocks does.
    store = sealed_store(model, max_exceptions=0, rope=rope)
    for n in range(store.shape.num_layers):
        descriptors = store.descriptors(n, range(store.num_pages))
        assert ((descriptors < 128) | (descriptors == 255)).all()
        k_blocks, v_blocks = (descriptors < 128).sum((0, 1, 3)).tolist()
        assert k_blocks == COMPRESSED[model][keys][n]
        assert v_blocks == COMPRESSED[model]["V"][n]


def test_ratio_with_exceptions(sealed_store: SealedStore) -> None:
    stored = plain = 0
    for model in MODELS:
        store = sealed_store(model, max_exceptions=4)
        for n in range(store.shape.num_layers):
            # At most four values of any block lie outside its window: exceptions hold them all.
            assert (store.descriptors(n, range(store.num_pages)) < 249).all()
            stored += int(store.page_bytes(n, range(store.num_pages)).sum())
        plain += TOKENS * store.shape.bf16_token_bytes
    # Two bytes a value, over 4 layers of 2 x 128 dims and 2 of 3 x 64, K and V.
    assert plain == 2 * 2 * TOKENS * (4 * 2 * 128 + 2 * 3 * 64)
    assert stored / plain <= 0.755
    assert round(stored / plain, 4) == 0.7536


def test_a_layer_is_encoded_in_well_under_a_second(kv_of: Callable) -> None:
    # A few ms on idle cores: this catches a loop over values, not a slow machine.
    layout = KVShape(1, 2, 2, 128).layout
    k, v = (x.view(32, 16, 2, 128) for x in kv_of("qwen2.5-coder-1.5b", 0))
    reference.encode_pages(k[:1], v[:1], layout)  # makes its tables once
    begin = time.perf_counter()
    reference.encode_pages(k, v, layout)
    assert time.perf_counter() - begin < 1
