"""The append kernel's PTX writes what the reference backend writes, and nothing else."""

from __future__ import annotations

import pytest
import torch
from bits import to_patterns
from kernels.ptx import SCHEDULES
from kernels.twins import LAYER, Twins, distinct_rows
from torch import Tensor

from zf_layouts.page import SPAN_ALIGNMENT

PAGES = 6


def run_of(first: int, count: int) -> list[int]:
    """Slots one after another."""
    return list(range(first, first + count))


def patterns(size: int) -> dict[str, list[int]]:
    """Slots of one launch by what is odd about them, for six pages of `size` tokens.

    A warp looks at 16 rows, at the 16 before and at up to 32 after, and what it moves as a tile is
    16 rows of 16 slots that begin at a multiple of 16.
    """
    skip = [-1]
    return {
        "one row": [2 * size + 3],
        "15 rows": run_of(size, 15),
        "one tile": run_of(3 * size, 16),
        "a tile and a row": run_of(size, 17),
        "33 rows": run_of(0, 33),
        "48 rows": run_of(size, 48),
        # Tiles begin at rows 11, 27, 43: each in the middle of one window and ends in the next.
        "shifted by 5": run_of(5, 60),
        "shifted by 1": run_of(1, 47),
        # Tiles begin at row 1, the earliest that is no multiple of 16, and row 15, the last.
        "shifted by 15": run_of(15, 35),
        "a tile from the last row of a window": skip * 15 + run_of(4 * size, 16),
        "a tile that the last window lacks a row of": skip * 15 + run_of(4 * size, 15),
        # Prompts of 5, 16 and 21 tokens, each from the start of a page of its own.
        "prompts": run_of(2 * size, 5) + run_of(0, 16) + run_of(3 * size, 21),
        "descending tiles": [s for t in (3, 2, 1, 0) for s in run_of(size + 16 * t, 16)],
        "a tile in two by a skipped row": run_of(0, 8) + skip + run_of(8, 8) + run_of(16, 16),
        "skipped rows around tiles": skip * 3 + run_of(16, 16) + skip + run_of(48, 16) + skip,
        "across pages": run_of(2 * size - 8, 24),
        "16 rows across a multiple of 16": run_of(size + 4, 16),
        "a jump of one inside": [*run_of(0, 9), *run_of(10, 6), *run_of(17, 16)],
        "descending rows": run_of(size, 20)[::-1],
        "every other slot": run_of(0, 40)[::2],
        "scattered": [5 * size + 1, 0, 3 * size + 15, size - 1, 2 * size, 5 * size, 1],
        "all skipped": skip * 19,
        # The last slots of the last page: bit 63 of `written` where a page has 64.
        "the end": run_of(PAGES * size - 17, 17),
    }


def tensors(slots: list[int], twins: Twins, seed: int, dtype=torch.int64):
    """K, V and slots of a launch."""
    layout = twins.layout
    k, v = distinct_rows(len(slots), layout.num_kv_heads, layout.head_dim, seed)
    return k, v, torch.tensor(slots, dtype=dtype)


# Each of: page sizes, head_dims, ropes, one and several heads, one span and several, both index
# types, both ways to read rows, 1, 16 and an odd number of sharers; not all of them together.
CONFIGURATIONS = [
    # heads, head_dim, page_size, rope, heads_per_span, index, vectors, sharers
    (1, 64, 64, "half", 1, torch.int64, True, 1),
    (2, 64, 32, "interleaved", 1, torch.int32, False, 5),
    (3, 64, 16, "half", 3, torch.int32, True, 16),
]


@pytest.mark.parametrize("name", patterns(16))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: f"{c[0]}x{c[1]}-{c[2]}")
def test_any_order_of_slots(configuration: tuple, name: str) -> None:
    heads, head_dim, size, rope, heads_per_span, index, vectors, sharers = configuration
    twins = Twins(
        heads, head_dim, size, rope, heads_per_span=heads_per_span, pages=PAGES, seed=len(name)
    )
    slots = patterns(size)[name]
    twins.append(*tensors(slots, twins, 3, index), sharers=sharers, vectors=vectors)
    twins.refuses()


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "size"), [(64, 16), (128, 16), (128, 64), (256, 16), (256, 32)]
)
def test_every_value_goes_to_its_place(head_dim: int, size: int, rope: str, vectors: bool) -> None:
    # A tile and single rows beside it, at even and odd tokens and in both halves of a tile.
    twins = Twins(1, head_dim, size, rope, pages=3)
    slots = [*run_of(size, 16), 0, 5, 10, 15]
    twins.append(*tensors(slots, twins, 7, torch.int32), vectors=vectors, sharers=2)
    twins.refuses()


