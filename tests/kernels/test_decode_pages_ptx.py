"""The decode kernel's PTX reads what the reference backend reads, and nothing outside a span."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bits import from_patterns, mixed_values, same_bits
from kernels.hard_blocks import HARD, outlier_in_every_position
from kernels.ptx import SCHEDULES, MemoryFault
from kernels.twins import LAYER, Twins, distinct_rows

from zf_cute import reference
from zf_layouts import PARTS
from zf_layouts.page import SPAN_ALIGNMENT, UNIT


def with_pages(twins: Twins, pages: list[int], sealed: list[int], seed: int = 0) -> Twins:
    """Full pages of all kinds of blocks, some of them sealed, by the reference."""
    layout = twins.layout
    shape = (len(pages), layout.page_size, layout.num_kv_heads, layout.head_dim)
    twins.fill(pages, mixed_values(shape, seed), mixed_values(shape, seed + 1))
    if sealed:
        twins.seal(sealed)
    return twins


# ---- pages --------------------------------------------------------------------------------------
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "heads_per_span"),
    # Head_dims and page sizes, blocks in a part from 2 to 32, one span and several.
    [(3, 64, 16, 3), (2, 64, 64, 1), (2, 128, 32, 2), (1, 256, 16, 1), (2, 256, 64, 1)],
)
def test_raw_and_sealed_pages(
    heads: int, head_dim: int, page_size: int, heads_per_span: int, rope: str
) -> None:
    twins = Twins(heads, head_dim, page_size, rope, heads_per_span=heads_per_span)
    with_pages(twins, [0, 1], sealed=[1], seed=head_dim + page_size)
    twins.decode([1, 0, 1])
    twins.refuses()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_slots_that_were_never_written_hold_what_was_there(index: torch.dtype) -> None:
    # Page 1 has some tokens, 0 none: NaN elsewhere, bit for bit.
    twins = Twins(2, 64, 32, heads_per_span=1, pages=4)
    with_pages(twins, [3], sealed=[3])
    k, v = distinct_rows(20, 2, 64)
    for store in (twins.expected, twins.store):
        store.append(LAYER, k, v, torch.arange(40, 60))
    twins.decode([0, 3, 1, 1], index)
    twins.refuses()


@pytest.mark.parametrize("max_exceptions", [0, 1, 4])
def test_blocks_for_every_rule(max_exceptions: int) -> None:
    twins = Twins(2, 256, 64, max_exceptions=max_exceptions, pages=1)
    twins.fill_blocks(0, list(HARD.values()))
    twins.seal([0])
    twins.decode([0])
    twins.refuses()


def test_an_outlier_in_every_position() -> None:
    twins = Twins(2, 256, 64, pages=1)
    twins.fill_blocks(0, list(outlier_in_every_position()))
    twins.seal([0])
    twins.decode([0])


def test_pages_of_a_real_model(real_kv: dict) -> None:
    twins = Twins(2, 128, 32, pages=2)
    k, v = (real_kv[f"qwen2.5-coder-1.5b/layer0/{p}"][:64].view(2, 32, 2, 128) for p in "kv")
    twins.fill([0, 1], k, v)
    twins.seal([0, 1])
    twins.decode([1, 0])
    got = twins.layer.decode_pages(torch.tensor([0, 1]))
    assert same_bits(got[0], k)
    assert same_bits(got[1], v)


@pytest.mark.parametrize("heads_per_span", [1, 2])
def test_pages_that_were_moved(heads_per_span: int) -> None:
    twins = Twins(2, 64, 16, heads_per_span=heads_per_span, pages=5, moved=True)
    with_pages(twins, [0, 2, 4], sealed=[])
    twins.encode([2])
    twins.decode([4, 2, 0, 2])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ids_out_of_range_give_zeros_and_are_counted(index: torch.dtype) -> None:
    wrong = [3, -1, -(2**31), 2**31 - 1]
    if index == torch.int64:
        wrong += [2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1, 1 - (1 << 32)]
    twins = with_pages(Twins(2, 64, 32, heads_per_span=1), [0, 1], sealed=[1])
    ids = [1, *wrong, 0, 1]
    k, v = twins.layer.decode_pages(torch.tensor(ids).to(index))
    want_k, want_v = reference.decode_pages(twins.want, torch.tensor([1, 0, 1]))
    right = [0, -2, -1]
    for got, want in ((k, want_k), (v, want_v)):
        assert same_bits(got[right], want)
        assert not got[1:-2].view(torch.int16).any()
    twins.check()
    twins.refuses(PAGE_OUTSIDE=len(wrong))


# ---- spans that no writer makes, and unusual ones -----------------------------------------------
HEADS = 2
METADATA_UNITS = 2  # of one span of both heads, with 2 blocks a part


def one_span(max_exceptions: int = 4, *, far: bool = False, **how: object) -> Twins:
    """Pages of two heads in one span; page 1 is sealed and has blocks of several kinds."""
    twins = Twins(
        HEADS, 64, 16, heads_per_span=HEADS, pages=3, max_exceptions=max_exceptions, **how
    )
    names = ["8.1", "8.2", "random bits", "8.4", "exponents 239 to 255", "8.3", "8.1", "8.2"]
    twins.fill_blocks(1, [HARD[name] for name in names])
    twins.seal([1])
    return twins


def span_of(twins: Twins) -> tuple[torch.Tensor, int, int]:
    """Bytes of page 1's span in the simulated store's pool (a view), their start and length."""
    start, length = twins.store.places[LAYER, 1, 0].tolist()
    at = start * SPAN_ALIGNMENT
    return twins.store.pool[at : at + length], at, length


def alone(twins: Twins) -> Twins:
    """Let page 1's span be all of the pool that can be read."""
    _, at, length = span_of(twins)
    twins.layer.mapped = slice(at, at + length)
    return twins


