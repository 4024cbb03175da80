"""What stands in for the kernels refuses what they do, an item at a time, whatever the spans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits
from store.small_store import PAGES, SHAPE, assert_unchanged, fill, poisoned, snapshot

from zf_cute import KVShape, LayerPages, PageStore, launch
from zf_cute.kernels.refusals import Refusal

OUTSIDE = -1
"""A start of 512 GiB less one unit."""


@pytest.fixture(params=[1, 2, 4])
def shape(request: pytest.FixtureRequest) -> KVShape:
    """A shape of so many spans a page."""
    heads = 4
    return replace(
        SHAPE, num_kv_heads=heads, num_qo_heads=heads, heads_per_span=heads // request.param
    )


@pytest.fixture
def store(kernels: None, shape: KVShape) -> PageStore:
    """Layer 0: pages 0, 1 and 2 full."""
    store = poisoned(PageStore(shape, PAGES, backend="kernels"))
    fill(store, 0, [0, 1, 2], 31)
    return store


def refuses(store: PageStore, **counts: int) -> None:
    """What was refused since the last check, by name, and nothing else."""
    counted = dict(zip((r.name for r in Refusal), store._refused.tolist(), strict=True))
    assert {name: n for name, n in counted.items() if n} == counts
    store._refused.zero_()


def unchanged_but_counts(store: PageStore, before: dict[str, torch.Tensor]) -> None:
    """Every tensor of the store is as it was, the counts of refusals apart."""
    assert_unchanged(store, {name: x for name, x in before.items() if name != "_refused"})


def room(store: PageStore, pages: list[int]) -> torch.Tensor:
    """The homes of some pages as destinations."""
    return store.state(0).homes[pages, :, 0].contiguous()


def test_items_count_once(store: PageStore) -> None:
    """Out of range, sealed, empty: a count for each id, not for each span."""
    kv, state = store.layer(0), store.state(0)
    launch.encode(kv, state, torch.tensor([1]))
    before = snapshot(store)
    lengths = launch.encode(kv, state, torch.tensor([PAGES, 1, 5, -1]))
    assert not lengths.any()
    unchanged_but_counts(store, before)
    refuses(store, PAGE_OUTSIDE=2, PAGE_NOT_SEALABLE=2)
    launch.decode_pages(kv, state, torch.tensor([PAGES, 1]))
    launch.clear(kv, state, torch.tensor([-2, PAGES]))
    unchanged_but_counts(store, before)
    refuses(store, PAGE_OUTSIDE=3)


def test_of_equal_ids_one_item_seals_the_whole_page(store: PageStore) -> None:
    """To where that item says; the page is claimed by it, until it is cleared."""
    kv, state = store.layer(0), store.state(0)
    held = [x.clone() for x in store.read(0, [2])]
    to = room(store, [3, 4, 5])
    lengths = launch.encode(kv, state, torch.tensor([2, 2, 2]), destinations=to)
    (winner,) = torch.nonzero(lengths.any(1)).flatten().tolist()
    assert (lengths[winner] > 0).all()
    assert torch.equal(kv.places[2, :, 0], to[winner])
    assert torch.equal(kv.places[2, :, 1], lengths[winner])
    assert state.claimed.tolist() == [0, 0, winner + 1, 0, 0, 0]
    refuses(store, PAGE_NOT_SEALABLE=2)
    assert all(map(same_bits, store.read(0, [2]), held))
    launch.clear(kv, state, torch.tensor([2]))
    assert not state.claimed.any()


@pytest.mark.parametrize("bad", [0, -1])
def test_destinations_outside_the_pool(store: PageStore, bad: int) -> None:
    """A page of which one span has no room stays whole, counts once, and can be sealed later."""
    kv, state = store.layer(0), store.state(0)
    last = (kv.pool.numel() - kv.layout.raw_span_bytes) // 128
    to = room(store, [3, 4, 5])
    to[0, bad], to[2, bad] = OUTSIDE, last + 1
    before = snapshot(store)
    lengths = launch.encode(kv, state, torch.tensor([0, 2]), destinations=to[[0, 2]])
    assert not lengths.any()
    unchanged_but_counts(store, before)
    refuses(store, DESTINATION_OUTSIDE=2)
    lengths = launch.encode(kv, state, torch.tensor([0, 1, 2]), destinations=to)
    assert (lengths > 0).all(1).tolist() == [False, True, False]
    assert (lengths > 0).any(1).tolist() == [False, True, False]
    refuses(store, DESTINATION_OUTSIDE=2)
    assert (launch.encode(kv, state, torch.tensor([2, 0])) > 0).all()
    refuses(store)


@pytest.mark.parametrize("missing", [0, 1])
def test_room_that_ends_where_the_pool_does(store: PageStore, missing: int) -> None:
    """Of the bytes of a raw span, however short the sealed one is."""
    kv, state = store.layer(0), store.state(0)
    to = room(store, [3])
    end = (int(to.max()) & 0xFFFFFFFF) * 128 + kv.layout.raw_span_bytes - missing
    cut = LayerPages(kv.pool[:end], kv.places, kv.layout)
    lengths = launch.encode(cut, state, torch.tensor([0]), destinations=to)
    assert (lengths > 0).all() == lengths.any() == (not missing)
    refuses(store, **({"DESTINATION_OUTSIDE": 1} if missing else {}))


def test_what_else_is_wrong_counts_before_a_destination(store: PageStore) -> None:
    """One reason an item: the page first."""
    kv, state = store.layer(0), store.state(0)
    store.seal(0, [1])
    to = torch.full((4, kv.layout.spans), OUTSIDE, dtype=torch.int32)
    launch.encode(kv, state, torch.tensor([1, PAGES, 4, 0]), destinations=to)
    refuses(store, PAGE_OUTSIDE=1, PAGE_NOT_SEALABLE=2, DESTINATION_OUTSIDE=1)
