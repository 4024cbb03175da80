"""The encode kernel's PTX makes the bytes of the reference backend, and refuses what it must."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from bits import mixed_values, places_of, stored_bytes
from hypothesis import given, settings
from kernels.hard_blocks import HARD, VALUES, outlier_in_every_position
from kernels.ptx import SCHEDULES
from kernels.twins import LAYER, Twins

import zf_layouts
from zf_layouts.page import SPAN_ALIGNMENT


def filled(twins: Twins, pages: list[int], seed: int) -> None:
    """Full pages whose blocks are of all kinds."""
    layout = twins.layout
    shape = (len(pages), layout.page_size, layout.num_kv_heads, layout.head_dim)
    twins.fill(pages, mixed_values(shape, seed), mixed_values(shape, seed + 1))


def kinds(twins: Twins, page: int) -> set[int]:
    """Sizes of the blocks of a page."""
    return {stored_bytes(d) for d in twins.store.descriptors(LAYER, page).flatten().tolist()}


# ---- blocks -------------------------------------------------------------------------------------
@pytest.mark.parametrize("max_exceptions", [0, 1, 2, 3, 4])
def test_blocks_for_every_rule(max_exceptions: int) -> None:
    # 128 blocks in a page: 2 heads of 2 * 64 * 256 values.
    twins = Twins(2, 256, 64, max_exceptions=max_exceptions, pages=1, seed=max_exceptions)
    twins.fill_blocks(0, list(HARD.values()))
    twins.encode([0])
    assert kinds(twins, 0) == ({768, 784, 1024} if max_exceptions else {768, 1024})
    got = twins.store.descriptors(LAYER, 0).flatten().tolist()
    for (name, block), descriptor in zip(HARD.items(), got, strict=False):
        assert descriptor == zf_layouts.encode_block(block.tolist(), max_exceptions)[0], name


def test_an_outlier_in_every_position() -> None:
    twins = Twins(2, 256, 64, pages=1)
    twins.fill_blocks(0, list(outlier_in_every_position()))
    twins.encode([0])
    assert kinds(twins, 0) == {784}


@st.composite
def _blocks(draw: st.DrawFn) -> np.ndarray:
    """Up to 18 neighbouring exponents, and up to six values of any pattern put over them."""
    low = draw(st.integers(0, 255))
    high = min(255, low + draw(st.integers(0, 17)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    block = rng.integers(0, 2, VALUES) << 15 | rng.integers(low, high + 1, VALUES) << 7
    block |= rng.integers(0, 128, VALUES)
    special = st.sampled_from([0, 0x8000, 1, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81])
    for at, bits in draw(
        st.dictionaries(st.integers(0, 511), special | st.integers(0, 0xFFFF), max_size=6)
    ).items():
        block[at] = bits
    return block


@settings(max_examples=12)
@given(blocks=st.lists(_blocks(), min_size=4, max_size=4), max_exceptions=st.integers(0, 4))
def test_any_block_is_that_of_plain_python(blocks: list[np.ndarray], max_exceptions: int) -> None:
    # Not by way of the reference: `encode_block` is the text of FORMAT.md, one value at a time.
    twins = Twins(1, 64, 16, max_exceptions=max_exceptions, pages=1)
    twins.fill_blocks(0, blocks)
    twins.encode([0])
    start, length = places_of(twins.store.layer(LAYER), 0)[0]
    span = bytes(twins.store.pool[start * SPAN_ALIGNMENT :][:length].tolist())
    want = [zf_layouts.encode_block(block.tolist(), max_exceptions) for block in blocks]
    assert span[twins.layout.metadata_bytes :] == b"".join(data for _, data in want)
    descriptors = [span[twins.layout.descriptor_byte(0, p, b)] for p in "kv" for b in (0, 1)]
    assert descriptors == [descriptor for descriptor, _ in want]


@pytest.mark.parametrize(
    ("name", "heads", "head_dim", "page_size", "rope"),
    [
        ("qwen2.5-coder-1.5b/layer0", 2, 128, 64, "half"),
        ("qwen2.5-coder-1.5b/layer23", 2, 128, 16, "half"),
        ("smollm2-135m/layer15", 3, 64, 32, "half"),
        # Another model's order of dims: other blocks, fewer of which compress.
        ("qwen2.5-coder-1.5b/layer7", 2, 128, 16, "interleaved"),
    ],
)
def test_pages_of_real_models(
    real_kv: dict, name: str, heads: int, head_dim: int, page_size: int, rope: str
) -> None:
    twins = Twins(heads, head_dim, page_size, rope, pages=1)
    # From the start, where the first token is unlike all others.
    k, v = (real_kv[f"{name}/{part}"][None, :page_size] for part in "kv")
    twins.fill([0], k, v)
    lengths = twins.encode([0])
    assert lengths.sum() < 0.85 * twins.layout.spans * twins.layout.raw_span_bytes


# ---- spans --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "heads_per_span"),
    [
        # Blocks in a part 2, 4, 8, 16, 32; in a span 4 (the fewest), 8, 12, 16, 20, 32, 40, 64 and
        # 192: as many as the warps of a CTA take at once, fewer, more, and no multiple.
        (1, 64, 16, 1),
        (1, 128, 16, 1),
        (3, 64, 16, 3),
        (4, 64, 16, 2),
        (4, 64, 16, 4),
        (5, 64, 16, 5),
        (1, 256, 32, 1),
        (2, 128, 32, 1),
        (5, 128, 16, 5),
        (1, 256, 64, 1),
        (6, 128, 64, 6),
    ],
)
@pytest.mark.parametrize("warps", [None, 1, 4])  # what the launch says: one for four blocks, or few
def test_spans_of_any_length(
    heads: int, head_dim: int, page_size: int, heads_per_span: int, warps: int | None
) -> None:
    how = {"heads_per_span": heads_per_span, "pages": 1, "warps": warps}
    twins = Twins(heads, head_dim, page_size, **how)
    filled(twins, [0], 61)
    twins.encode([0])


@pytest.mark.parametrize("kind", ["compressed", "exceptions", "raw"])
def test_spans_of_one_kind_of_blocks(kind: str) -> None:
    # All raw is the longest a span can be: each block lies where it lay, byte for byte.
    block = {"compressed": "8.1", "exceptions": "8.3", "raw": "random bits"}[kind]
    twins = Twins(2, 128, 32, pages=1)
    twins.fill_blocks(0, [HARD[block]])
    before = twins.store.pool.clone()
    twins.encode([0])
    assert kinds(twins, 0) == {{"compressed": 768, "exceptions": 784, "raw": 1024}[kind]}
    assert torch.equal(twins.store.pool, before) == (kind == "raw")


def test_pages_in_odd_order_each_to_its_own_place() -> None:
    twins = Twins(2, 64, 16, heads_per_span=1, pages=5)
    filled(twins, [0, 1, 2, 4], 67)
    twins.encode([4, 0, 2], index=torch.int32)
    twins.encode([1])
    twins.refuses()
    twins.decode([0, 1, 2, 4])


def _free(twins: Twins, pages: list[int], shift: int) -> torch.Tensor:
    """Room for pages, at the homes of others and `shift` units of 128 bytes further on."""
    return twins.expected._raw_places[LAYER, pages, :, 0] + shift


@pytest.mark.parametrize("heads_per_span", [1, 3])
def test_to_a_new_place_over_nan(heads_per_span: int) -> None:
    # All of the destination is NaN, also where metadata has padding and unused descriptors: three
    # heads of two blocks a part have both.
    twins = Twins(3, 64, 16, heads_per_span=heads_per_span, pages=6)
    filled(twins, [0, 2], 71)
    for store in (twins.expected, twins.store):
        homes = store._homes[LAYER, 3:]
        homes.view(torch.int16).fill_(0x7FC0)
    before = twins.store.pool.clone()
    destinations = _free(twins, [4, 3], 2)
    twins.encode([2, 0], destinations)
    twins.refuses()
    twins.decode([0, 2])
    # The pages still lie where they were, too.
    homes = slice(0, 3 * twins.layout.page_stride)
    offset = 6 * twins.layout.page_stride
    moved = twins.store.pool[offset:][homes]
    assert torch.equal(moved, before[offset:][homes])


def test_a_moved_page_in_place() -> None:
    twins = Twins(2, 64, 16, heads_per_span=1, pages=4, moved=True)
    filled(twins, [1, 3], 73)
    twins.encode([3, 1])
    twins.decode([1, 3])


# ---- refused ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("index", "ids"),
    [
        (torch.int32, [4, -1, 2**31 - 1, -(2**31)]),
        (torch.int64, [4, -1, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1, -(2**32) + 1]),
    ],
)
def test_ids_out_of_range_are_left_out_and_counted(index: torch.dtype, ids: list[int]) -> None:
    twins = Twins(1, 64, 16, pages=4)
    filled(twins, [0, 1, 3], 79)
    pages = [1, *ids, 3]
    twins.encode(pages, refused=[page in ids for page in pages], index=index)
    twins.refuses(PAGE_OUTSIDE=len(ids))


def test_an_id_out_of_range_counts_once_whatever_the_spans() -> None:
    # `PageStore.check` calls the count "page ids out of range".
    twins = Twins(2, 64, 16, heads_per_span=1, pages=4)
    twins.encode([4], refused=[True])
    twins.refuses(PAGE_OUTSIDE=1)


def test_pages_that_must_not_be_sealed_stay_as_they_are() -> None:
    twins = Twins(2, 64, 32, heads_per_span=1, pages=6, moved=True)
    filled(twins, [0, 1, 2, 3], 83)
    twins.encode([2])
    for store in (twins.expected, twins.store):
        written = store._written[LAYER]
        written[0] &= ~(1 << 31)  # lacks the last token,
        written[3] &= ~1  # the first,
        # and this one has all tokens but bits of a longer page besides: it is full.
        written[1] |= 1 << 40
    # Page 4 is empty, 2 is sealed.
    twins.encode([0, 1, 2, 3, 4], refused=[True, False, True, True, True])
    twins.refuses(PAGE_NOT_SEALABLE=4)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_every_slot_of_a_page_must_be_written(size: int) -> None:
    twins = Twins(1, 64, size, pages=3)
    filled(twins, [0, 1, 2], 89)
    for page, bit in enumerate((0, size // 2, size - 1)):
        missing = 1 << bit if bit < 63 else -(1 << 63)
        for store in (twins.expected, twins.store):
            store._written[LAYER, page] ^= missing
    twins.encode([0, 1, 2], refused=[True] * 3)
    twins.refuses(PAGE_NOT_SEALABLE=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_id_given_twice_is_sealed_once(schedule: str) -> None:
    # Which of the items seals it is open; it seals all spans and the others none.  Every span is
    # encoded once, or the second would take encoded bytes for raw ones.
    twins = Twins(2, 64, 16, heads_per_span=1, pages=3, schedule=schedule, seed=5)
    filled(twins, [1, 2], 97)
    lengths = twins.layer.encode(torch.tensor([2, 1, 2, 2]))
    again = Twins(2, 64, 16, heads_per_span=1, pages=3)
    filled(again, [1, 2], 97)
    want = again.encode([2, 1])
    assert torch.equal(lengths[1], want[1])
    repeated = lengths[[0, 2, 3]]
    assert (repeated != 0).any(1).sum() == 1
    assert torch.equal(repeated.max(0).values, want[0])
    assert torch.equal(twins.store.pool, again.store.pool)
    assert torch.equal(twins.store.places, again.store.places)
    assert torch.equal(twins.store._sealed, again.store._sealed)
    twins.refuses(PAGE_NOT_SEALABLE=2)


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [*((s, 0) for s in SCHEDULES), *(("random", seed) for seed in range(1, 9))],
)
def test_of_equal_ids_with_places_of_their_own_one_is_followed(schedule: str, seed: int) -> None:
    # Three spans, and three items that would put them elsewhere: all go where one item says, and
    # nothing is written where the others say.
    how = {"heads_per_span": 1, "pages": 6}
    twins = Twins(3, 64, 16, schedule=schedule, seed=seed, **how)
    filled(twins, [1, 2], 107)
    to = _free(twins, [0, 3, 4, 5], 0)
    to[1] = to[1].roll(1)
    lengths = twins.layer.encode(torch.tensor([2, 1, 2, 2]), to)
    (winner,) = [item for item in (0, 2, 3) if lengths[item].any()]
    assert (lengths[winner] > 0).all()
    assert twins.store._claimed[LAYER].tolist() == [0, 2, winner + 1, 0, 0, 0]
    twins.refuses(PAGE_NOT_SEALABLE=2)
    again = Twins(3, 64, 16, **how)
    filled(again, [1, 2], 107)
    want = again.encode([2, 1], to[[winner, 1]])
    assert torch.equal(lengths[[winner, 1]], want)
    for name in ("pool", "places", "_written", "_sealed"):
        assert torch.equal(getattr(twins.store, name), getattr(again.store, name)), name


def test_a_claim_ends_when_its_page_is_cleared() -> None:
    # Sealed as one item, then as another.
    twins = Twins(2, 64, 16, heads_per_span=1, pages=3)
    filled(twins, [0, 1, 2], 109)
    twins.encode([0, 1, 2])
    twins.encode([2, 1, 0], refused=[True] * 3)
    twins.refuses(PAGE_NOT_SEALABLE=3)
    twins.clear([2, 0])
    filled(twins, [2], 113)
    twins.encode([2])
    twins.encode([0, 1], refused=[True] * 2)
    twins.refuses(PAGE_NOT_SEALABLE=2)
    twins.decode([1, 2])


# ---- destinations outside the pool --------------------------------------------------------------
def _cut(twins: Twins, nbytes: int) -> None:
    """The layer's pool ends so many bytes before its store's does."""
    kv = twins.layer.kv
    twins.layer.kv = replace(kv, pool=kv.pool[: len(kv.pool) - nbytes])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad_span", [0, 1, 2])
def test_pages_with_a_destination_outside_the_pool_stay_as_they_are(
    bad_span: int, index: torch.dtype
) -> None:
    # Whichever span it is, no span of the page is touched; the pages beside it are sealed.
    twins = Twins(3, 64, 16, heads_per_span=1, pages=9)
    filled(twins, [0, 1, 2, 3], 127)
    last = (len(twins.store.pool) - twins.layout.raw_span_bytes) // SPAN_ALIGNMENT
    to = _free(twins, [4, 5, 6, 7], 0)
    for item, start in ((0, -1), (1, last + 1), (3, -(2**31))):
        to[item, bad_span] = start
    twins.encode([3, 0, 2, 1], to, refused=[True, True, False, True], index=index)
    twins.refuses(DESTINATION_OUTSIDE=3)
    twins.decode([0, 1, 2, 3])
    # They can be sealed still: nobody has claimed them.
    twins.encode([1, 3, 0], _free(twins, [8, 4, 5], 0))
    twins.refuses()


def test_what_else_is_wrong_counts_before_a_destination() -> None:
    twins = Twins(2, 64, 16, heads_per_span=1, pages=4)
    filled(twins, [0, 1], 131)
    twins.encode([1])
    twins.encode([1, 4, 2, 0], torch.full((4, 2), -1, dtype=torch.int32), refused=[True] * 4)
    twins.refuses(PAGE_NOT_SEALABLE=2, PAGE_OUTSIDE=1, DESTINATION_OUTSIDE=1)


@pytest.mark.parametrize("pool_at", [0, (1 << 32) - (6 * 4224), (1 << 39) - 8 * 4224])
@pytest.mark.parametrize(("missing", "refused"), [(0, False), (112, False), (113, True)])
def test_room_is_that_of_a_raw_span(pool_at: int, missing: int, refused: bool) -> None:
    # The last home of a pool has 112 bytes of slack: all of it may be missing, and no byte more,
    # though the sealed span is shorter than the raw one.
    twins = Twins(1, 64, 16, pages=4, pool_at=pool_at)
    assert twins.layout.span_stride - twins.layout.raw_span_bytes == 112
    filled(twins, [0], 137)
    _cut(twins, missing)
    lengths = twins.encode([0], _free(twins, [3], 0), refused=[refused])
    twins.refuses(**({"DESTINATION_OUTSIDE": 1} if refused else {}))
    assert lengths.item() < twins.layout.raw_span_bytes - 128
    if pool_at + len(twins.store.pool) < 1 << 39 and not refused:
        twins.clear([0])
        filled(twins, [0], 137)
        twins.encode([0], _free(twins, [3], 1), refused=[True])
        twins.refuses(DESTINATION_OUTSIDE=1)


def test_a_pool_shorter_than_a_span_has_no_room() -> None:
    # What is left of it has a negative number of places.
    twins = Twins(1, 64, 16, pages=2)
    filled(twins, [0], 139)
    _cut(twins, len(twins.store.pool) - 256)
    twins.encode([0], torch.zeros(1, 1, dtype=torch.int32), refused=[True])
    twins.refuses(DESTINATION_OUTSIDE=1)


def test_destinations_do_not_matter_in_place() -> None:
    # Lengths stand where destinations would: they are -1 before, a place outside the pool.
    twins = Twins(2, 64, 16, heads_per_span=1, pages=2)
    filled(twins, [0, 1], 149)
    twins.encode([1, 0])
    twins.refuses()


# ---- far and in any order -----------------------------------------------------------------------
STRIDE = 4224  # of the one span of a page of 64 x 16 values


@pytest.mark.parametrize(
    "pool_at",
    [
        (1 << 32) - (6 * STRIDE + 2048),  # 4 GiB lie within the second page of the layer
        (1 << 38) - (6 * STRIDE + 2048),  # and 256 GiB: places that are negative with a sign
        (1 << 39) - 10 * STRIDE,  # the end of the farthest pool
    ],
)
def test_pools_of_up_to_512_gib(pool_at: int) -> None:
    twins = Twins(1, 64, 16, pages=5, pool_at=pool_at)
    assert twins.layout.page_stride == STRIDE
    filled(twins, [0, 1, 2], 101)
    twins.encode([1])
    twins.encode([2, 0], _free(twins, [4, 3], 0))
    twins.decode([2, 1, 0])
    twins.refuses()


@pytest.mark.parametrize(
    ("schedule", "seed"), [*((s, 0) for s in SCHEDULES), ("random", 1), ("random", 2)]
)
@pytest.mark.parametrize("warps", [4, None])
def test_any_order_of_warps(schedule: str, seed: int, warps: int | None) -> None:
    # Two spans of two chunks and a half each; then of one chunk.
    how = {"schedule": schedule, "seed": seed, "warps": warps}
    twins = Twins(10, 64, 32, heads_per_span=5, pages=1, **how)
    filled(twins, [0], 103)
    twins.encode([0])
    twins.refuses()
