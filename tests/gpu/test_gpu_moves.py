"""Pages sealed to places elsewhere, and that no uncompressed copy of a sealed page is left."""

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
    nan,
    poison_unused,
    slots_of,
    used_units,
)
from torch import Tensor

from zf_cute import KVShape, PageStateError, PageStore, launch

pytestmark = pytest.mark.gpu

SHAPE = KVShape(2, 4, 4, 64, heads_per_span=2)  # two spans a page
PAGES, MOVED = 16, 6


@pytest.fixture
def filled(made: Callable) -> tuple[PageStore, Tensor, Tensor, Tensor, Tensor]:
    """Layer 1 with six full pages; their ids, their K and V, and the ids not used."""
    store = made(SHAPE, PAGES)
    order = torch.randperm(PAGES)
    ids, unused = order[:MOVED].to(DEVICE), order[MOVED:].to(DEVICE)
    k, v = (mixed_values((16 * MOVED, 4, 64), seed) for seed in (1, 2))
    store.append(1, k.to(DEVICE), v.to(DEVICE), slots_of(ids, 16))
    return store, ids, k, v, unused


def elsewhere(store: PageStore, unused: Tensor) -> Tensor:
    """Room for six pages of two spans in the homes of other pages, in any order."""
    homes = store.state(1).homes[unused, :, 0].flatten()
    shuffled = homes[torch.randperm(len(homes), device=DEVICE)]
    return shuffled[: 2 * MOVED].view(MOVED, 2).contiguous()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_spans_go_where_they_are_told(filled: tuple, index: torch.dtype) -> None:
    """Both spans of a page to homes apart: bytes and places; the pages' own homes stay."""
    store, ids, k, v, unused = filled
    kv, state = store.layer(1), store.state(1)
    destinations = elsewhere(store, unused)
    before, homes = store.pool.clone(), state.homes.clone()
    lengths = torch.full((MOVED, 2), -1, dtype=torch.int32, device=DEVICE)
    got = launch.encode(kv, state, ids.to(index), destinations=destinations, lengths=lengths)
    assert got is lengths
    assert torch.equal(kv.places[ids, :, 0], destinations)
    assert torch.equal(kv.places[ids, :, 1], lengths)
    assert torch.equal(state.homes, homes)
    assert_sealed_as_reference(store, 1, ids, k, v)
    assert_holds(store, 1, ids, k, v)
    # Only bytes of the sealed spans have changed.
    moved = used_units(kv.places[ids], store.pool.numel())
    units, old = (x.view(torch.int64).view(-1, 2) for x in (store.pool, before))
    assert torch.equal(units[~moved], old[~moved])
    # And what is left in the old homes is nobody's.
    poison_unused(store)
    assert_holds(store, 1, ids, k, v)


def test_any_multiple_of_128_bytes_is_a_destination(filled: tuple) -> None:
    """A span may begin anywhere in room that is free, not only where a page has its home."""
    store, ids, k, v, unused = filled
    free = set(unused.tolist())  # ten of sixteen: two are neighbours
    first = next(page for page in free if page + 1 in free)
    home = int(store.state(1).homes[first, 1, 0])
    destinations = store.state(1).homes[ids[:1], :, 0].contiguous()
    destinations[0, 1] = home + 5  # the second span ends in the next page's home
    launch.encode(store.layer(1), store.state(1), ids[:1], destinations=destinations)
    assert store.places[1, ids[0], :, 0].tolist() == [int(destinations[0, 0]), home + 5]
    assert_sealed_as_reference(store, 1, ids[:1], k[:16], v[:16])
    assert_holds(store, 1, ids, k, v)


def test_a_destination_may_be_the_own_place(filled: tuple) -> None:
    """Some in place and some elsewhere in one launch."""
    store, ids, k, v, unused = filled
    destinations = elsewhere(store, unused)
    destinations[::2] = store.state(1).homes[ids[::2], :, 0]
    launch.encode(store.layer(1), store.state(1), ids, destinations=destinations)
    assert_sealed_as_reference(store, 1, ids, k, v)
    poison_unused(store)
    assert_holds(store, 1, ids, k, v)


def test_a_moved_page_takes_no_tokens_and_comes_home_when_cleared(filled: tuple) -> None:
    """Append is refused in it; clear makes it raw at its home, and leaves the other place alone."""
    store, ids, k, v, unused = filled
    kv, state = store.layer(1), store.state(1)
    launch.encode(kv, state, ids, destinations=elsewhere(store, unused))
    before = [x.clone() for x in (store.pool, store.places, state.written, state.sealed)]
    rows = slice(5, 45)  # single rows and whole tiles
    store.append(1, k[rows].to(DEVICE), v[rows].to(DEVICE), slots_of(ids, 16)[rows])
    for old, new in zip(
        before, (store.pool, store.places, state.written, state.sealed), strict=True
    ):
        assert torch.equal(old, new)
    with pytest.raises(PageStateError, match=r"refused 40 rows with a slot in a sealed page: noth"):
        store.check()

    places = kv.places[ids[:3]].clone()
    store.clear(1, ids[:3])
    assert torch.equal(kv.places[ids[:3]], state.homes[ids[:3]])
    assert not store.is_sealed(1, ids[:3]).any()
    assert store.is_sealed(1, ids[3:]).all()
    assert (state.written[ids[:3]] == 0).all()
    left = used_units(places, store.pool.numel())
    units, old = (x.view(torch.int64).view(-1, 2) for x in (store.pool, before[0]))
    assert torch.equal(units[left], old[left])
    # Filled anew, in another order, at home; the others are still where they went.
    store.append(1, v[:48].to(DEVICE), k[:48].to(DEVICE), slots_of(ids[:3].flip(0), 16))
    assert_holds(store, 1, ids[:3].flip(0), v[:48], k[:48])
    store.seal(1, ids[:3])
    poison_unused(store)
    assert_holds(store, 1, ids[:3].flip(0), v[:48], k[:48])
    assert_holds(store, 1, ids[3:], k[48:], v[48:])


