"""What pages hold, real or chosen to be hard: sealed to the same bytes as the reference's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bits import format_parameters, from_patterns, mixed_values, places_of, same_bits
from format.format_decoder import decode_page
from gpu.gpu_store import DEVICE, assert_holds, slots_of
from torch import Tensor

from zf_cute import KVShape
from zf_cute.reference.pages import part_values
from zf_layouts import PageLayout

pytestmark = pytest.mark.gpu


# ---- real keys and values ----------------------------------------------------------------------
@pytest.mark.parametrize("model", ["qwen2.5-coder-1.5b", "smollm2-135m"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_the_real_sample(
    paired: Callable, real_kv: dict[str, Tensor], model: str, page_size: int
) -> None:
    """Every layer, sealed whole: the same sizes, places, descriptors and bytes; and they decode."""
    layers = sorted({name.split("/")[1] for name in real_kv if name.startswith(f"{model}/layer")})
    heads, dim = real_kv[f"{model}/{layers[0]}/k"].shape[1:]
    pair = paired(KVShape(len(layers), heads, heads, dim, page_size), 512 // page_size + 3)
    ids = torch.randperm(pair.cpu.num_pages)[: 512 // page_size]
    for layer, name in enumerate(layers):
        k, v = (real_kv[f"{model}/{name}/{part}"] for part in "kv")
        pair.append(layer, k, v, slots_of(ids, page_size))
        pair.assert_same(f"{name} appended")
        pair.seal(layer, ids)
        pair.assert_same(f"{name} sealed")
        assert torch.equal(
            pair.gpu.descriptors(layer, ids.to(DEVICE)).cpu(), pair.cpu.descriptors(layer, ids)
        )
        assert_holds(pair.gpu, layer, ids, k, v)
    kv = pair.gpu.layer(0)
    pool = memoryview(pair.gpu.pool.cpu().numpy())
    k, v = (real_kv[f"{model}/{layers[0]}/{part}"] for part in "kv")
    got = decode_page(pool, places_of(kv, int(ids[1])), **format_parameters(kv.layout))
    second = slice(page_size, 2 * page_size)
    assert same_bits(from_patterns(got[0]), k[second]), "the independent decoder disagrees on K"
    assert same_bits(from_patterns(got[1]), v[second]), "the independent decoder disagrees on V"
    saved = 1 - float(pair.gpu.page_bytes(0, ids.to(DEVICE)).sum()) / (k.nbytes + v.nbytes)
    assert saved > 0.15  # real keys and values compress: nothing was stored raw by mistake


# ---- hard values -------------------------------------------------------------------------------
def blocks_to_values(blocks: np.ndarray, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """K and V whose blocks have the given patterns: [pages, heads, 2, blocks, 512]."""
    bits = torch.from_numpy(blocks.astype(np.int32))
    k, v = (part_values(bits[:, :, i], layout, part) for i, part in enumerate(("k", "v")))
    return k.flatten(0, 1), v.flatten(0, 1)


def special_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """[..., 512]: each block of one kind of special value, or of two kinds that share no window."""

    def some(low: int, high: int) -> np.ndarray:
        return rng.integers(low, high, (*shape, 512)) | rng.integers(0, 2, (*shape, 512)) << 15

    kinds = [
        some(0x7F81, 0x8000),  # NaN, quiet and signalling, every payload
        some(0x7F80, 0x7F81),  # infinities
        some(0x7F80, 0x8000),  # both
        some(0, 1),  # zeros
        some(1, 0x80),  # denormals
        some(0, 0x80),  # both
        some(0, 0x100),  # denormals and the smallest normal values
        some(0x7F00, 0x8000),  # the greatest normal values, infinities and NaN
        some(0, 0x8000),  # anything: raw
        some(0x3F80, 0x3F81),  # one and minus one
        some(0x3C00, 0x4400),  # a window that starts at an even exponent
        some(0x3C80, 0x4480),  # and one that is a value too wide for it
    ]
    main, other = (rng.integers(0, len(kinds), shape)[None, ..., None] for _ in range(2))
    every = np.stack(kinds)
    base = np.take_along_axis(every, np.broadcast_to(main, (1, *shape, 512)), 0)[0]
    mixed = np.take_along_axis(every, np.broadcast_to(other, (1, *shape, 512)), 0)[0]
    # 0 to 6 values of another kind, so that all counts up to past the limit occur.
    count = rng.integers(0, 7, shape)[..., None]
    rank = rng.random((*shape, 512)).argsort(-1)
    return np.where(rank < count, mixed, base)


def outlier_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """[..., 512]: a window of exponents somewhere, and 0 to 6 values around its edges.

    Outliers lie below, above or on both sides, near or far, alone or several to a lane, and two
    windows are often equally good: then the lowest must be taken.
    """
    base = rng.integers(0, 256, shape)[..., None]
    width = rng.integers(1, 18, shape)[..., None]
    exponent = base + rng.integers(0, 1 << 30, (*shape, 512)) % width
    off = rng.choice(
        np.array([-255, -17, -16, -9, -2, -1, 1, 2, 15, 16, 17, 18, 255]), exponent.shape
    )
    count = rng.integers(0, 7, shape)[..., None]
    # Half of the blocks have their outliers side by side, in one lane or two.
    first = rng.integers(0, 506, shape)[..., None]
    position = np.arange(512)
    together = (position >= first) & (position < first + count)
    scattered = rng.random((*shape, 512)).argsort(-1) < count
    chosen = np.where(rng.integers(0, 2, shape)[..., None] == 1, together, scattered)
    exponent = np.clip(np.where(chosen, base + off, exponent), 0, 255)
    rest = rng.integers(0, 1 << 16, exponent.shape) & 0x807F
    return exponent << 7 | rest


def edge_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """[..., 512]: two exponents only, of which the second is met 0 to 8 times, at any distance."""
    low = rng.integers(0, 256, shape)[..., None]
    high = np.clip(
        low + rng.choice(np.array([14, 15, 16, 17, -14, -15, -16, 255]), low.shape), 0, 255
    )
    count = rng.integers(0, 9, shape)[..., None]
    rank = rng.random((*shape, 512)).argsort(-1)
    rest = rng.integers(0, 1 << 16, (*shape, 512)) & 0x807F
    return np.where(rank < count, high, low) << 7 | rest


CONTENTS = {
    "special": special_blocks,
    "outliers": outlier_blocks,
    "edges": edge_blocks,
}


@pytest.mark.parametrize("max_exceptions", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("content", CONTENTS)
def test_hard_blocks(paired: Callable, content: str, max_exceptions: int) -> None:
    """3,072 blocks: every kind must come out as the reference chooses, byte for byte."""
    pair = paired(KVShape(1, 4, 4, 128, max_exceptions=max_exceptions), 96)
    rng = np.random.default_rng(max_exceptions)
    blocks = CONTENTS[content](rng, (96, 4, 2, pair.shape.layout.blocks_per_part))
    k, v = blocks_to_values(blocks, pair.shape.layout)
    ids = torch.randperm(96)
    pair.append(0, k, v, slots_of(ids, 16))
    pair.seal(0, ids)
    descriptors = pair.cpu.descriptors(0, ids)
    assert torch.equal(pair.gpu.descriptors(0, ids.to(DEVICE)).cpu(), descriptors)
    pair.assert_same(content)
    assert_holds(pair.gpu, 0, ids, k, v)
    # The test means something: all kinds of blocks that this format has are there.
    assert (descriptors < 128).any()
    assert (descriptors == 255).any()
    assert ((descriptors >= 128) & (descriptors < 255)).any() == (max_exceptions > 0)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_hard_blocks_of_other_shapes(paired: Callable, head_dim: int, rope: str) -> None:
    """Many blocks in a part, and four: spans of several chunks, and of less than one."""
    pair = paired(KVShape(1, 3, 3, head_dim, 32, rope), 8)
    rng = np.random.default_rng(head_dim)
    shape = (8, 3, 2, pair.shape.layout.blocks_per_part)
    for content, make in CONTENTS.items():
        k, v = blocks_to_values(make(rng, shape), pair.shape.layout)
        ids = torch.randperm(8)
        pair.append(0, k, v, slots_of(ids, 32))
        pair.seal(0, ids)
        pair.assert_same(content)
        assert_holds(pair.gpu, 0, ids, k, v)
        pair.clear(0, ids)


def test_all_bit_patterns(paired: Callable) -> None:
    """Each of the 65,536 patterns, raw and sealed, in a random order and in its natural order."""
    pair = paired(KVShape(1, 2, 2, 64), 64)
    for order in (torch.randperm(1 << 16), torch.arange(1 << 16)):
        k = from_patterns(order).view(-1, 2, 64)
        v = from_patterns(order.flip(0)).view(-1, 2, 64)
        ids = torch.randperm(64)[: len(k) // 16]
        pair.append(0, k, v, slots_of(ids, 16))
        assert_holds(pair.gpu, 0, ids, k, v)
        pair.seal(0, ids)
        pair.assert_same("all patterns")
        assert_holds(pair.gpu, 0, ids, k, v)
        pair.clear(0, ids)


def test_pages_that_do_not_compress(paired: Callable) -> None:
    """Random bits: sealed pages as long as raw ones, in place over themselves."""
    pair = paired(KVShape(1, 8, 8, 128), 6)
    k, v = from_patterns(torch.randint(1 << 16, (2, 96, 8, 128)))
    ids = torch.randperm(6)
    pair.append(0, k, v, slots_of(ids, 16))
    pair.seal(0, ids)
    assert (pair.gpu.page_bytes(0, ids.to(DEVICE)) == 65664).all()
    pair.assert_same("random bits")
    assert_holds(pair.gpu, 0, ids, k, v)


def test_slots_never_written_stay_apart(paired: Callable) -> None:
    """Pages that are partly filled decode to the tokens they have, and NaN elsewhere."""
    pair = paired(KVShape(1, 2, 2, 128, 32), 5)
    k, v = (mixed_values((160, 2, 128), seed) for seed in (1, 2))
    slots = torch.randperm(160)[:70]
    pair.append(0, k[:70], v[:70], slots)
    want_k, want_v = pair.cpu.read(0, range(5))
    assert int(want_k.isnan().all(-1).all(-1).sum()) >= 90
    assert_holds(pair.gpu, 0, torch.arange(5), want_k, want_v)
