"""What kernels refuse: it stays as it was, everything beside it is done, and `check` counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bits import mixed_values
from gpu.gpu_store import DEVICE, assert_holds, assert_same_bits, decoded, slots_of
from store.small_store import assert_unchanged, snapshot
from torch import Tensor

from zf_cute import KVShape, LayerPages, PageStateError, PageStore, launch

pytestmark = pytest.mark.gpu

PAGES = 8
SEALED, FULL, PARTLY, EMPTY = (0, 1), (2, 3, 4), 5, (6, 7)


def used_store(made: Callable, heads_per_span: int = 0) -> tuple[PageStore, Tensor, Tensor]:
    """Pages 0 and 1 sealed, 2 to 4 full, 5 with 7 tokens, 6 and 7 empty; and what they hold."""
    store = made(KVShape(1, 2, 2, 64, heads_per_span=heads_per_span), PAGES)
    k, v = (mixed_values((96, 2, 64), seed) for seed in (1, 2))
    rows = torch.arange(87)
    store.append(0, k[rows].to(DEVICE), v[rows].to(DEVICE), rows.to(DEVICE))
    store.seal(0, torch.tensor(SEALED, device=DEVICE))
    store.check()
    return store, k[:80], v[:80]


def unchanged_but_counts(store: PageStore, before: dict[str, Tensor]) -> None:
    """Every tensor of the store is as it was, the counts of refusals apart."""
    assert_unchanged(store, {name: x for name, x in before.items() if name != "_refused"})


def refused(store: PageStore, *said: str) -> None:
    """`check` says exactly this, once."""
    with pytest.raises(PageStateError) as raised:
        store.check()
    assert str(raised.value) == (
        f"the kernels refused {'; '.join(said)}: nothing was written there, and what was read is "
        "zeros"
    )
    store.check()  # the counts have started again


# ---- append ------------------------------------------------------------------------------------
OUTSIDE = {
    torch.int32: (128, -2, (1 << 31) - 1, -(1 << 31)),
    # Two of these are fine slots in 32 bits.
    torch.int64: (128, -2, (1 << 32) + 96, -(1 << 32) + 97, (1 << 63) - 1, -(1 << 63)),
}


@pytest.mark.parametrize("index", OUTSIDE)
@pytest.mark.parametrize("rows", [3, 40, 20000])
def test_slots_out_of_range(made: Callable, index: torch.dtype, rows: int) -> None:
    """Left out, whether warps share a window (few rows) or not; the other rows are written."""
    store, k, v = used_store(made)
    outside = OUTSIDE[index]
    slots = torch.full((rows + len(outside),), -1, dtype=index)
    slots[torch.randperm(len(slots))[: len(outside)]] = torch.tensor(outside, dtype=index)
    free = torch.nonzero(slots == -1).flatten()
    some = free[torch.randperm(len(free))[:2]]
    slots[some] = torch.tensor([100, 111], dtype=index)
    new_k, new_v = (mixed_values((len(slots) // 16 * 16 + 16, 2, 64), s) for s in (3, 4))
    new_k, new_v = new_k[: len(slots)], new_v[: len(slots)]
    store.append(0, new_k.to(DEVICE), new_v.to(DEVICE), slots.to(DEVICE))
    refused(store, f"{len(outside)} rows with a slot out of range (-1 skips a row)")
    assert int(store.state(0).written[6]) == 1 << 4 | 1 << 15
    assert_holds(store, 0, torch.arange(5), k, v)
    for got, new in zip(decoded(store, 0, torch.tensor([6])), (new_k, new_v), strict=True):
        assert_same_bits(got[[4, 15]], new[some], "rows with fine slots")


def test_slots_in_sealed_pages(made: Callable) -> None:
    """Tiles and single rows; a run of slots from a sealed page into one that is not."""
    store, k, v = used_store(made)
    before = snapshot(store)
    new_k, new_v = (mixed_values((48, 2, 64), seed).to(DEVICE) for seed in (3, 4))
    store.append(0, new_k[:16], new_v[:16], torch.arange(16, device=DEVICE))
    unchanged_but_counts(store, before)
    refused(store, "16 rows with a slot in a sealed page")
    store.append(0, new_k[:3], new_v[:3], torch.tensor([5, 31, 16], device=DEVICE))
    unchanged_but_counts(store, before)
    refused(store, "3 rows with a slot in a sealed page")
    store.append(0, new_k, new_v, torch.arange(8, 56, device=DEVICE))
    refused(store, "24 rows with a slot in a sealed page")
    k[32:56], v[32:56] = new_k[24:].cpu(), new_v[24:].cpu()
    assert_holds(store, 0, torch.arange(5), k, v)


def test_of_a_slot_given_twice_either_row_stays(made: Callable) -> None:
    """One of the two whole rows of a head; nothing is refused."""
    store, k, v = used_store(made)
    new_k, new_v = (mixed_values((32, 2, 64), seed) for seed in (3, 4))
    slots = torch.arange(96, 112).repeat(2)
    store.append(0, new_k.to(DEVICE), new_v.to(DEVICE), slots.to(DEVICE))
    for got, new in zip(decoded(store, 0, torch.tensor([6])), (new_k, new_v), strict=True):
        got = got.cpu().view(torch.int16)
        either = new.view(torch.int16).view(2, 16, 2, 64)
        for token in range(16):
            for head in range(2):
                row = got[token, head]
                assert torch.equal(row, either[0, token, head]) or torch.equal(
                    row, either[1, token, head]
                ), f"token {token} of head {head} is of neither row"
    assert_holds(store, 0, torch.arange(5), k, v)


# ---- encode ------------------------------------------------------------------------------------
@pytest.mark.parametrize("moved", [False, True])
def test_pages_that_must_not_be_sealed(made: Callable, moved: bool) -> None:
    """Sealed, partly filled, empty: their lengths are 0; the full ones among them are sealed."""
    store, k, v = used_store(made, heads_per_span=1)
    before = snapshot(store)
    kv, state = store.layer(0), store.state(0)
    ids = torch.tensor([*SEALED, PARTLY, *EMPTY], device=DEVICE)
    # Where the refused pages would go if they were not: over each other.
    to = torch.zeros(6, 2, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((5, 2), -1, dtype=torch.int32, device=DEVICE)
    launch.encode(kv, state, ids, lengths=lengths, destinations=to[:5] if moved else None)
    assert (lengths == 0).all()
    unchanged_but_counts(store, before)
    refused(store, "5 pages to seal that are not full, sealed already or given twice")

    ids = torch.tensor([*SEALED, FULL[1], PARTLY, *EMPTY], device=DEVICE)
    to[2] = state.homes[EMPTY[0], :, 0]
    lengths = launch.encode(kv, state, ids, destinations=to if moved else None)
    assert (lengths[[0, 1, 3, 4, 5]] == 0).all()
    assert torch.equal(lengths[2], kv.places[FULL[1], :, 1])
    assert (lengths[2] > 0).all()
    refused(store, "5 pages to seal that are not full, sealed already or given twice")
    assert store.is_sealed(0, range(PAGES)).tolist() == [p in (0, 1, 3) for p in range(PAGES)]
    assert_holds(store, 0, torch.arange(5), k, v)


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_full_means_every_slot(made: Callable, page_size: int) -> None:
    """One slot missing anywhere; 64 slots use every bit of the word, the sign included."""
    store = made(KVShape(1, 1, 1, 64, page_size), 3)
    k, v = (mixed_values((page_size, 1, 64), seed) for seed in (1, 2))
    for missing in (0, page_size // 2 - 1, page_size // 2, page_size - 1):
        store.clear(0, torch.tensor([1], device=DEVICE))
        rows = torch.tensor([t for t in range(page_size) if t != missing])
        slots = (page_size + rows).to(DEVICE)
        store.append(0, k[rows].to(DEVICE), v[rows].to(DEVICE), slots)
        assert store.seal(0, torch.tensor([1], device=DEVICE)).tolist() == [0]
        refused(store, "1 pages to seal that are not full, sealed already or given twice")
    last = torch.tensor([missing])
    store.append(0, k[last].to(DEVICE), v[last].to(DEVICE), (page_size + last).to(DEVICE))
    assert store.seal(0, torch.tensor([1], device=DEVICE)).item() > 0
    assert_holds(store, 0, torch.tensor([1]), k, v)


def test_an_id_given_twice_is_sealed_once(made: Callable) -> None:
    """One of the equal ids gets the length; the page is as if it had been given once."""
    store, k, v = used_store(made)
    ids = torch.tensor([2, 4, 2, 2, 4, 3], device=DEVICE)
    lengths = launch.encode(store.layer(0), store.state(0), ids).flatten().tolist()
    for page in FULL:
        found = [n for n, given in zip(lengths, ids.tolist(), strict=True) if given == page and n]
        assert found == store.page_bytes(0, page).tolist()
    refused(store, "3 pages to seal that are not full, sealed already or given twice")
    assert_holds(store, 0, torch.arange(5), k, v)


def test_a_thousand_times_the_same_page(made: Callable) -> None:
    """Many CTAs after one span at the same time."""
    store, k, v = used_store(made)
    ids = torch.full((1000,), 3, device=DEVICE)
    lengths = launch.encode(store.layer(0), store.state(0), ids)
    assert int((lengths > 0).sum()) == 1
    assert int(lengths.sum()) == store.page_bytes(0, 3).item()
    refused(store, "999 pages to seal that are not full, sealed already or given twice")
    assert_holds(store, 0, torch.arange(5), k, v)


@pytest.mark.parametrize("count", [2, 40, 600])
def test_of_equal_ids_with_places_of_their_own_one_is_followed(made: Callable, count: int) -> None:
    """All spans go where one item says; whatever other items say is not written.

    600 items have more CTAs than an H200 holds at a time, 40 have fewer.
    """
    heads = 4  # in four spans
    store = made(KVShape(1, heads, heads, 64, heads_per_span=1), 2 + count)
    kv, state = store.layer(0), store.state(0)
    k, v = (mixed_values((32, heads, 64), seed) for seed in (1, 2))
    store.append(0, k.to(DEVICE), v.to(DEVICE), torch.arange(32, device=DEVICE))
    before = store.pool.clone()
    to = state.homes[2:, :, 0].clone()
    to[1::2] = to[1::2].flip(1)
    ids = torch.ones(count, dtype=torch.int64, device=DEVICE)
    lengths = launch.encode(kv, state, ids, destinations=to)
    (winner,) = torch.nonzero((lengths > 0).any(1)).flatten().tolist()
    assert (lengths[winner] > 0).all()
    assert torch.equal(kv.places[1, :, 0], to[winner])
    assert torch.equal(kv.places[1, :, 1], lengths[winner])
    assert state.claimed.tolist()[:3] == [0, winner + 1, 0]
    refused(store, f"{count - 1} pages to seal that are not full, sealed already or given twice")
    changed = (store.pool != before).view(2 + count, -1).any(1)
    assert torch.nonzero(changed).flatten().tolist() == [2 + winner]
    assert_holds(store, 0, torch.arange(2), k, v)
    store.clear(0, ids[:1])
    assert not state.claimed.any()
    store.append(0, v[:16].to(DEVICE), k[:16].to(DEVICE), torch.arange(16, 32, device=DEVICE))
    assert (launch.encode(kv, state, ids[:1]) > 0).all()
    assert_holds(store, 0, torch.tensor([1]), v[:16], k[:16])


# ---- destinations ------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [0, 1])
def test_destinations_outside_the_pool(made: Callable, bad: int) -> None:
    """A page of which one span has no room stays as it is, whole; the page beside it is sealed."""
    store, k, v = used_store(made, heads_per_span=1)
    kv, state = store.layer(0), store.state(0)
    last = (store.pool.numel() - store.shape.layout.raw_span_bytes) // 128
    before = snapshot(store)
    ids = torch.tensor(FULL, device=DEVICE)
    to = state.homes[[6, 7, 4], :, 0].contiguous()  # the last one in place
    for start in (-1, last + 1, -(1 << 31)):
        wrong = to.clone()
        wrong[:, bad] = start
        lengths = launch.encode(kv, state, ids, destinations=wrong)
        assert (lengths == 0).all()
        unchanged_but_counts(store, before)
        refused(store, "3 pages to seal with a destination outside the pool")
    wrong = to.clone()
    wrong[1, bad] = last + 1
    lengths = launch.encode(kv, state, ids, destinations=wrong)
    assert (lengths > 0).tolist() == [[True] * 2, [False] * 2, [True] * 2]
    refused(store, "1 pages to seal with a destination outside the pool")
    assert (launch.encode(kv, state, ids[1:2], destinations=to[1:2]) > 0).all()
    assert_holds(store, 0, torch.arange(5), k, v)


@pytest.mark.parametrize("missing", [0, 1])
def test_room_that_ends_where_the_pool_does(made: Callable, missing: int) -> None:
    """The room of a raw span fits exactly, or lacks a byte, however short the sealed one is."""
    store, k, v = used_store(made)
    layout = store.shape.layout
    home = int(store.state(0).homes[7, 0, 0])
    cut = store.pool[: home * 128 + layout.raw_span_bytes - missing]
    kv = LayerPages(cut, store.places[0], layout)
    to = torch.full((1, 1), home, dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([3], device=DEVICE)
    lengths = launch.encode(kv, store.state(0), ids, destinations=to)
    assert bool(lengths.item()) == (not missing)
    if missing:
        refused(store, "1 pages to seal with a destination outside the pool")
    assert_holds(store, 0, torch.arange(5), k, v)


def test_destinations_in_a_pool_past_4_gib(made: Callable) -> None:
    """Room is counted in 64 bits: the last home is inside, and the next start is not."""
    shape = KVShape(1, 8, 8, 128)
    stride = shape.layout.page_stride
    store = made(shape, (4 << 30) // stride + 8)
    kv, state = store.layer(0), store.state(0)
    k, v = (mixed_values((32, 8, 128), seed) for seed in (1, 2))
    store.append(0, k.to(DEVICE), v.to(DEVICE), torch.arange(32, device=DEVICE))
    ids = torch.arange(2, device=DEVICE)
    to = state.homes[-1, :, 0].repeat(2, 1)
    to[0] += 1
    assert (launch.encode(kv, state, ids, destinations=to) > 0).flatten().tolist() == [False, True]
    refused(store, "1 pages to seal with a destination outside the pool")
    assert_holds(store, 0, ids, k, v)


# ---- page ids out of range ---------------------------------------------------------------------
NO_PAGES = {
    torch.int32: (8, -1, (1 << 31) - 1, -(1 << 31)),
    torch.int64: (8, -1, (1 << 32) + 2, -(1 << 32) + 2, (1 << 63) - 1, -(1 << 63)),
}


@pytest.mark.parametrize("index", NO_PAGES)
@pytest.mark.parametrize("heads_per_span", [1, 2])
def test_page_ids_out_of_range(made: Callable, index: torch.dtype, heads_per_span: int) -> None:
    """Decode gives zeros, encode and clear leave them out; each counts every id once."""
    store, k, v = used_store(made, heads_per_span)
    state = store.state(0)
    ids = torch.tensor([*NO_PAGES[index], 2], dtype=index, device=DEVICE)
    ids = ids[torch.randperm(len(ids), device=DEVICE)]
    bad = (ids < 0) | (ids >= PAGES)
    said = f"{int(bad.sum())} page ids out of range"

    before = snapshot(store)
    for got, want in zip(decoded(store, 0, ids), (k, v), strict=True):
        got = got.view(len(ids), 16, 2, 64)
        assert (got[bad].view(torch.int16) == 0).all()
        assert_same_bits(got[~bad].flatten(0, 1), want[32:48], "the page among them")
    unchanged_but_counts(store, before)
    refused(store, said)

    assert (store.seal(0, ids) > 0).tolist() == (~bad).tolist()
    refused(store, said)
    assert torch.equal(state.sealed[:, 0].nonzero().flatten().cpu(), torch.arange(3))
    assert_holds(store, 0, torch.arange(5), k, v)

    store.clear(0, ids)
    refused(store, said)
    assert store.is_sealed(0, range(PAGES)).tolist() == [p < 2 for p in range(PAGES)]
    assert int(state.written[2]) == 0
    others = torch.arange(80) // 16 != 2
    assert_holds(store, 0, torch.tensor([0, 1, 3, 4]), k[others], v[others])


def test_every_refusal_at_once(made: Callable) -> None:
    """All counts in one message, in order, and then none."""
    store, k, v = used_store(made)
    store.pool.view(PAGES, -1)[4, 4] = 250  # a descriptor that no writer makes
    new = k[:3].to(DEVICE)
    store.append(0, new, new, torch.tensor([128, 0, 1], device=DEVICE))
    store.seal(0, torch.tensor([0, 8], device=DEVICE))
    to = torch.full((1, 1), -1, dtype=torch.int32, device=DEVICE)
    launch.encode(store.layer(0), store.state(0), torch.tensor([2], device=DEVICE), destinations=to)
    store.read(0, torch.tensor([4], device=DEVICE))
    refused(
        store,
        "1 rows with a slot out of range (-1 skips a row)",
        "2 rows with a slot in a sealed page",
        "1 page ids out of range",
        "1 pages to seal that are not full, sealed already or given twice",
        "1 parts of pages whose bytes no writer makes",
        "1 pages to seal with a destination outside the pool",
    )
    assert_holds(store, 0, torch.arange(4), k[:64], v[:64])


# ---- malformed pages ---------------------------------------------------------------------------
LAYOUT = KVShape(1, 2, 2, 64).layout


def _start(store: PageStore, page: int, head: int, part: str, value: int) -> None:
    """Overwrite a part's start, in units of 16 bytes."""
    at = LAYOUT.start_byte(head, part)
    word = torch.tensor(list((value & 0xFFFFFFFF).to_bytes(4, "little")), dtype=torch.uint8)
    store.pool.view(PAGES, -1)[page, at : at + 4] = word.to(DEVICE)


