"""PageStore: what is appended comes back bit for bit, sealed or not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from bits import (
    format_parameters,
    from_patterns,
    places_of,
    same_bits,
    stored_bytes,
    to_patterns,
)
from format.format_decoder import decode_page
from store.small_store import (
    DIM,
    HEADS,
    LAYERS,
    NAN,
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
    KVShape,
    PageStateError,
    PageStore,
    UnsupportedError,
)


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
    monkeypatch.setattr(zf_cute.reference.writing, "VALUES_AT_ONCE", 2 * SHAPE.layout.page_values)
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