def reads_as(twins: Twins, zero: set[tuple[int, str]], times: int = 1) -> None:
    """Page 1 reads as the expected store has it, but for zeros in parts (head, "k" or "v")."""
    got = twins.layer.decode_pages(torch.tensor([1] * times))
    want = reference.decode_pages(twins.want, torch.tensor([1] * times))
    for part, ours, theirs in zip(PARTS, got, want, strict=True):
        theirs = theirs.clone()
        for head in range(HEADS):
            if (head, part) in zero:
                theirs[:, :, head] = 0
        assert same_bits(ours, theirs), part
    counts = {"SPAN_MALFORMED": len(zero) * times} if zero else {}
    twins.refuses(**counts)


def set_start(twins: Twins, head: int, part: str, value: int) -> None:
    """Overwrite where a part's blocks begin."""
    span, _, _ = span_of(twins)
    at = twins.layout.start_byte(head, part)
    span[at : at + 4] = torch.tensor(list(value.to_bytes(4, "little")), dtype=torch.uint8)


def start_of(twins: Twins, head: int, part: str) -> int:
    """Where a part's blocks begin."""
    span, _, _ = span_of(twins)
    at = twins.layout.start_byte(head, part)
    return int.from_bytes(bytes(span[at : at + 4].tolist()), "little")


EVERY_PART = {(head, part) for head in range(HEADS) for part in PARTS}


def test_a_span_alone_in_memory_is_enough() -> None:
    # Nothing else of the pool can be read, up to the last byte of the span and the first.
    twins = alone(one_span())
    reads_as(twins, set(), times=2)


def _pool_units(twins: Twins) -> int:
    return twins.store.pool.numel() // SPAN_ALIGNMENT


RAW_SPAN = 8224  # 2 heads of 16 + 2 * 2 * 1024 bytes