def strided(name: str, x: Tensor) -> Tensor:
    """The same values in memory that is laid out otherwise."""
    rows, heads, head_dim = x.shape
    if name == "heads first":  # as models have them before a transpose; dense rows
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if name == "dims first":
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if name == "every second dim":
        return torch.stack([x, torch.full_like(x, 7.0)], -1)[..., 0]
    if name == "K and V of one tensor":  # dense rows, in steps of more than a row
        return torch.cat([torch.full_like(x, 7.0), x], 1)[:, heads:]
    if name == "padded by 8":  # still 16 bytes at a time
        return torch.cat([x, torch.full((rows, heads, 8), 7.0).bfloat16()], -1)[..., :head_dim]
    if name == "padded by 1":
        return torch.cat([x, torch.full((rows, heads, 1), 7.0).bfloat16()], -1)[..., :head_dim]
    if name == "off by one value":
        flat = torch.cat([torch.zeros(1).bfloat16(), x.flatten()])
        return flat[1:].view(rows, heads, head_dim)
    if name == "reversed rows":
        return x.flip(0).contiguous().flip(0)
    raise ValueError(name)


@pytest.mark.parametrize(
    ("k_name", "v_name", "vectors"),
    [
        ("heads first", "heads first", True),
        ("K and V of one tensor", "padded by 8", True),
        ("dims first", "every second dim", False),
        ("every second dim", "heads first", False),
        ("padded by 1", "off by one value", False),
        ("heads first", "padded by 1", False),
        ("off by one value", "dims first", False),
    ],
)
def test_rows_of_any_strides(k_name: str, v_name: str, vectors: bool) -> None:
    twins = Twins(2, 64, 16, pages=3)
    k, v, slots = tensors([*run_of(3, 45)], twins, 11)
    k_strided, v_strided = strided(k_name, k), strided(v_name, v)
    assert torch.equal(k_strided.view(torch.int16), k.view(torch.int16))
    twins.layer.append(k_strided, v_strided, slots)
    assert twins.layer.launched[-1].vectors == vectors
    twins.append(k, v, slots)


def test_rows_that_are_one_row_and_slots_that_are_strided() -> None:
    # Strides of zero, as `expand` makes them, and every other element of a tensor of slots.
    twins = Twins(2, 64, 32)
    k, v, _ = tensors([0], twins, 13)
    slots = torch.stack([torch.arange(20), torch.full((20,), -7)], 1)[:, 0]
    k, v = k.expand(20, -1, -1), v[:, :1].expand(20, 2, -1)
    twins.append(k, v, slots)
    twins.refuses()


@pytest.mark.parametrize("vectors", [True, False])
def test_rows_past_two_billion_values(vectors: bool) -> None:
    # Row 16 begins 2**31 values on.  Nearly all of the 4 GiB are never touched, so they take no
    # memory; watching for races would take some.
    twins = Twins(1, 64, 32, pages=1, races=False)
    apart = 1 << 27
    k, v, slots = tensors(run_of(0, 17), twins, 37)
    strided = torch.empty(16 * apart + 64, dtype=torch.bfloat16).as_strided(k.shape, (apart, 64, 1))
    strided.copy_(k)
    twins.layer.append(strided, v, slots, vectors=vectors)
    twins.append(k, v, slots)


def test_appends_one_after_another_fill_pages() -> None:
    # Chunked prefill, then decode steps of one token for several sequences, then again a slot that
    # was written before.
    twins = Twins(2, 64, 16, heads_per_span=1)
    for seed, slots in enumerate([run_of(0, 21), run_of(32, 7), [21, 39], [22, 40], [5, 22]]):
        twins.append(*tensors(slots, twins, seed))
    twins.refuses()