def _descriptor(store: PageStore, page: int, head: int, part: str, value: int) -> None:
    store.pool.view(PAGES, -1)[page, LAYOUT.descriptor_byte(head, part, 1)] = value


RAW_UNITS = LAYOUT.raw_span_bytes // 16
MALFORMED = {
    # What is done to raw page 3, and the parts that then come out as zeros.
    "a start in the metadata": (lambda s: _start(s, 3, 1, "k", 1), [(1, "k")]),
    "a start past the span": (lambda s: _start(s, 3, 0, "v", RAW_UNITS - 127), [(0, "v")]),
    "a start past 2**31": (lambda s: _start(s, 3, 0, "k", -2), [(0, "k")]),
    "a start far away": (lambda s: _start(s, 3, 1, "v", 0x7FFFFFFF), [(1, "v")]),
    "descriptor 249": (lambda s: _descriptor(s, 3, 0, "k", 249), [(0, "k")]),
    "descriptor 254": (lambda s: _descriptor(s, 3, 1, "v", 254), [(1, "v")]),
    "both parts": (
        lambda s: (_descriptor(s, 3, 1, "k", 250), _start(s, 3, 1, "v", 0)),
        [(1, "k"), (1, "v")],
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_parts(made: Callable, case: str) -> None:
    """Zeros for that part alone, nothing read outside the span, and a count."""
    store, k, v = used_store(made)
    damage, parts = MALFORMED[case]
    damage(store)
    before = snapshot(store)
    for head, part in parts:
        (k if part == "k" else v)[48:64, head] = 0
    assert_holds(store, 0, torch.arange(5), k, v)
    unchanged_but_counts(store, before)
    refused(store, f"{len(parts)} parts of pages whose bytes no writer makes")
    store.clear(0, torch.tensor([3], device=DEVICE))
    store.read(0, torch.tensor([3], device=DEVICE))  # well-formed again


PLACES = {
    # Which word of the place of page 3 is changed (start, length), and to what.
    "a length of no whole units": (1, LAYOUT.raw_span_bytes - 8),
    "a length that is none": (1, LAYOUT.metadata_bytes - 16),
    "a length of nothing": (1, 0),
    "a length past a raw span's": (1, LAYOUT.raw_span_bytes + 16),
    "a negative length": (1, -16),
    "a start past the pool": (0, PAGES * LAYOUT.page_stride // 128 - 1),
    "a start far past the pool": (0, -1),
}


@pytest.mark.parametrize("case", PLACES)
def test_malformed_places(made: Callable, case: str) -> None:
    """All four parts of the page are zeros; whatever the place says, nothing else is read."""
    store, k, v = used_store(made)
    word, value = PLACES[case]
    store.places[0, 3, 0, word] = value
    k[48:64], v[48:64] = 0, 0
    assert_holds(store, 0, torch.arange(5), k, v)
    refused(store, "4 parts of pages whose bytes no writer makes")


def test_exceptions_where_there_must_be_none(made: Callable) -> None:
    """Read with max_exceptions 0, parts that have blocks with exceptions are malformed."""
    shape = KVShape(1, 4, 4, 64)
    store = made(shape, 8)
    k, v = (mixed_values((128, 4, 64), seed, raw=False) for seed in (1, 2))
    ids = torch.arange(8, device=DEVICE)
    store.append(0, k.to(DEVICE), v.to(DEVICE), slots_of(ids, 16))
    store.seal(0, ids)
    descriptors = store.descriptors(0, ids).cpu()
    bad = ((descriptors >= 128) & (descriptors < 249)).any(-1)  # [page, head, part]
    assert 0 < int(bad.sum()) < bad.numel()
    strict = replace(shape, max_exceptions=0).layout
    kv = LayerPages(store.pool, store.places[0], strict)
    got = launch.decode_pages(kv, store.state(0), ids)
    for part, (out, want) in enumerate(zip(got, (k, v), strict=True)):
        want = want.view(8, 16, 4, 64).masked_fill(bad[:, None, :, part, None], 0)
        assert_same_bits(out, want, "kv"[part])
    refused(store, f"{int(bad.sum())} parts of pages whose bytes no writer makes")
