"""PageStore: each error names what is wrong, and a call that raises changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from store.small_store import (
    LAYERS,
    PAGE,
    PAGES,
    SHAPE,
    assert_holds,
    assert_unchanged,
    fill,
    poisoned,
    snapshot,
    tokens,
)

import zf_cute.reference.writing
from zf_cute import (
    ArgumentError,
    FormatError,
    PageStateError,
    PageStore,
    UnsupportedError,
)


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
    values = pages_at_once * SHAPE.layout.page_values
    monkeypatch.setattr(zf_cute.reference.writing, "VALUES_AT_ONCE", values)
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
