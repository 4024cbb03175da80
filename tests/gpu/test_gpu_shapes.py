"""Every shape, through the whole life of pages: the same bytes as the reference at every step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from bits import mixed_values
from gpu.gpu_store import DEVICE, Pair, assert_holds, assert_same_bits, slots_of
from torch import Tensor

from zf_cute import KVShape

pytestmark = pytest.mark.gpu

LAYER, PAGES = 1, 6  # of two layers: the other one stays as it is


def padded(x: Tensor) -> Tensor:
    """On the GPU, dense rows that begin 2 bytes past a multiple of 16, with NaN around them."""
    wide = torch.full((*x.shape[:2], x.shape[2] + 2), torch.nan, dtype=x.dtype, device=DEVICE)
    view = wide[:, :, 1:-1]
    return view.copy_(x)


def dims_first(x: Tensor) -> Tensor:
    """On the GPU, with neighbouring tokens next to each other."""
    return x.to(DEVICE).permute(2, 1, 0).contiguous().permute(2, 1, 0)


def fused(x: Tensor) -> Tensor:
    """On the GPU, as the middle of fused rows: dense, aligned, and far apart."""
    wide = torch.full((x.shape[0], 3, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE)
    view = wide[:, 1]
    return view.copy_(x)


def shifted(x: Tensor) -> Tensor:
    """On the GPU, contiguous, but from 2 bytes past a multiple of 16 on."""
    flat = torch.full((x.numel() + 8,), torch.nan, dtype=x.dtype, device=DEVICE)
    return flat[1 : 1 + x.numel()].view(x.shape).copy_(x)


def live(pair: Pair, index: torch.dtype) -> None:
    """Append in pieces, seal, read, clear and fill again, comparing after every step."""
    size, heads, dim = pair.shape.page_size, pair.shape.num_kv_heads, pair.shape.head_dim
    k, v = (mixed_values((4 * size, heads, dim), seed) for seed in (heads, size))
    ids = torch.randperm(PAGES)[:4]
    slots = slots_of(ids, size)
    # One row; 16 that lie in two tiles; rows that begin inside a tile; most, from inside a tile on,
    # so that windows of 16 rows and tiles of 16 slots lie askew; the rest.
    cuts = (0, 1, 17, 34, 4 * size - 5, 4 * size)
    strided = {1: (fused, fused), 17: (padded, dims_first), 34: (fused, padded)}
    for begin, end in pairwise(cuts):
        rows = slice(begin, end)
        views = None
        if begin in strided:
            views = tuple(make(x[rows]) for make, x in zip(strided[begin], (k, v), strict=True))
        pair.append(LAYER, k[rows], v[rows], slots[rows], index=index, views=views)
        pair.assert_same(f"rows {begin} to {end}", everywhere=True)
    assert_holds(pair.gpu, LAYER, ids.to(index), k, v)

    pair.seal(LAYER, ids[:3], index=index)
    pair.assert_same("three of four pages sealed")
    assert_holds(pair.gpu, LAYER, ids.to(index), k, v)

    pair.clear(LAYER, ids[1:3], index=index)
    pair.assert_same("two of them cleared")
    # Whole pages at once: every row is part of an aligned tile.
    pair.append(LAYER, k[: 2 * size], v[: 2 * size], slots[size : 3 * size], index=index)
    pair.assert_same("filled again")
    pair.seal(LAYER, ids[1:4], index=index)
    pair.assert_same("all sealed")
    order = torch.tensor([0, 0, 1, 3])  # of pages in k and v, as ids[0..3] hold them now
    pages = (4, size, heads, dim)
    assert_holds(
        pair.gpu,
        LAYER,
        ids.to(index),
        k.view(pages)[order].flatten(0, 1),
        v.view(pages)[order].flatten(0, 1),
    )


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "heads_per_span"), [(1, 0), (3, 0), (8, 2)])
def test_the_life_of_pages(
    paired: Callable, head_dim: int, page_size: int, rope: str, heads: int, heads_per_span: int
) -> None:
    shape = KVShape(
        2, heads, heads, head_dim, page_size, rope, 4 if rope == "half" else 2, heads_per_span
    )
    live(paired(shape, PAGES), torch.int32 if heads == 3 else torch.int64)


@pytest.mark.parametrize("heads", [2, 5, 7, 8, 16, 40])
def test_any_number_of_heads(paired: Callable, heads: int) -> None:
    """Spans of every number of heads: primes, powers of two, more heads than a span takes."""
    live(paired(KVShape(2, heads, heads, 64), PAGES), torch.int64)


@pytest.mark.parametrize("heads_per_span", [1, 2, 4, 8, 16])
def test_any_number_of_heads_in_a_span(paired: Callable, heads_per_span: int) -> None:
    """The last is a span of 1 MiB, past what fits in shared memory: nothing may rely on that."""
    shape = KVShape(2, 16, 16, 256, 64, heads_per_span=heads_per_span)
    live(paired(shape, PAGES), torch.int32)


@pytest.mark.parametrize("strided", [padded, dims_first, fused, shifted])
def test_rows_of_any_strides(paired: Callable, strided: Callable) -> None:
    """Each layout of K beside each of V; slots, too, are read with a stride."""
    pair = paired(KVShape(1, 2, 2, 128), 8)
    k, v = (mixed_values((64, 2, 128), seed) for seed in (1, 2))
    slots = torch.randperm(8 * 16)[:64]
    for other in (padded, dims_first, fused, shifted):
        pair.append(0, k, v, slots, views=(strided(k), other(v)))
        pair.append(0, v, k, slots, views=(other(v), strided(k)))
        pair.assert_same(f"{strided.__name__} and {other.__name__}", everywhere=True)
    for index in (torch.int32, torch.int64):
        wide = torch.full((64, 3), -7, dtype=index, device=DEVICE)
        wide[:, 1] = slots.to(DEVICE, index)
        pair.cpu.append(0, k, v, slots)
        pair.gpu.append(0, k.to(DEVICE), v.to(DEVICE), wide[:, 1])
        pair.assert_same(f"slots of {index} with a stride of 3", everywhere=True)


def test_one_token_for_all_slots(paired: Callable) -> None:
    """Rows with stride 0."""
    pair = paired(KVShape(1, 2, 2, 128), 4)
    k, v = (mixed_values((16, 2, 128), seed)[:1] for seed in (3, 4))
    slots = torch.arange(5, 53)
    views = tuple(x.to(DEVICE).expand(48, -1, -1) for x in (k, v))
    pair.append(0, k.expand(48, -1, -1), v.expand(48, -1, -1), slots, views=views)
    pair.assert_same("expanded rows", everywhere=True)


def test_skipped_rows(paired: Callable) -> None:
    """-1 anywhere: at the ends, inside a tile, for a whole batch."""
    pair = paired(KVShape(1, 2, 2, 64), 8)
    k, v = (mixed_values((112, 2, 64), seed) for seed in (5, 6))
    slots = torch.arange(8, 120)
    slots[torch.tensor([0, 1, 20, 40, 41, 42, 63, 64, 111])] = -1
    for index in (torch.int32, torch.int64):
        pair.append(0, k, v, torch.full((112,), -1), index=index)
        pair.append(0, k, v, slots, index=index)
        pair.assert_same("skipped rows", everywhere=True)
        k, v = v, k


def test_nothing_to_do(paired: Callable) -> None:
    """No rows and no pages: nothing is launched, and nothing changes."""
    pair = paired(KVShape(1, 2, 2, 64), 2)
    empty = torch.empty(0, dtype=torch.int64)
    rows = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    pair.append(0, rows, rows, empty)
    pair.seal(0, empty)
    pair.clear(0, empty)
    assert_same_bits(pair.gpu.read(0, [])[0].cpu(), rows, "no pages read")
    pair.assert_same("nothing done", everywhere=True)


def test_windows_of_rows_everywhere_in_tiles(paired: Callable) -> None:
    """A tile may begin at any row of a window, and tiles and single rows take turns.

    Sequences of 37, 16, 3, 50, ... tokens one after another, each in pages of its own: what a
    ragged prefill looks like.  Once in few rows, where warps share a window, and once in many.
    """
    pair = paired(KVShape(1, 1, 1, 64), 700)
    lengths = [37, 16, 3, 50, 1, 31, 32, 33, 64, 2, 15, 17] * 16
    pages, slots = torch.randperm(700), []
    used = 0
    for length in lengths:
        count = -(-length // 16)
        slots.append(slots_of(pages[used : used + count], 16)[:length])
        used += count
    for some in (slots[:12], slots):
        mapping = torch.cat(some)
        padding = -len(mapping) % 16
        k, v = (mixed_values((len(mapping) + padding, 1, 64), seed) for seed in (7, 8))
        pair.append(0, k[: len(mapping)], v[: len(mapping)], mapping)
        pair.assert_same(f"{len(some)} sequences", everywhere=True)