def test_another_layer_does_not_notice(filled: tuple) -> None:
    """Its homes may be where this layer's pages go: only places say whose bytes are whose."""
    store, ids, k, v, _ = filled
    homes = store.state(0).homes  # of layer 0, whose pages are all empty
    launch.encode(
        store.layer(1), store.state(1), ids, destinations=homes[ids.flip(0), :, 0].contiguous()
    )
    assert torch.equal(store.places[0], homes)
    assert not store.is_sealed(0, range(PAGES)).any()
    assert_sealed_as_reference(store, 1, ids, k, v)
    assert_holds(store, 1, ids, k, v)


# ---- bytes -------------------------------------------------------------------------------------
GIGABYTE = 16384
"""Pages of 65,664 bytes that make 1 GB."""


def tiled(real_kv: dict[str, Tensor], part: str, tokens: int) -> Tensor:
    """Real keys or values of 8 heads on the device, repeated to many tokens."""
    x = real_kv[f"qwen2.5-coder-1.5b/layer7/{part}"].to(DEVICE)
    return x.repeat(-(-tokens // len(x)), 8 // x.shape[1], 1)[:tokens]


@pytest.mark.parametrize("move", [False, True])
def test_sealing_a_gigabyte_leaves_no_second_copy(
    made: Callable, real_kv: dict[str, Tensor], move: bool
) -> None:
    """Counted in bytes: of the pool, of places, and of what the allocator was asked for."""
    pages = GIGABYTE
    store: PageStore = made(KVShape(1, 8, 8, 128), 2 * pages if move else pages)
    kv, state = store.layer(0), store.state(0)
    k, v = (tiled(real_kv, part, 16 * pages) for part in "kv")
    ids = torch.randperm(store.num_pages, device=DEVICE)
    ids, unused = ids[:pages], ids[pages:]
    launch.append(kv, state, k, v, slots_of(ids, 16))
    raw = int(store.page_bytes(0, ids).sum())
    assert raw == pages * 65664
    destinations = state.homes[unused, :, 0].contiguous() if move else None

    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lengths = launch.encode(kv, state, ids, destinations=destinations)
    torch.cuda.synchronize()
    # Allocations are rounded up to 512 bytes; the lengths are all that is new.
    assert torch.cuda.memory_allocated() - held == lengths.nbytes == 4 * pages
    assert torch.cuda.max_memory_allocated() - held < 1 << 20

    sealed = int(lengths.sum())
    assert sealed < 0.85 * raw  # real keys and values lose about a quarter
    assert int(store.page_bytes(0, ids).sum()) == sealed
    assert torch.equal(store.page_bytes(0, ids), lengths.long().sum(1))
    # Places say all that is read: one piece for each span, apart, and as many bytes as was said.
    start, length = (kv.places[ids].long() & 0xFFFFFFFF).unbind(-1)
    start, order = (start.flatten() * 128).sort()
    length = length.flatten()[order]
    assert (start[1:] >= (start + length)[:-1]).all()
    used = used_units(kv.places[ids], store.pool.numel())
    assert 16 * int(used.sum()) == sealed
    if not move:  # in place: the freed bytes are the tails of homes
        assert torch.equal(kv.places[..., 0], state.homes[..., 0])
    # So every other byte can be lost, the raw copies among them, and nothing is missed.
    nans = nan(8).view(torch.int64)
    store.pool.view(torch.int64).view(-1, 2)[~used] = nans
    got_k, got_v = store.read(0, ids)
    assert_same_bits(got_k, k, "k")
    assert_same_bits(got_v, v, "v")


def test_seal_of_a_store_allocates_sizes_only(made: Callable, real_kv: dict[str, Tensor]) -> None:
    """`PageStore.seal` too: what it allocates is what it returns, and lengths in between."""
    pages = 1024
    store: PageStore = made(KVShape(1, 8, 8, 128), pages)
    k, v = (tiled(real_kv, part, 16 * pages) for part in "kv")
    ids = torch.randperm(pages, device=DEVICE)
    store.append(0, k, v, slots_of(ids, 16))
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sizes = store.seal(0, ids)
    assert torch.cuda.memory_allocated() - held == sizes.nbytes == 8 * pages
    assert torch.cuda.max_memory_allocated() - held <= 2 * (8 + 4) * pages  # and sum's own
    assert torch.equal(sizes, store.page_bytes(0, ids))
