"""Batches of one page to a million, pools past 4 and 8 GiB, and offsets past 2**31 elements.

All but a sample is compared on the device: what is decoded must be what was appended.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bits import mixed_values
from gpu.gpu_store import (
    DEVICE,
    assert_holds,
    assert_same_bits,
    assert_sealed_as_reference,
    decoded,
    slots_of,
)
from torch import Tensor

from zf_cute import KVShape, PageStore, launch

pytestmark = pytest.mark.gpu

MILLION = 1 << 20
GIB = 1 << 30


def mixed_on_device(tokens: int, heads: int, dim: int) -> Tensor:
    """Blocks of all kinds, made on the device: of five pages two compress, one is random bits."""
    x = torch.randn(tokens, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    pages = x.view(-1, 16 * heads * dim)
    pages[0::5] += 4  # hardly a value near zero: no or few exceptions
    pages[1::5] += 4
    random = pages[2::5]
    random.copy_(
        torch.randint(-(1 << 15), 1 << 15, random.shape, dtype=torch.int16, device=DEVICE).view(
            torch.bfloat16
        )
    )
    return x


# ---- how many pages ----------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_batches(paired: Callable, count: int) -> None:
    """One page, two, a thousand in one launch each, among pages that stay as they are."""
    pair = paired(KVShape(1, 2, 2, 64), 1003)
    ids = torch.randperm(1003)[:count]
    k, v = (mixed_values((16 * count, 2, 64), seed) for seed in (count, count + 1))
    pair.append(0, k, v, slots_of(ids, 16))
    pair.assert_same("appended", everywhere=True)
    assert_holds(pair.gpu, 0, ids, k, v)
    pair.seal(0, ids)
    pair.assert_same("sealed")
    assert_holds(pair.gpu, 0, ids, k, v)
    # Pages may be asked for in any order, and more than once.
    order = torch.randint(count, (count + 1,))
    pages = (count, 16, 2, 64)
    want = (x.view(pages)[order].flatten(0, 1) for x in (k, v))
    assert_holds(pair.gpu, 0, ids[order], *want)
    pair.clear(0, ids)
    pair.assert_same("cleared")


def test_a_million_pages(made: Callable) -> None:
    """One launch each of append, encode and decode over 2**20 spans, 4.4 GB of pool."""
    store: PageStore = made(KVShape(1, 1, 1, 64), MILLION)
    kv, state = store.layer(0), store.state(0)
    k, v = (mixed_on_device(16 * MILLION, 1, 64) for _ in "kv")
    ids = torch.randperm(MILLION, dtype=torch.int32, device=DEVICE)
    launch.append(kv, state, k, v, slots_of(ids, 16))
    assert (state.written == (1 << 16) - 1).all()
    assert_holds(store, 0, ids, k, v)
    lengths = torch.full((MILLION, 1), -1, dtype=torch.int32, device=DEVICE)
    assert launch.encode(kv, state, ids, lengths=lengths) is lengths
    assert (state.sealed == 1).all()
    assert torch.equal(kv.places[ids.long(), :, 1], lengths)
    raw = store.shape.layout.raw_span_bytes
    assert (lengths % 16 == 0).all()
    assert (lengths >= 16 + 4 * 768).all()
    assert (lengths <= raw).all()
    assert int((lengths == raw).sum()) >= MILLION // 5  # random bits
    assert int((lengths <= 16 + 4 * 784).sum()) >= MILLION // 4  # and those near 4
    assert_holds(store, 0, ids, k, v)
    sample = torch.cat([torch.tensor([0, 1, MILLION - 1]), torch.randint(MILLION, (61,))])
    rows = slots_of(sample.to(DEVICE), 16)
    assert_sealed_as_reference(store, 0, ids[sample.to(DEVICE)], k[rows], v[rows])


# ---- where pages lie ---------------------------------------------------------------------------
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("gib", [4, 8])
def test_pages_past_32_bit_offsets(made: Callable, gib: int, index: torch.dtype) -> None:
    """The last pages of a pool that reaches past 4 (8) GiB, and nothing 4 GiB below them.

    A byte offset cut to 32 bits would land exactly there.  Also the pages across the boundary.
    """
    shape = KVShape(1, 8, 8, 128)
    stride = shape.layout.page_stride
    num_pages = gib * GIB // stride + 20
    store: PageStore = made(shape, num_pages)
    kv, state = store.layer(0), store.state(0)
    across = gib * GIB // stride
    assert across * stride < gib * GIB < (across + 1) * stride
    ids = torch.tensor([num_pages - 1, across, num_pages - 2, across + 1], device=DEVICE)
    ids = ids.to(index)
    spare = num_pages - 4  # an id that is not used: its home takes a page that moves
    k, v = (mixed_values((64, 8, 128), seed) for seed in (gib, gib + 1))
    before = store.pool.clone()

    slots = slots_of(ids, 16)
    gpu_k, gpu_v = k.to(DEVICE), v.to(DEVICE)
    launch.append(kv, state, gpu_k[:37], gpu_v[:37], slots[:37])
    for row in range(37, 48):  # one by one, and the rest as a tile
        some = slice(row, row + 1)
        launch.append(kv, state, gpu_k[some], gpu_v[some], slots[some])
    launch.append(kv, state, gpu_k[48:], gpu_v[48:], slots[48:])
    assert_holds(store, 0, ids, k, v)
    launch.encode(kv, state, ids[:3])
    assert_sealed_as_reference(store, 0, ids[:3], k[:48], v[:48])
    destinations = state.homes[spare : spare + 1, :, 0].contiguous()
    launch.encode(kv, state, ids[3:], destinations=destinations)
    assert_sealed_as_reference(store, 0, ids[3:], k[48:], v[48:])
    assert (kv.places[ids[3].long(), :, 0] == destinations[0]).all()
    assert_holds(store, 0, ids, k, v)

    # Nothing else has changed: with the homes that were used put back, the pool is as before.
    used = [*ids.tolist(), spare]
    for page in used:
        home = slice(page * stride, (page + 1) * stride)
        assert not torch.equal(store.pool[home], before[home])
        before[home] = store.pool[home]
    assert torch.equal(store.pool.view(torch.int64), before.view(torch.int64))
    launch.clear(kv, state, ids)
    assert torch.equal(kv.places, state.homes)
    metadata = torch.tensor(list(shape.layout.raw_metadata()), dtype=torch.uint8, device=DEVICE)
    for page in ids.tolist():
        home = slice(page * stride, page * stride + len(metadata))
        assert torch.equal(store.pool[home], metadata)
        before[home] = metadata
    assert torch.equal(store.pool.view(torch.int64), before.view(torch.int64))


# ---- where rows lie ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def six_gib() -> Tensor:
    """3 * 2**30 elements of NaN."""
    return torch.full((3 * GIB,), torch.nan, dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize(
    "strides",
    [
        ((1 << 26) + 8, 64),  # tokens far apart, 16-byte rows: 40 of them span 2.6 * 2**30
        ((1 << 26) + 1, 64),  # the same, read value by value
        (128, (1 << 30) + 64),  # heads far apart: the third is past 2**31
        ((1 << 31) + 8, 64),  # one stride that is past 2**31 itself
    ],
)
def test_rows_past_2_to_the_31_elements(
    made: Callable, six_gib: Tensor, strides: tuple[int, int]
) -> None:
    """Views of a tensor of 6 GiB whose later rows lie past 2**31 elements, K and V in turn."""
    token, head = strides
    tokens = 2 if token > 1 << 31 else 40
    heads = 2 if head == 64 else 3
    shape = (tokens, heads, 64)
    reach = (tokens - 1) * token + (heads - 1) * head + 64
    assert reach > 1 << 31
    store: PageStore = made(KVShape(1, heads, heads, 64), 4)
    kv, state = store.layer(0), store.state(0)
    k = six_gib.as_strided(shape, (token, head, 1), 0)
    # V lies in the gaps of K: between its tokens, or its heads.
    v = six_gib.as_strided(shape, (token, head, 1), 16 * GIB // 1024)
    values = [mixed_values((48, heads, 64), seed)[:tokens] for seed in (1, 2)]
    for view, x in zip((k, v), values, strict=True):
        view.copy_(x)
    slots = torch.arange(tokens, device=DEVICE) + 16
    for first, second in ((0, 1), (1, 0)):
        views = (k, v)
        launch.append(kv, state, views[first], views[second], slots)
        got = decoded(store, 0, torch.arange(4))
        for name, out, want in zip("kv", got, (values[first], values[second]), strict=True):
            assert_same_bits(out[16 : 16 + tokens], want, name)
            assert out[:16].isnan().all()
    for view in (k, v):
        view.fill_(torch.nan)