BAD_PLACES: dict[str, Callable[[Twins, int, int], tuple[int, int]]] = {
    "at the pool's end": lambda t, start, n: (_pool_units(t), n),
    "across the pool's end": lambda t, start, n: (_pool_units(t) - n // SPAN_ALIGNMENT, n),
    "at the highest place": lambda t, start, n: ((1 << 32) - 1, n),
    "at 2**31": lambda t, start, n: (1 << 31, n),
    "no multiple of 16": lambda t, start, n: (start, n + 8),
    "one byte too many": lambda t, start, n: (start, n + 1),
    "no bytes": lambda t, start, n: (start, 0),
    "less than metadata": lambda t, start, n: (start, METADATA_UNITS * UNIT - UNIT),
    "16 bytes more than raw": lambda t, start, n: (start, RAW_SPAN + UNIT),
    "2 GiB": lambda t, start, n: (start, 1 << 31),
    "4 GiB less 16": lambda t, start, n: (start, (1 << 32) - UNIT),
}


@pytest.mark.parametrize("name", BAD_PLACES)
def test_a_place_of_no_span(name: str) -> None:
    twins = one_span()
    assert twins.layout.raw_span_bytes == RAW_SPAN
    assert twins.layout.metadata_bytes == METADATA_UNITS * UNIT
    _, at, length = span_of(twins)
    alone(twins)
    place = BAD_PLACES[name](twins, at // SPAN_ALIGNMENT, length)
    assert place != (at // SPAN_ALIGNMENT, length)
    twins.store.places[LAYER, 1, 0] = torch.tensor(place).to(torch.int32)
    reads_as(twins, EVERY_PART, times=2)


def test_a_place_of_metadata_alone() -> None:
    # Long enough for metadata, and no longer: that can be read, but there is no block.
    twins = one_span()
    _, at, _ = span_of(twins)
    twins.store.places[LAYER, 1, 0, 1] = METADATA_UNITS * UNIT
    twins.layer.mapped = slice(at, at + METADATA_UNITS * UNIT)
    reads_as(twins, EVERY_PART)


def test_a_span_that_ends_with_the_pool() -> None:
    # The last byte of the span is that of the pool, which is no multiple of 128 long.
    twins = one_span()
    _, at, length = span_of(twins)
    places = twins.store.places[LAYER]
    whole = twins.store.layer(LAYER)
    short = type(whole)(twins.store.pool[: at + length], places, twins.layout)
    twins.layer.kv = short
    twins.layer.mapped = slice(at, at + length)
    reads_as(twins, set())
    twins.layer.kv = type(whole)(twins.store.pool[: at + length - UNIT], places, twins.layout)
    twins.layer.mapped = slice(0, at)
    reads_as(twins, EVERY_PART)


@pytest.mark.parametrize("part", [(0, "k"), (0, "v"), (1, "k"), (1, "v")])
@pytest.mark.parametrize(
    "start", [0, METADATA_UNITS - 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFF - 200]
)
def test_a_start_outside_the_blocks(start: int, part: tuple[int, str]) -> None:
    twins = alone(one_span())
    set_start(twins, *part, start)
    reads_as(twins, {part})


@pytest.mark.parametrize("part", [(0, "k"), (1, "v")])
def test_a_part_that_passes_the_end(part: tuple[int, str]) -> None:
    # Its last byte is the span's last where it starts as late as it may; 16 bytes later is too far.
    twins = alone(one_span())
    _, _, length = span_of(twins)
    descriptors = twins.store.descriptors(LAYER, 1)[0, part[0], PARTS.index(part[1])].tolist()
    sizes = [768 if d < 128 else 784 if d < 249 else 1024 for d in descriptors]
    latest = (length - sum(sizes)) // UNIT
    set_start(twins, *part, latest + 1)
    reads_as(twins, {part})
    # Exactly at the end it is read, whatever lies there: no fault, and no count.
    set_start(twins, *part, latest)
    twins.layer.decode_pages(torch.tensor([1]))
    twins.refuses()


def test_a_length_that_lacks_the_last_bytes() -> None:
    # The last part of the span is malformed, and no other.
    twins = one_span()
    _, at, length = span_of(twins)
    twins.store.places[LAYER, 1, 0, 1] = length - UNIT
    twins.layer.mapped = slice(at, at + length - UNIT)
    reads_as(twins, {(1, "v")})


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("descriptor", range(249, 255))
def test_a_descriptor_that_names_no_block(descriptor: int, block: int) -> None:
    for part in ((0, "v"), (1, "k")):
        twins = alone(one_span())
        span, _, _ = span_of(twins)
        span[twins.layout.descriptor_byte(*part, block)] = descriptor
        reads_as(twins, {part})


@pytest.mark.parametrize("descriptor", [128, 200, 248])
def test_exceptions_where_there_must_be_none(descriptor: int) -> None:
    # With max_exceptions 0 nobody writes them; with 1 such a block is read.
    for max_exceptions in (0, 1):
        twins = one_span(max_exceptions)
        span, _, _ = span_of(twins)
        span[twins.layout.descriptor_byte(0, "k", 0)] = descriptor
        if max_exceptions:
            twins.layer.decode_pages(torch.tensor([1]))
            twins.refuses()
        else:
            alone(twins)
            reads_as(twins, {(0, "k")})


def test_several_faults_of_one_page_and_right_pages_beside_it() -> None:
    twins = one_span()
    span, _, _ = span_of(twins)
    set_start(twins, 0, "k", 0)
    set_start(twins, 1, "v", 0xFFFFFFFF)
    span[twins.layout.descriptor_byte(1, "k", 1)] = 254
    reads_as(twins, {(0, "k"), (1, "k"), (1, "v")}, times=3)
    k, v = distinct_rows(16, HEADS, 64, 5)
    for store in (twins.expected, twins.store):
        store.append(LAYER, k, v, torch.arange(32, 48))
    got = twins.layer.decode_pages(torch.tensor([2, 1, 2]))
    for ours, theirs in zip(got, (k, v), strict=True):
        assert same_bits(ours[0], theirs)
        assert same_bits(ours[2], theirs)


def test_a_fault_counts_once_however_many_warps_meet_it() -> None:
    # Four warps read a part of 64 tokens; one of them counts.
    twins = with_pages(Twins(1, 64, 64), [0], sealed=[0])
    at = int(twins.store.places[LAYER, 0, 0, 0]) * SPAN_ALIGNMENT
    twins.store.pool[at + twins.layout.descriptor_byte(0, "v", 7)] = 249
    k, v = twins.layer.decode_pages(torch.tensor([0]))
    want_k, _ = reference.decode_pages(twins.want, torch.tensor([0]))
    assert same_bits(k, want_k)
    assert not v.view(torch.int16).any()
    twins.refuses(SPAN_MALFORMED=1)


def test_a_reader_follows_starts_and_ignores_padding() -> None:
    # V before K, a gap between them, padding that is not zero, and descriptor bytes of blocks that
    # there are not: FORMAT.md section 7 has a reader take no notice.
    twins = Twins(1, 64, 16, pages=1)
    twins.fill_blocks(0, [HARD[name] for name in ("8.1", "8.3", "random bits", "8.2")])
    twins.seal([0])
    start, length = twins.store.places[LAYER, 0, 0].tolist()
    layout, at = twins.layout, start * SPAN_ALIGNMENT
    span = twins.store.pool[at : at + length].clone()
    k_start, v_start = (
        int(span[layout.start_byte(0, part)]) + 256 * int(span[layout.start_byte(0, part) + 1])
        for part in PARTS
    )
    k_bytes, v_bytes = span[k_start * UNIT : v_start * UNIT], span[v_start * UNIT :]
    metadata = span[: layout.metadata_bytes]
    new_v, new_k = layout.metadata_bytes // UNIT + 3, (len(span) - len(k_bytes)) // UNIT + 5
    for part, unit in (("k", new_k), ("v", new_v)):
        byte = layout.start_byte(0, part)
        metadata[byte : byte + 2] = torch.tensor([unit % 256, unit // 256])
        for unused in range(layout.blocks_per_part, layout.descriptor_bytes):
            metadata[layout.descriptor_byte(0, part, unused)] = 251
    moved = torch.full((length + 5 * UNIT,), 0xFF, dtype=torch.uint8)
    moved[: len(metadata)] = metadata
    moved[new_v * UNIT :][: len(v_bytes)] = v_bytes
    moved[new_k * UNIT :][: len(k_bytes)] = k_bytes
    assert new_v * UNIT + len(v_bytes) < new_k * UNIT
    for store in (twins.expected, twins.store):
        store.pool[at : at + len(moved)] = moved
        store.places[LAYER, 0, 0, 1] = len(moved)
    twins.layer.mapped = slice(at, at + len(moved))
    twins.decode([0])
    twins.refuses()


def test_exceptions_beyond_the_format_change_their_own_block_alone() -> None:
    # The kernel does not look into entries: whatever they hold, nothing else is read or changed.
    twins = alone(one_span())
    span, _, _ = span_of(twins)
    descriptors = twins.store.descriptors(LAYER, 1)[0].flatten().tolist()
    block = next(i for i, d in enumerate(descriptors) if 128 <= d < 249)
    head, part = divmod(block // 2, 2)
    unit = start_of(twins, head, PARTS[part])
    assert block % 2 == 1  # the second of its part, after one of 1024 bytes
    entries = unit * UNIT + 1024 + 768
    span[entries : entries + 16] = torch.arange(241, 257).to(torch.uint8)
    got = twins.layer.decode_pages(torch.tensor([1]))
    want = reference.decode_pages(twins.want, torch.tensor([1]))
    for p in range(2):
        for h in range(HEADS):
            if (h, p) != (head, part):
                assert same_bits(got[p][:, :, h], want[p][:, :, h])
    twins.refuses()


def test_what_is_not_mapped_cannot_be_read() -> None:
    # The tests above rely on it: without its last 16 bytes, reading the span raises.
    twins = one_span()
    _, at, length = span_of(twins)
    twins.layer.mapped = slice(at, at + length - UNIT)
    with pytest.raises(MemoryFault):
        twins.layer.decode_pages(torch.tensor([1]))


# ---- far and in any order -----------------------------------------------------------------------
@pytest.mark.parametrize("pool_at", [(1 << 32) - 25600, (1 << 38) - 25600, (1 << 39) - 49536])
def test_pools_of_up_to_512_gib(pool_at: int) -> None:
    # 4 GiB, and 256 GiB, lie in the layer's first page; the last pool ends where places do.
    twins = Twins(2, 64, 16, heads_per_span=2, pages=3, pool_at=pool_at)
    assert twins.layout.page_stride == 8320
    assert twins.store.pool.numel() == 49920
    k, v = (from_patterns(torch.randint(1 << 16, (3, 16, 2, 64)).numpy()) for _ in "kv")
    twins.fill([0, 1, 2], k, v)
    twins.decode([2, 0, 1])
    twins.refuses()


@pytest.mark.parametrize(
    ("schedule", "seed"), [*((s, 0) for s in SCHEDULES), ("random", 1), ("random", 2)]
)
def test_any_order_of_warps(schedule: str, seed: int) -> None:
    twins = Twins(3, 128, 32, heads_per_span=1, schedule=schedule, seed=seed)
    with_pages(twins, [0, 2], sealed=[2], seed=7)
    twins.decode([2, 0])
    twins.refuses()
