"""PageStore: what is appended comes back bit for bit, and a call that raises changes nothing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterable
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from bits import (
    format_parameters,
    from_patterns,
    mixed_values,
    places_of,
    same_bits,
    stored_bytes,
    to_patterns,
)
from format.format_decoder import decode_page
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch._subclasses import FakeTensorMode

import zf_cute.store
from zf_cute import (
    ArgumentError,
    FormatError,
    KVShape,
    PageStateError,
    PageStore,
    UnsupportedError,
)

LAYERS, PAGES, HEADS, DIM, PAGE = 2, 6, 2, 64, 16
SHAPE = KVShape(LAYERS, 4, HEADS, DIM)
NAN = 0x7FC0


def poisoned(store: PageStore) -> PageStore:
    """Fill all of the pool that is no metadata with NaN: what was never written is no zero."""
    layout = store.shape.layout
    homes = store.pool.view(-1, layout.span_stride)[:, layout.metadata_bytes :]
    homes.view(torch.int16).fill_(NAN)
    return store


@pytest.fixture
def store() -> PageStore:
    """Two layers of six empty pages over NaN."""
    return poisoned(PageStore(SHAPE, PAGES))


def tokens(count: int, seed: int, heads: int = HEADS, dim: int = DIM) -> tuple[torch.Tensor, ...]:
    """K and V of some tokens; in whole pages they make blocks of all kinds."""
    padded = -(-count // 16) * 16
    return tuple(mixed_values((padded, heads, dim), seed + i)[:count] for i in range(2))


def fill(store: PageStore, layer: int, pages: Iterable[int], seed: int) -> tuple[torch.Tensor, ...]:
    """Append whole pages; returns their K and V."""
    size = store.shape.page_size
    slots = torch.cat([page * size + torch.arange(size) for page in pages])
    k, v = tokens(len(slots), seed, store.shape.num_kv_heads, store.shape.head_dim)
    store.append(layer, k, v, slots)
    return k, v


def assert_holds(
    store: PageStore, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """The given slots read back as the given tokens."""
    got_k, got_v = store.read(layer, torch.arange(store.num_pages))
    assert same_bits(got_k[slots.long()], k)
    assert same_bits(got_v[slots.long()], v)


def snapshot(store: PageStore) -> dict[str, torch.Tensor]:
    """Every tensor that the store holds: bytes, places and states."""
    return {n: x.clone() for n, x in vars(store).items() if isinstance(x, torch.Tensor)}


def assert_unchanged(store: PageStore, before: dict[str, torch.Tensor]) -> None:
    """No tensor of the store differs from the snapshot in any bit."""
    assert {"pool", "places"} <= set(before)
    for name, x in before.items():
        assert torch.equal(vars(store)[name], x), f"{name} changed"


# ---- appending ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_append_in_any_order(store: PageStore, dtype: torch.dtype, at_once: int) -> None:
    # Shuffled slots over all pages, some left out; tokens one by one, in fives, and at once.
    slots = torch.randperm(PAGES * PAGE)[:70].to(dtype)
    k, v = tokens(70, 1)
    for part in range(0, 70, at_once):
        some = slice(part, part + at_once)
        store.append(1, k[some], v[some], slots[some])
    assert_holds(store, 1, slots, k, v)


def test_append_one_by_one_writes_the_same_bytes() -> None:
    k, v = tokens(48, 2)
    slots = torch.randperm(48)
    stores = [poisoned(PageStore(SHAPE, PAGES)) for _ in range(2)]
    stores[0].append(0, k, v, slots)
    for i in range(48):
        stores[1].append(0, k[i : i + 1], v[i : i + 1], slots[i : i + 1])
    assert_unchanged(stores[1], snapshot(stores[0]))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_append_every_page_shape(head_dim: int, page_size: int) -> None:
    # Three heads in three spans: homes of spans are apart.
    shape = KVShape(1, 3, 3, head_dim, page_size=page_size, heads_per_span=1)
    store = poisoned(PageStore(shape, 3))
    slots = torch.randperm(3 * page_size)[: 2 * page_size + 5]
    k, v = tokens(len(slots), 3, 3, head_dim)
    store.append(0, k, v, slots)
    assert_holds(store, 0, slots, k, v)


def test_minus_one_skips_a_token(store: PageStore) -> None:
    k, v = tokens(8, 4)
    slots = torch.tensor([-1, 3, -1, 17, 95, -1, 0, -1], dtype=torch.int32)
    before = snapshot(store)
    store.append(0, k, v, torch.full((8,), -1))
    assert_unchanged(store, before)
    store.append(0, k, v, slots)
    kept = slots >= 0
    assert_holds(store, 0, slots[kept], k[kept], v[kept])
    # And nothing else: four tokens of K and V are written.
    changed = (store.pool != before["pool"]).view(-1, 2).any(1)
    assert int(changed.sum()) <= 4 * 2 * HEADS * DIM


def test_no_tokens(store: PageStore) -> None:
    before = snapshot(store)
    store.append(0, *tokens(0, 5), torch.empty(0, dtype=torch.int32))
    assert_unchanged(store, before)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _dims_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def _padded(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 3), float("nan"), dtype=x.dtype)
    wide[:, 1:, 1:-2] = x
    return wide[:, 1:, 1:-2]


def _every_other(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 0)[::2]


def _slice_of_fused(x: torch.Tensor) -> torch.Tensor:
    # K as a slice of a fused QKV row: a storage offset and a long token stride.
    fused = torch.full((len(x), 4 * x[0].numel()), float("nan"), dtype=x.dtype)
    fused[:, x[0].numel() : 2 * x[0].numel()] = x.flatten(1)
    return fused[:, x[0].numel() : 2 * x[0].numel()].view(x.shape)


@pytest.mark.parametrize(
    "strided", [_transposed, _dims_first, _padded, _every_other, _slice_of_fused]
)
def test_append_any_strides(store: PageStore, strided: Callable) -> None:
    k, v = tokens(20, 6)
    slots = torch.randperm(PAGES * PAGE)[:20]
    assert strided(k).stride() != k.stride()
    store.append(0, strided(k), strided(v), slots.repeat_interleave(2)[::2])
    assert_holds(store, 0, slots, k, v)


def test_append_expanded_rows(store: PageStore) -> None:
    # Stride 0: one token for all slots.
    k, v = tokens(1, 7)
    slots = torch.arange(10, 42)
    store.append(0, k.expand(32, -1, -1), v.expand(32, -1, -1), slots)
    assert_holds(store, 0, slots, k.expand(32, -1, -1), v.expand(32, -1, -1))


def test_a_slot_may_be_written_again(store: PageStore) -> None:
    fill(store, 0, [2], 8)
    k, v = tokens(3, 9)
    slots = torch.tensor([2 * PAGE + 5, 2 * PAGE, 2 * PAGE + 15])
    store.append(0, k, v, slots)
    assert_holds(store, 0, slots, k, v)
    store.seal(0, 2)  # still 16 tokens
    assert_holds(store, 0, slots, k, v)


def test_nan_outside_does_not_show_in_written_tokens(store: PageStore) -> None:
    k, v = (x.clamp(-4, 4).nan_to_num() for x in tokens(20, 10))
    store.append(0, k, v, torch.arange(20))
    got_k, got_v = store.read(0, [0, 1])
    assert not got_k[:20].isnan().any()
    assert not got_v[:20].isnan().any()
    assert (to_patterns(got_k[20:]) == NAN).all()  # the poison reaches what was not written
    assert (to_patterns(got_v[20:]) == NAN).all()


@pytest.mark.parametrize(
    "shape",
    [
        KVShape(2, 2, 2, 64),
        KVShape(1, 2, 2, 64, page_size=32, rope="interleaved", heads_per_span=1),
        KVShape(1, 1, 1, 256),
    ],
)
def test_raw_bytes_lie_where_the_layout_says(shape: KVShape) -> None:
    # Where attention reads: page home, then span, then PageLayout.raw_byte, for every value.
    store, layout = poisoned(PageStore(shape, 2)), shape.layout
    layer, page = shape.num_layers - 1, 1
    count = (2, shape.page_size, shape.num_kv_heads, shape.head_dim)
    patterns = torch.randperm(1 << 16)[: torch.Size(count).numel()].view(count)
    k, v = from_patterns(patterns)
    store.append(layer, k, v, page * shape.page_size + torch.arange(shape.page_size))
    pool = store.pool.numpy().tobytes()
    places = places_of(store.layer(layer), page)
    home = (layer * 2 + page) * layout.page_stride
    assert [start * 128 for start, _ in places] == [
        home + span * layout.span_stride for span in range(layout.spans)
    ]
    for index, token, head, dim in product(*map(range, count)):
        span, in_span = divmod(head, layout.heads_per_span)
        at = places[span][0] * 128 + layout.raw_byte(in_span, "kv"[index], token, dim)
        assert int.from_bytes(pool[at : at + 2], "little") == patterns[index, token, head, dim]


# ---- sealing -----------------------------------------------------------------------------------
def test_seal_in_place(store: PageStore) -> None:
    k, v = fill(store, 0, range(PAGES), 11)
    slots = torch.arange(PAGES * PAGE)
    layout, raw = SHAPE.layout, SHAPE.layout.raw_span_bytes
    assert (store.page_bytes(0, range(PAGES)) == raw).all()
    assert not store.is_sealed(0, range(PAGES)).any()
    assert (store.descriptors(0, range(PAGES)) == 255).all()
    places = store.places.clone()

    nbytes = store.seal(0, torch.tensor([4, 1], dtype=torch.int32))
    assert store.is_sealed(0, range(PAGES)).tolist() == [False, True, False, False, True, False]
    assert not store.is_sealed(1, range(PAGES)).any()
    assert torch.equal(nbytes, store.page_bytes(0, [4, 1]))
    descriptors = store.descriptors(0, [4, 1])
    assert descriptors.shape == (2, HEADS, 2, 2)
    sizes = [sum(map(stored_bytes, page.flatten().tolist())) for page in descriptors]
    assert nbytes.tolist() == [layout.metadata_bytes + size for size in sizes]
    assert (store.page_bytes(0, [0, 2, 3, 5]) == raw).all()
    assert (nbytes < raw).all()
    # In place: only lengths of the two change.
    places[0, [4, 1], 0, 1] = nbytes.to(torch.int32)
    assert torch.equal(store.places, places)
    assert_holds(store, 0, slots, k, v)

    store.seal(0, [0, 2, 3, 5])
    assert store.is_sealed(0, range(PAGES)).all()
    assert_holds(store, 0, slots, k, v)
    for page in range(PAGES):
        view = store.layer(0)
        got = decode_page(
            memoryview(store.pool.numpy()), places_of(view, page), **format_parameters(view.layout)
        )
        assert same_bits(from_patterns(got[0]), k[page * PAGE :][:PAGE])
        assert same_bits(from_patterns(got[1]), v[page * PAGE :][:PAGE])


def test_an_incompressible_page_seals_to_raw_size(store: PageStore) -> None:
    k, v = from_patterns(torch.randint(1 << 16, (2, PAGE, HEADS, DIM)))
    store.append(0, k, v, torch.arange(PAGE))
    assert store.seal(0, 0).tolist() == [SHAPE.layout.raw_span_bytes]
    assert store.is_sealed(0, 0).all()
    assert_holds(store, 0, torch.arange(PAGE), k, v)


def test_page_ids_of_every_kind(store: PageStore) -> None:
    k, v = fill(store, 0, range(PAGES), 12)
    store.seal(0, 3)
    store.seal(0, (page for page in (0, 5)))
    store.seal(0, torch.tensor([[1], [2]]))
    assert store.is_sealed(0, range(PAGES)).tolist() == [True, True, True, True, False, True]
    got_k, got_v = store.read(0, [5, 5, 0])
    assert same_bits(got_k, torch.cat([k[80:], k[80:], k[:16]]))
    assert same_bits(got_v, torch.cat([v[80:], v[80:], v[:16]]))


def test_an_empty_list_of_pages(store: PageStore) -> None:
    before = snapshot(store)
    assert store.seal(0, []).shape == (0,)
    store.clear(0, [])
    assert store.page_bytes(0, []).shape == (0,)
    assert store.is_sealed(0, []).shape == (0,)
    assert store.descriptors(0, []).shape == (0, HEADS, 2, 2)
    assert store.read(0, [])[0].shape == (0, HEADS, DIM)
    assert_unchanged(store, before)


def test_more_pages_than_are_sealed_at_a_time(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Groups of two pages; the last has one.
    monkeypatch.setattr(zf_cute.store, "_VALUES_AT_ONCE", 2 * SHAPE.layout.page_values)
    k, v = fill(store, 0, range(5), 13)
    nbytes = store.seal(0, [3, 0, 4, 2, 1])
    assert torch.equal(nbytes, store.page_bytes(0, [3, 0, 4, 2, 1]))
    assert_holds(store, 0, torch.arange(80), k, v)


@pytest.mark.parametrize("page_size", [32, 64])
def test_full_means_every_slot(page_size: int) -> None:
    # 64 slots use every bit of the word that counts them, the sign included.
    store = PageStore(KVShape(1, 1, 1, 64, page_size=page_size), 2)
    k, v = tokens(page_size, 14, heads=1)
    for missing in (0, 31, page_size - 1):
        store.clear(0, 1)
        slots = torch.tensor([t for t in range(page_size) if t != missing])
        store.append(0, k[slots], v[slots], page_size + slots)
        with pytest.raises(PageStateError, match=f"holds {page_size - 1} of {page_size} tokens"):
            store.seal(0, 1)
    slot = torch.tensor([missing])
    store.append(0, k[slot], v[slot], page_size + slot)
    store.seal(0, 1)
    assert same_bits(store.read(0, 1)[0], k)


def test_the_count_of_a_partial_page_with_its_last_slot() -> None:
    store = PageStore(KVShape(1, 1, 1, 64, page_size=64), 1)
    store.append(0, *tokens(2, 15, heads=1), torch.tensor([0, 63]))
    with pytest.raises(PageStateError, match="holds 2 of 64 tokens"):
        store.seal(0, 0)


def test_layers_do_not_interfere(store: PageStore) -> None:
    k0, v0 = fill(store, 0, [1, 2], 16)
    before = snapshot(store)
    k1, v1 = fill(store, 1, [2, 1], 17)
    half = len(store.pool) // LAYERS
    assert torch.equal(store.pool[:half], before["pool"][:half])
    store.seal(1, [1])
    assert not store.is_sealed(0, [1, 2]).any()
    assert torch.equal(store.pool[:half], before["pool"][:half])
    store.seal(0, [1])
    store.clear(1, [2])
    slots = torch.arange(16, 48)
    assert_holds(store, 0, slots, k0, v0)
    assert_holds(store, 1, slots[:16], k1[16:], v1[16:])


def test_a_view_of_a_layer_follows_the_store(store: PageStore) -> None:
    view = store.layer(1)
    assert view.num_pages == PAGES
    k, v = fill(store, 1, [4], 18)
    nbytes = store.seal(1, [4])
    assert places_of(view, 4)[0][1] == nbytes.item()
    got = zf_cute.store.reference.decode_pages(view, torch.tensor([4]))
    assert same_bits(got[0][0], k)
    assert same_bits(got[1][0], v)
    store.clear(1, [4])
    assert places_of(view, 4)[0][1] == SHAPE.layout.raw_span_bytes


# ---- clearing ----------------------------------------------------------------------------------
@pytest.mark.parametrize("heads_per_span", [1, 2])
def test_clear_and_use_again(heads_per_span: int) -> None:
    shape = KVShape(2, 2, 2, 64, heads_per_span=heads_per_span)
    store, layout = PageStore(shape, 4), shape.layout
    fresh = store.places.clone()
    fill(store, 0, range(4), 19)
    store.seal(0, [0, 1, 2])
    sealed = snapshot(store)
    store.clear(0, [2, 0, 3, 3])
    assert store.is_sealed(0, range(4)).tolist() == [False, True, False, False]
    assert torch.equal(store.places[0, [0, 2, 3]], fresh[0, [0, 2, 3]])
    assert torch.equal(store.places[0, 1], sealed["places"][0, 1])
    assert (store.descriptors(0, [0, 2, 3]) == 255).all()
    homes = store.pool.view(2, 4, layout.spans, layout.span_stride)
    raw = torch.tensor(list(layout.raw_metadata()), dtype=torch.uint8)
    for page, span in product((0, 2, 3), range(layout.spans)):
        assert torch.equal(homes[0, page, span, : len(raw)], raw)
    # Empty: not to be sealed, whether the old page was sealed or full.
    for page in (0, 2, 3):
        with pytest.raises(PageStateError, match="holds 0 of 16"):
            store.seal(0, page)
    # The new request's tokens, and nothing of the old page, are what is read.
    k, v = fill(store, 0, [3, 2, 0], 20)
    slots = torch.cat([page * 16 + torch.arange(16) for page in (3, 2, 0)])
    assert_holds(store, 0, slots, k, v)
    store.seal(0, [0, 2, 3])
    assert_holds(store, 0, slots, k, v)


def test_clear_leaves_other_pages_alone(store: PageStore) -> None:
    fill(store, 0, range(3), 21)
    store.seal(0, [1, 2])
    before = store.pool.clone().view(-1, SHAPE.layout.page_stride)
    store.clear(0, [0, 2])
    after = store.pool.view(-1, SHAPE.layout.page_stride)
    changed = torch.nonzero((before != after).any(1)).flatten().tolist()
    # Raw pages already have the metadata of empty ones: not a byte of the pool has to change.
    assert set(changed) <= {0, 2}
    assert store.is_sealed(0, range(3)).tolist() == [False, True, False]


# ---- errors: each names what is wrong, and changes nothing -------------------------------------
@pytest.fixture
def used() -> PageStore:
    """Layer 0: pages 0 and 1 sealed, 2 full, 3 partly filled, 4 and 5 empty."""
    store = poisoned(PageStore(SHAPE, PAGES))
    fill(store, 0, [0, 1, 2], 22)
    store.append(0, *tokens(7, 23), 3 * PAGE + torch.arange(7))
    store.seal(0, [0, 1])
    return store


def _slots(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


ONE, TWO = tokens(1, 24), tokens(2, 25)

APPEND_ERRORS = {
    "float16": (UnsupportedError, "k is float16.*lossless for bfloat16", ONE[0].half(), ONE[1], 64),
    "float32": (UnsupportedError, "v is float32.*a cast would", ONE[0], ONE[1].float(), 64),
    "fp8": (UnsupportedError, "k is float8_e4m3fn", ONE[0].to(torch.float8_e4m3fn), ONE[1], 64),
    "int16": (UnsupportedError, "k is int16", ONE[0].view(torch.int16), ONE[1], 64),
    "heads": (ArgumentError, r"k has shape \(1, 1, 64\); \[tokens, 2, 64\]", ONE[0][:, :1], 0, 64),
    "dim": (ArgumentError, r"v has shape \(1, 2, 32\)", ONE[0], ONE[1][..., :32], 64),
    "rank 2": (ArgumentError, r"k has shape \(2, 64\)", ONE[0][0], ONE[1], 64),
    "rank 4": (ArgumentError, r"k has shape \(1, 1, 2, 64\)", ONE[0][None], ONE[1], 64),
    "device": (ArgumentError, "k is on meta and the store on cpu", ONE[0].to("meta"), ONE[1], 64),
    "tokens": (ArgumentError, "k has 1 tokens and v 2", ONE[0], TWO[1], 64),
    "slots short": (ArgumentError, r"shape \(1,\).*each of the 2 tokens", *TWO, 64),
    "slots 2-d": (ArgumentError, r"slot_mapping has shape \(1, 2\)", *TWO, _slots(64, 65)[None]),
    "slots int16": (ArgumentError, "torch.int16; int32 or int64", *ONE, _slots(64).short()),
    "slots float": (ArgumentError, "torch.float32; int32 or int64", *ONE, _slots(64).float()),
    "slots bool": (ArgumentError, "torch.bool; int32 or int64", *ONE, _slots(1).bool()),
    "slots device": (ArgumentError, "slot_mapping is on meta", *ONE, _slots(64).to("meta")),
    "slot 96": (ArgumentError, r"slot 96 is outside 0\.\.95 \(6 pages of 16; -1", *TWO, (64, 96)),
    "slot -2": (ArgumentError, r"slot -2 is outside 0\.\.95", *TWO, (64, -2)),
    "slot huge": (ArgumentError, "slot 4294967360 is outside", *ONE, 64 + (1 << 32)),
    "twice": (ArgumentError, "slot_mapping holds 65 more than once", *TWO, (65, 65)),
    "sealed": (PageStateError, r"page 1 of layer 0 is full and sealed.*clear\(", *TWO, (64, 31)),
}


@pytest.mark.parametrize("case", APPEND_ERRORS)
def test_append_errors(used: PageStore, case: str) -> None:
    error, message, k, v, slots = APPEND_ERRORS[case]
    if not isinstance(slots, torch.Tensor):
        slots = _slots(*slots) if isinstance(slots, tuple) else _slots(slots)
    v = ONE[1] if isinstance(v, int) else v
    before = snapshot(used)
    with pytest.raises(error, match=message):
        used.append(0, k, v, slots)
    assert_unchanged(used, before)


def test_skipped_tokens_are_no_duplicates(used: PageStore) -> None:
    used.append(0, *tokens(3, 26), _slots(-1, 64, -1))


@pytest.mark.parametrize("layer", [-1, LAYERS, True, False, 0.0, "0", None, 1 << 40])
@pytest.mark.parametrize(
    "call",
    [
        lambda store, layer: store.append(layer, *ONE, _slots(64)),
        lambda store, layer: store.seal(layer, [2]),
        lambda store, layer: store.clear(layer, [2]),
        lambda store, layer: store.read(layer, [2]),
        lambda store, layer: store.layer(layer),
        lambda store, layer: store.descriptors(layer, [2]),
        lambda store, layer: store.page_bytes(layer, [2]),
        lambda store, layer: store.is_sealed(layer, [2]),
    ],
    ids=["append", "seal", "clear", "read", "layer", "descriptors", "page_bytes", "is_sealed"],
)
def test_layer_errors(used: PageStore, call: Callable, layer: object) -> None:
    before = snapshot(used)
    integer = isinstance(layer, int) and not isinstance(layer, bool)
    message = rf"layer={layer} is outside 0\.\.1" if integer else "must be an int"
    with pytest.raises(ArgumentError, match=message):
        call(used, layer)
    assert_unchanged(used, before)


PAGE_CALLS = ["seal", "clear", "read", "descriptors", "page_bytes", "is_sealed"]


@pytest.mark.parametrize("call", PAGE_CALLS)
@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([2, PAGES], r"page 6 is outside 0\.\.5 of layer 0"),
        ([2, -1], r"page -1 is outside 0\.\.5"),
        (PAGES, "page 6 is outside"),
        (torch.tensor([2, 1 << 32]), "page 4294967296 is outside"),  # 0 in 32 bits
        (torch.tensor([2], dtype=torch.int16), "pages is torch.int16; int32 or int64"),
        (torch.tensor([2.0]), "pages is torch.float32"),
        (torch.tensor([True]), "pages is torch.bool"),
        ([2, True], "pages must be ints"),
        (True, "pages must be ints"),
        ([2.0], "pages must be ints"),
        ("2", "pages must be ints"),
    ],
)
def test_page_id_errors(used: PageStore, call: str, pages: object, message: str) -> None:
    before = snapshot(used)
    with pytest.raises(ArgumentError, match=message):
        getattr(used, call)(0, pages)
    assert_unchanged(used, before)


@pytest.mark.parametrize(
    ("pages", "error", "message"),
    [
        ([2, 2], ArgumentError, "pages holds 2 more than once"),
        ([2, 0], PageStateError, "page 0 of layer 0 is sealed already"),
        ([2, 3], PageStateError, "page 3 of layer 0 holds 7 of 16 tokens: only a full page"),
        ([2, 4], PageStateError, "page 4 of layer 0 holds 0 of 16 tokens"),
    ],
)
def test_seal_errors(used: PageStore, pages: list, error: type, message: str) -> None:
    before = snapshot(used)
    with pytest.raises(error, match=message):
        used.seal(0, pages)
    assert_unchanged(used, before)
    used.seal(0, 2)  # and the page that could be sealed still can be


def _damage_start(store: PageStore, home: torch.Tensor) -> None:
    home[3] = 0x80


def _damage_descriptor(store: PageStore, home: torch.Tensor) -> None:
    home[4] = 250


def _damage_to_exceptions(store: PageStore, home: torch.Tensor) -> None:
    # A descriptor that a sealed page may have; the bytes are no exception entries.
    home[4] = 128


def _damage_to_compressed(store: PageStore, home: torch.Tensor) -> None:
    # A raw page has no compressed blocks: reading it as one would seal wrong values for good.
    home[4] = 63


@pytest.mark.parametrize(
    "damage", [_damage_start, _damage_descriptor, _damage_to_exceptions, _damage_to_compressed]
)
@pytest.mark.parametrize("pages_at_once", [1, 100])
def test_sealing_a_damaged_page_changes_nothing(
    store: PageStore, damage: Callable, pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The damaged page comes last, in a group of its own or together with the others.
    monkeypatch.setattr(zf_cute.store, "_VALUES_AT_ONCE", pages_at_once * SHAPE.layout.page_values)
    fill(store, 0, [0, 1, 2], 27)
    damage(store, store.pool.view(LAYERS, PAGES, -1)[0, 2])
    before = snapshot(store)
    with pytest.raises(FormatError):
        store.seal(0, [0, 1, 2])
    assert_unchanged(store, before)
    store.seal(0, [0, 1])  # the sound ones can be sealed


def test_a_damaged_sealed_page_is_refused_and_can_be_cleared(used: PageStore) -> None:
    used.pool.view(LAYERS, PAGES, -1)[0, 1, 4] = 254
    with pytest.raises(FormatError, match="254"):
        used.read(0, [0, 1])
    used.read(0, [0])
    used.clear(0, [1])
    k, v = fill(used, 0, [1], 28)
    assert_holds(used, 0, torch.arange(16, 32), k, v)


# ---- shapes and sizes --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 17}, "page_size=17 is not supported; choose one of 16, 32, 64"),
        ({"page_size": 128}, "page_size=128"),
        ({"head_dim": 96}, "head_dim=96 is not supported; choose one of 64, 128, 256"),
        ({"rope": "x"}, "rope='x' is not supported; choose one of half, interleaved"),
        ({"num_qo_heads": 7}, "num_qo_heads=7 is not a multiple of num_kv_heads=6"),
        ({"num_qo_heads": 3}, "num_qo_heads=3 is not a multiple"),
        ({"num_qo_heads": 0}, "num_qo_heads=0 must be an int of at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"num_kv_heads": 6.0}, "num_kv_heads=6.0 must be an int"),
        ({"num_layers": 0}, "num_layers=0 must be an int of at least 1"),
        ({"num_layers": True}, "num_layers=True must be an int"),
        ({"heads_per_span": 4}, "heads_per_span=4 is not supported; choose one of 1, 2, 3, 6"),
        ({"heads_per_span": -1}, "heads_per_span=-1"),
        ({"max_exceptions": 5}, "max_exceptions=5 is not supported; choose one of 0, 1, 2, 3, 4"),
        ({"max_exceptions": -1}, "max_exceptions=-1"),
        ({"max_exceptions": True}, "max_exceptions=True must be an int"),
    ],
)
def test_shape_errors(changes: dict, message: str) -> None:
    good = {"num_layers": 1, "num_qo_heads": 6, "num_kv_heads": 6, "head_dim": 64}
    KVShape(**good)
    with pytest.raises(UnsupportedError, match=message):
        KVShape(**{**good, **changes})


def test_default_heads_per_span() -> None:
    # FORMAT.md section 2: the largest divisor whose raw span has at most 69,632 bytes, or 1.
    # 17 and 18 heads of 64 dims pass it by one head or two; 16 fit.
    for heads, dim, page_size in product((1, 3, 8, 12, 16, 17, 18), (64, 128, 256), (16, 32, 64)):
        blocks = page_size * dim // 512
        head = -(-2 * (4 + max(4, blocks)) // 16) * 16 + 2 * blocks * 1024
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and n * head <= 69632]
        shape = KVShape(1, heads, heads, dim, page_size=page_size)
        assert shape.layout.heads_per_span == max(fits, default=1)


@pytest.mark.parametrize("num_pages", [0, -1, True, 2.0, "4", None])
def test_number_of_pages_errors(num_pages: object) -> None:
    with pytest.raises(UnsupportedError, match=r"num_pages=.*must be an int of at least 1"):
        PageStore(SHAPE, num_pages)


def test_a_pool_that_places_do_not_reach() -> None:
    # Refused before it is allocated: one page more than fits 2^32 starts of 128 bytes.
    per_page = LAYERS * SHAPE.layout.page_stride
    too_many = (512 << 30) // per_page + 1
    with pytest.raises(UnsupportedError, match=f"num_pages={too_many} .*places reach 512 GiB"):
        PageStore(SHAPE, too_many)


def test_a_new_store(store: PageStore) -> None:
    layout = SHAPE.layout
    assert store.pool.shape == (LAYERS * PAGES * layout.page_stride,)
    assert store.pool.dtype == torch.uint8
    assert store.places.shape == (LAYERS, PAGES, layout.spans, 2)
    assert store.places.dtype == torch.int32
    starts = store.places[..., 0].flatten() * 128
    assert torch.equal(starts.long(), torch.arange(len(starts)) * layout.span_stride)
    assert (store.places[..., 1] == layout.raw_span_bytes).all()
    raw = torch.tensor(list(layout.raw_metadata()), dtype=torch.uint8)
    assert (store.pool.view(-1, layout.span_stride)[:, : len(raw)] == raw).all()
    for layer in range(LAYERS):
        assert not store.is_sealed(layer, range(PAGES)).any()


# ---- any sequence of operations ----------------------------------------------------------------
class AnySequence(RuleBasedStateMachine):
    """Random appends, seals, clears and reads against a dictionary of tokens."""

    shape = KVShape(2, 2, 2, 64, heads_per_span=1)
    pages = 3

    @initialize()
    def start(self) -> None:
        """Begin with an empty store over NaN."""
        self.store = poisoned(PageStore(self.shape, self.pages))
        self.held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.sealed: set[tuple[int, int]] = set()
        self.seed = 0

    def _count(self, layer: int, page: int) -> int:
        return sum((layer, page * PAGE + t) in self.held for t in range(PAGE))

    def _full(self) -> list[tuple[int, int]]:
        every = product(range(2), range(self.pages))
        return [at for at in every if self._count(*at) == PAGE and at not in self.sealed]

    @rule(layer=st.integers(0, 1), data=st.data(), whole=st.booleans())
    def append(self, layer: int, data: st.DataObject, whole: bool) -> None:
        """A whole page, or some slots of any pages, a few of them skipped."""
        if whole:
            page = data.draw(st.integers(0, self.pages - 1))
            slots = [page * PAGE + t for t in data.draw(st.permutations(range(PAGE)))]
        else:
            one = st.integers(0, self.pages * PAGE - 1)
            slots = data.draw(st.lists(one, max_size=20, unique=True))
            slots += [-1] * data.draw(st.integers(0, 2))
        self.seed += 1
        k, v = tokens(len(slots), self.seed)
        written = torch.tensor(slots, dtype=torch.int32)
        if any((layer, slot // PAGE) in self.sealed for slot in slots if slot >= 0):
            before = snapshot(self.store)
            with pytest.raises(PageStateError):
                self.store.append(layer, k, v, written)
            assert_unchanged(self.store, before)
            return
        self.store.append(layer, k, v, written)
        for i, slot in enumerate(slots):
            if slot >= 0:
                self.held[layer, slot] = k[i], v[i]

    @precondition(lambda self: self._full())
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """Some of the full pages of a layer."""
        layer, _ = data.draw(st.sampled_from(self._full()))
        full = [page for at, page in self._full() if at == layer]
        pages = data.draw(st.lists(st.sampled_from(full), min_size=1, unique=True))
        self.store.seal(layer, pages)
        self.sealed |= {(layer, p) for p in pages}

    @rule(layer=st.integers(0, 1), page=st.integers(0, 2))
    def seal_one_that_may_not_be(self, layer: int, page: int) -> None:
        """A page that is partial or sealed is refused."""
        if (layer, page) in self._full():
            return
        before = snapshot(self.store)
        with pytest.raises(PageStateError):
            self.store.seal(layer, page)
        assert_unchanged(self.store, before)

    @rule(layer=st.integers(0, 1), pages=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def clear(self, layer: int, pages: list[int]) -> None:
        """Any pages."""
        self.store.clear(layer, pages)
        for page in pages:
            self.sealed.discard((layer, page))
            for t in range(PAGE):
                self.held.pop((layer, page * PAGE + t), None)

    @invariant()
    def everything_reads_back(self) -> None:
        """All tokens of all layers, and the states."""
        for layer in range(2):
            sealed = [(layer, page) in self.sealed for page in range(self.pages)]
            assert self.store.is_sealed(layer, range(self.pages)).tolist() == sealed
            got_k, got_v = self.store.read(layer, range(self.pages))
            mine = [slot for at, slot in self.held if at == layer]
            if mine:
                assert same_bits(got_k[mine], torch.stack([self.held[layer, s][0] for s in mine]))
                assert same_bits(got_v[mine], torch.stack([self.held[layer, s][1] for s in mine]))


AnySequence.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestAnySequence = AnySequence.TestCase


def test_a_changed_shape_chooses_its_own_heads_per_span():
    """dataclasses.replace() must not carry over a choice made for other heads."""
    shape = dataclasses.replace(KVShape(1, 8, 8, 128), num_kv_heads=4, num_qo_heads=4)
    assert shape.layout.heads_per_span == 4


# ---- the caller's surroundings -----------------------------------------------------------------
def _round(store: PageStore, seed: int) -> None:
    """Append, seal, read, clear."""
    k, v = mixed_values((16, 2, 64), seed), mixed_values((16, 2, 64), seed + 1)
    store.append(0, k, v, torch.arange(16))
    store.seal(0, 0)
    for read, given in zip(store.read(0, 0), (k, v), strict=True):
        assert same_bits(read, given)
    store.clear(0, 0)


def test_a_store_made_under_inference_mode_is_an_ordinary_one() -> None:
    """Engines allocate under inference_mode, and write wherever they please."""
    with torch.inference_mode():
        store = PageStore(KVShape(1, 2, 2, 64), 2)
        _round(store, 1)
    _round(store, 2)


@pytest.mark.parametrize("through", [pickle.dumps, copy.deepcopy])
def test_a_copied_store_is_whole(through: Callable) -> None:
    """Its tables and its pool must still be of one piece."""
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    _round(store, 3)
    made = through(store)
    _round(pickle.loads(made) if isinstance(made, bytes) else made, 4)


def test_the_default_device_is_not_asked() -> None:
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    x = mixed_values((16, 2, 64), 5)
    store.append(0, x, x, torch.arange(16))
    with torch.device("meta"):
        store.seal(0, 0)
    assert same_bits(store.read(0, 0)[0], x)


def test_values_that_lie_in_the_pool_are_read_before_it_is_written() -> None:
    """V may be a view of bytes that K is about to overwrite."""
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    k = mixed_values((16, 2, 64), 6)
    v = store.pool.view(torch.bfloat16)[64 : 64 + k.numel()].view(k.shape)
    before = v.clone()
    store.append(0, k, v, torch.arange(16))
    assert same_bits(store.read(0, 0)[1], before)


def test_fake_tensors_leave_nothing_behind() -> None:
    """Tables made while torch.compile traces must not be kept."""
    layout = KVShape(1, 2, 2, 64, page_size=32, rope="interleaved").layout
    with FakeTensorMode():
        x = torch.empty(1, 32, 2, 64, dtype=torch.bfloat16)
        with contextlib.suppress(Exception):
            zf_cute.reference.encode_pages(x, x, layout)
    x = mixed_values((1, 32, 2, 64), 7)
    assert zf_cute.reference.encode_pages(x, x, layout)[1].numel() == 1


def test_numpy_integers_are_page_ids() -> None:
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    assert store.is_sealed(0, np.arange(2)).tolist() == [False, False]
    for pages, message in ((1.5, "must be ints"), ("ab", "must be ints"), ([10**30], str(10**30))):
        with pytest.raises(ArgumentError, match=message):
            store.read(0, pages)