@pytest.mark.parametrize("size", [16, 32, 64])
def test_written_has_a_bit_for_every_slot(size: int) -> None:
    # Whole tiles set 16 bits, and single rows one each; bit 63 is the sign of the 64-bit word.
    twins = Twins(1, 64, size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size)).tolist()
    twins.append(*tensors(order[: size // 2], twins, 1), sharers=16)
    assert int(twins.store._written[LAYER, 0]) & (1 << 64) - 1 == sum(
        1 << slot for slot in order[: size // 2]
    )
    twins.append(*tensors(run_of(0, size), twins, 2))
    twins.append(*tensors([3 * size - 1], twins, 3))
    full = -1 if size == 64 else (1 << size) - 1
    last = -(1 << 63) if size == 64 else 1 << size - 1
    assert twins.store._written[LAYER].tolist() == [full, 0, last]


@pytest.mark.parametrize("heads_per_span", [1, 2])
def test_pages_that_were_moved(heads_per_span: int) -> None:
    twins = Twins(2, 64, 16, heads_per_span=heads_per_span, pages=5, moved=True)
    twins.append(*tensors([*run_of(16, 32), 3, 78, 79], twins, 5))
    twins.refuses()


# ---- refused ------------------------------------------------------------------------------------
OUT_OF_RANGE = {
    torch.int32: (2**31 - 1, -2, -(2**31)),
    torch.int64: (2**31, 2**32, 2**32 + 3, 2**63 - 1, -2, -(2**63), -(2**32) + 3),
}


@pytest.mark.parametrize("sharers", [1, 16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_slots_out_of_range_are_left_out_and_counted_once(index: torch.dtype, sharers: int) -> None:
    # Two heads and, with 16 sharers, as many warps a window: one of them counts.
    twins = Twins(2, 64, 16, heads_per_span=1)
    count = 3 * 16
    wrong = [count, *OUT_OF_RANGE[index]]
    # Among single rows, between the rows of what would be a tile, and before a tile.
    slots = [
        0,
        *wrong[:2],
        1,
        *run_of(16, 8),
        wrong[2],
        *run_of(24, 8),
        *wrong[3:],
        *run_of(32, 16),
    ]
    k, v, slots = tensors(slots, twins, 17, index)
    refused = (slots < -1) | (slots >= count)
    twins.append(k, v, slots, refused, sharers=sharers)
    twins.refuses(SLOT_OUTSIDE=len(wrong))


def test_a_run_that_leaves_the_last_page_stops_there() -> None:
    # The last tile is whole; 16 more slots are none.
    twins = Twins(1, 64, 16)
    k, v, slots = tensors(run_of(32, 32), twins, 19)
    twins.append(k, v, slots, slots >= 48)
    twins.refuses(SLOT_OUTSIDE=16)


@pytest.mark.parametrize("sharers", [1, 16])
@pytest.mark.parametrize("heads_per_span", [1, 2])
def test_rows_of_sealed_pages_are_left_out_and_counted_once(
    heads_per_span: int, sharers: int
) -> None:
    twins = Twins(2, 64, 32, heads_per_span=heads_per_span, pages=4)
    k, v = distinct_rows(64, 2, 64)
    twins.fill([1, 3], k.view(2, 32, 2, 64), v.view(2, 32, 2, 64))
    twins.encode([1, 3])
    # A whole tile of a sealed page, single rows of one, a tile that a sealed page follows.
    slots = [*run_of(32, 16), 0, 49, 1, 127, *run_of(16, 32), -1, *run_of(64, 16)]
    k, v, slots = tensors(slots, twins, 23)
    refused = (slots // 32 == 1) | (slots // 32 == 3)
    assert refused.sum() == 16 + 2 + 16
    twins.append(k, v, slots, refused, sharers=sharers)
    twins.refuses(SLOT_SEALED=34)


# ---- slots given twice --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "slots",
    [
        run_of(0, 16) + run_of(0, 16),
        run_of(16, 16) + run_of(0, 16) + run_of(16, 16),
        run_of(0, 16) + run_of(8, 8) + run_of(0, 3),
        [5, 5, 5],
    ],
)
def test_a_slot_given_twice_gets_values_of_either_row(slots: list[int]) -> None:
    # The rows race, so values are asked one by one, and not rows; all other bytes are as ever.
    twins = Twins(2, 64, 32, races=False, pages=2)
    k, v, slots = tensors(slots, twins, 29)
    last = torch.tensor([(slots[i + 1 :] != slots[i]).all() for i in range(len(slots))])
    twins.layer.append(k, v, slots)
    got = twins.store.read(LAYER, [0, 1])
    chosen = [x.clone() for x in (k, v)]
    for slot in slots.unique().tolist():
        rows = slots == slot
        for given, found, expected in zip((k, v), got, chosen, strict=True):
            either = to_patterns(given[rows]) == to_patterns(found[slot])
            assert either.any(0).all(), slot
            expected[rows & last] = found[slot]
    twins.append(*chosen, slots.masked_fill(~last, -1))


# ---- far ----------------------------------------------------------------------------------------
STRIDE = 8320  # of a page of 64 x 32 values


@pytest.mark.parametrize(
    "pool_at",
    [
        (1 << 32) - (3 * STRIDE + 4096),  # 4 GiB lie in the layer's first page
        (1 << 38) - (3 * STRIDE + 4096),  # and 256 GiB: places that are negative with a sign
        (1 << 39) - 6 * STRIDE,  # up to the last byte that a place can reach
    ],
)
def test_pools_of_up_to_512_gib(pool_at: int) -> None:
    twins = Twins(1, 64, 32, pages=3, pool_at=pool_at)
    assert twins.layout.page_stride == STRIDE
    assert pool_at + twins.store.pool.numel() <= SPAN_ALIGNMENT << 32
    twins.append(*tensors([*run_of(16, 32), 0, 95, 50], twins, 31))
    twins.refuses()


# ---- schedules ----------------------------------------------------------------------------------
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_order_of_warps(schedule: str, vectors: bool) -> None:
    slots = [*run_of(5, 30), -1, 63, *run_of(80, 16), 3, 200]
    for seed in range(3 if schedule == "random" else 1):
        twins = Twins(2, 64, 32, pages=3, schedule=schedule, seed=seed)
        k, v, given = tensors(slots, twins, seed)
        twins.append(k, v, given, given >= 96, vectors=vectors, sharers=3)
        twins.refuses(SLOT_OUTSIDE=1)
