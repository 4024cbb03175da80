"""Offsets past 2 and 4 GiB: a page's place times 128 must never be computed in 32 bits.

Pools here are mapped and not touched, so they take no memory but for the pages written.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bits import format_parameters, mixed_values, places_of, same_bits
from format.format_decoder import decode_page

from zf_cute import FormatError, KVShape, PageStore, reference
from zf_cute.pages import LayerPages
from zf_cute.reference.pages import _places
from zf_layouts import PageLayout

GIB = 1 << 30


def _signed(word: int) -> int:
    """A u32 as the int32 that holds it."""
    return word - (1 << 32) if word >> 31 else word


@pytest.mark.parametrize(
    "start",
    [
        (2 * GIB >> 7) - 1,  # last start below 2^31 bytes
        2 * GIB >> 7,
        4 * GIB >> 7,  # 2^32 bytes: 0 if bytes were counted in 32 bits
        (4 * GIB >> 7) + 1,
        (1 << 31) // 8,  # 2^31 units of 16 bytes
        (1 << 32) // 8,
        (1 << 31) - 1,  # last start that is positive as int32
        1 << 31,
        (1 << 32) - 200,  # near the 512 GiB that a place reaches
    ],
)
def test_first_unit_of_a_place(start: int) -> None:
    layout = PageLayout(2, 128, 16)
    places = torch.tensor([[[_signed(start), layout.raw_span_bytes]]], dtype=torch.int32)
    # Only the size of the pool is asked for, so half a tebibyte can be had.
    pool = SimpleNamespace(numel=lambda: 128 << 32)
    kv = SimpleNamespace(pool=pool, places=places, layout=layout)
    first, length = _places(kv, torch.tensor([0]))
    assert first.item() == start * 8
    assert length.item() == layout.raw_span_bytes
    end = start * 128 + layout.raw_span_bytes
    for size, fits in ((end, True), (end - 1, False), (end // 2, False)):
        kv.pool = SimpleNamespace(numel=lambda size=size: size)
        if fits:
            _places(kv, torch.tensor([0]))
        else:
            with pytest.raises(FormatError, match=f"at byte {start * 128} "):
                _places(kv, torch.tensor([0]))


@pytest.fixture(scope="module")
def sparse_pool() -> torch.Tensor:
    """5 GiB of address space; the system gives memory for what is written alone."""
    try:
        return torch.empty(5 * GIB, dtype=torch.uint8)
    except RuntimeError as error:
        pytest.skip(f"no 5 GiB of address space for a sparse pool: {error}")


@pytest.mark.parametrize("at", [2 * GIB - 1280, 2 * GIB + 128, 4 * GIB - 1280, 5 * GIB - (1 << 16)])
def test_a_page_far_into_the_pool(sparse_pool: torch.Tensor, at: int) -> None:
    # Across 2 and 4 GiB (a page has over 6 KB), beyond them, and near the end of the pool.
    layout = PageLayout(2, 64, 16)
    shape = (1, 16, 2, 64)
    k, v = mixed_values(shape, 1), mixed_values(shape, 2)
    spans, lengths = reference.encode_pages(k, v, layout)
    length = int(lengths)
    assert length > 2560
    sparse_pool[at : at + length] = spans[0, 0, :length]
    kv = LayerPages(
        sparse_pool, torch.tensor([[[_signed(at // 128), length]]], dtype=torch.int32), layout
    )
    got_k, got_v = reference.decode_pages(kv, torch.tensor([0]))
    assert same_bits(got_k, k)
    assert same_bits(got_v, v)
    got = decode_page(
        memoryview(sparse_pool.numpy()), places_of(kv, 0), **format_parameters(layout)
    )
    assert (got[0] == k[0].view(torch.int16).numpy().view("u2")).all()


def test_blocks_past_the_first_gigabytes_of_units() -> None:
    # Where a block starts is counted in units of 16 bytes: 64 bits, from place, start and sizes.
    layout = PageLayout(1, 64, 16)
    raw = bytes(layout.raw_metadata())
    at = 5 * GIB - 8192
    pool = torch.empty(5 * GIB, dtype=torch.uint8)
    pool[at : at + len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    places = torch.tensor([[[at // 128, layout.raw_span_bytes]]], dtype=torch.int32)
    _, first = reference.read_metadata(LayerPages(pool, places, layout), torch.tensor([0]))
    want = [(at + layout.metadata_bytes) // 16 + 64 * i for i in range(4)]
    assert first.flatten().tolist() == want


def test_a_store_past_four_gibibytes() -> None:
    # 64 heads in one span make pages of 4 MiB, so that few homes, and few touched bytes, fill it.
    shape = KVShape(1, 64, 64, 256, page_size=64, heads_per_span=64)
    pages = 5 * GIB // shape.layout.page_stride
    try:
        store = PageStore(shape, pages)
    except RuntimeError as error:
        pytest.skip(f"no 5 GiB of address space for a sparse pool: {error}")
    assert store.pool.numel() > 4 * GIB + shape.layout.page_stride
    last = pages - 1
    k, v = mixed_values((64, 64, 256), 3), mixed_values((64, 64, 256), 4)
    # The page whose home is 4 GiB before the last one's must stay as it is.
    aliased = last - 4 * GIB // shape.layout.page_stride
    other_k, other_v = torch.ones_like(k), torch.zeros_like(v)
    for page, pair in ((aliased, (other_k, other_v)), (last, (k, v))):
        store.append(0, *pair, page * 64 + torch.arange(64))
    for seal in (False, True):
        if seal:
            store.seal(0, [last])
        got_k, got_v = store.read(0, [last, aliased])
        assert same_bits(got_k, torch.cat([k, other_k]))
        assert same_bits(got_v, torch.cat([v, other_v]))
    store.clear(0, [last])
    assert not store.is_sealed(0, last).any()
    assert (store.descriptors(0, last) == 255).all()
