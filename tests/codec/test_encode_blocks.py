"""The vectorised block codec: byte for byte the plain-Python one, lossless, and hard to fool."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from bits import RAW, entry, entry_bytes, pattern, stored_bytes
from format.format_decoder import decode_page
from hypothesis import given, settings

import zf_layouts
from zf_cute import reference
from zf_cute.errors import FormatError
from zf_cute.pages import LayerPages
from zf_layouts.block import unpack_entries

VALUES = 512
RAW_DESCRIPTOR = 255


def encode(blocks: np.ndarray, max_exceptions: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Descriptors and rows of [n, 512] patterns."""
    bits = torch.from_numpy(np.asarray(blocks).astype(np.int32))
    descriptors, rows = reference.encode_blocks(bits, max_exceptions)
    return descriptors.numpy(), rows.numpy()


def assert_lossless(blocks: torch.Tensor, max_exceptions: int = 4) -> torch.Tensor:
    """Encode and decode [n, 512] int32 patterns; returns the descriptors."""
    descriptors, rows = reference.encode_blocks(blocks, max_exceptions)
    for first, size in ((0, 768), (128, 784)):
        # Bytes past a block's size belong to its neighbour in a page: they must not matter.
        kind = (descriptors >= first) & (descriptors < 249) & ((descriptors >= 128) == (first > 0))
        rows[kind, size:] = 0xA5
    assert torch.equal(reference.decode_blocks(descriptors, rows, max_exceptions), blocks)
    return descriptors


def assert_same_as_plain_python(blocks: np.ndarray, max_exceptions: int) -> None:
    """Descriptor and every byte of every block, and lossless."""
    descriptors, rows = encode(blocks, max_exceptions)
    for i, block in enumerate(np.asarray(blocks)):
        want, data = zf_layouts.encode_block(block.tolist(), max_exceptions)
        assert descriptors[i] == want
        assert rows[i, : len(data)].tobytes() == data
        assert zf_layouts.decode_block(int(descriptors[i]), data) == block.tolist()
    assert_lossless(torch.from_numpy(np.asarray(blocks).astype(np.int32)), max_exceptions)


# ---- all 65,536 patterns in all 512 positions, in each kind of block ---------------------------
def _rotations(sequence: torch.Tensor, some: range) -> torch.Tensor:
    """[n, 512] blocks: the sequence of 65,536 patterns, started at each of `some` of its places.

    Over all 512 rotations every position of a block meets every pattern.
    """
    twice = torch.cat([sequence, sequence])
    return torch.cat([twice[r : r + len(sequence)].view(-1, VALUES) for r in some])


@pytest.mark.parametrize("order", ["by exponent", "scattered"])
def test_every_pattern_in_every_position(order: str) -> None:
    # By exponent: 512 neighbours have at most 4 exponents, so the blocks compress, but for those
    # around the step from 255 to 0.  Scattered by an odd factor: all exponents, so raw.
    sequence = torch.arange(1 << 16)
    if order == "scattered":
        sequence = sequence * 40503 % (1 << 16)
    else:
        sequence = sequence[torch.argsort(sequence >> 7 & 0xFF, stable=True)]
    kinds = np.zeros(256, int)
    for first in range(0, VALUES, 64):  # 64 rotations at a time: 16 MB of patterns
        blocks = _rotations(sequence.to(torch.int32), range(first, first + 64))
        kinds += np.bincount(assert_lossless(blocks), minlength=256)
    if order == "by exponent":
        # Every base but 254: 255 has 256 patterns, and its neighbour in the ring is 0.
        assert (kinds[:127] > 0).all()
        # 511 blocks hold the step; with 1 to 4 values beyond it on either side it is exceptions.
        assert (kinds[128:249].sum(), kinds[255]) == (8, 503)
    else:
        assert kinds[255] == kinds.sum() == 1 << 16


@pytest.mark.parametrize("exponent", [0, 1, 253, 254, 255])
def test_every_pattern_of_one_exponent_in_every_position(exponent: int) -> None:
    # Zeros and denormals, infinities and NaN, and their neighbours: 256 patterns twice over.
    fraction = torch.arange(128)
    ring = torch.cat([fraction, fraction | 0x8000]) | exponent << 7
    ring = ring.repeat(4).to(torch.int32)
    blocks = torch.stack([ring[r : r + VALUES] for r in range(256)])
    assert (assert_lossless(blocks) == exponent // 2).all()


def test_high_bytes_as_exceptions_in_every_position() -> None:
    # A block of one exponent, four other values in it: 32 high bytes a position and all 256 over
    # the positions (`patch` alone is tested with all pairs).
    position = torch.arange(VALUES).view(128, 4)
    high = (37 * position + torch.arange(0, 256, 8).view(-1, 1, 1)) % 256
    blocks = torch.full((32, 128, VALUES), pattern(127, fraction=0x55), dtype=torch.int32)
    values = high * 256 + torch.randint(256, high.shape)
    blocks.scatter_(2, position.expand_as(high), values.to(torch.int32))
    descriptors = assert_lossless(blocks.flatten(0, 1))
    assert ((descriptors >= 128) & (descriptors < 249)).float().mean() > 0.9


# ---- the rules of FORMAT.md section 6 ----------------------------------------------------------
def _spread(low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Block whose exponents are `low` to `high`, both met, with random signs and fractions."""
    exponents = rng.integers(low, high + 1, VALUES)
    exponents[rng.permutation(VALUES)[:2]] = low, high
    return rng.integers(0, 2, VALUES) << 15 | exponents << 7 | rng.integers(0, 128, VALUES)


def _few(bulk: np.ndarray, patterns: list[int], rng: np.random.Generator) -> np.ndarray:
    """Block with some of its values replaced."""
    block = bulk.copy()
    block[rng.permutation(VALUES)[: len(patterns)]] = patterns
    return block


def _named_blocks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(29)
    ordinary = _spread(120, 129, rng)
    blocks = {
        "all +0": np.zeros(VALUES, int),
        "all -0": np.full(VALUES, 0x8000),
        "zeros of both signs": rng.choice([0, 0x8000], VALUES),
        "denormals": rng.integers(1, 128, VALUES) | rng.integers(0, 2, VALUES) << 15,
        "one zero": _few(ordinary, [0x0000], rng),
        "one negative zero": _few(ordinary, [0x8000], rng),
        "4 zeros": _few(ordinary, [0, 0x8000, 0, 0x8000], rng),
        "5 zeros": _few(ordinary, [0] * 5, rng),
        "4 denormals": _few(ordinary, [1, 0x807F, 0x40, 0x8001], rng),
        "4 large among zeros": _few(np.zeros(VALUES, int), [0x7F80, 0xFFFF, 0x3F80, 0x0800], rng),
        "5 large among zeros": _few(np.zeros(VALUES, int), [0x3F80] * 5, rng),
        "infinities": rng.choice([0x7F80, 0xFF80], VALUES),
        "NaN payloads": rng.integers(0x7F81, 0x8000, VALUES) | rng.integers(0, 2, VALUES) << 15,
        "one quiet NaN": _few(ordinary, [0x7FC0], rng),
        "one signalling NaN": _few(ordinary, [0xFF81], rng),
        "2 infinities, 2 NaN": _few(ordinary, [0x7F80, 0xFF80, 0x7FFF, 0xFFC1], rng),
        "constant 1.0": np.full(VALUES, 0x3F80),
        "constant -1.5": np.full(VALUES, 0xBFC0),
        "random bits": rng.integers(0, 1 << 16, VALUES),
        "exponents 240 to 255": _spread(240, 255, rng),
        "exponents 241 to 255": _spread(241, 255, rng),
        "exponents 239 to 255": _spread(239, 255, rng),
        "exponents 0 to 15": _spread(0, 15, rng),
        "exponents 0 to 16": _spread(0, 16, rng),
        "outlier above the last window": _few(_spread(200, 215, rng), [pattern(255)] * 3, rng),
        "first and last position": np.r_[0, ordinary[1:-1], 0x8000],
        "one word": np.r_[[0, 0x8000, 0x7F80, 0xFFC1], ordinary[4:]],
    }
    gaussian = torch.randn(4, VALUES, generator=torch.Generator().manual_seed(31)).bfloat16()
    for i, block in enumerate(gaussian.view(torch.int16).int() & 0xFFFF):
        blocks[f"Gaussian {i}"] = block.numpy()
    # Spans of exactly 14, 15 and 16 from even and odd minima, down at 0 and up at 255.
    for low, span in product((0, 1, 2, 3, 100, 101, 238, 239, 240, 241), (14, 15, 16)):
        if low + span <= 255:
            blocks[f"span {span} from {low}"] = _spread(low, low + span, rng)
    return blocks


NAMED = _named_blocks()


@pytest.mark.parametrize("max_exceptions", [0, 1, 2, 3, 4])
def test_named_blocks_are_those_of_plain_python(max_exceptions: int) -> None:
    assert_same_as_plain_python(np.stack(list(NAMED.values())), max_exceptions)


@pytest.mark.parametrize(
    ("name", "descriptor"),
    [
        ("all +0", 0),
        ("all -0", 0),
        ("denormals", 0),
        ("infinities", 127),
        ("NaN payloads", 127),
        ("constant 1.0", 63),
        ("exponents 240 to 255", 120),
        ("exponents 241 to 255", 120),
        ("exponents 239 to 255", 255),
        ("exponents 0 to 15", 0),
        ("exponents 0 to 16", 255),
        ("one zero", 128 + 114 // 2),  # 120..129 is held by the windows from 114: the lowest
        ("4 zeros", 128 + 114 // 2),
        ("5 zeros", 255),
        ("4 large among zeros", 128),
        ("5 large among zeros", 255),
        ("outlier above the last window", 128 + 200 // 2),
        ("random bits", 255),
    ],
)
def test_descriptor_of_special_blocks(name: str, descriptor: int) -> None:
    assert encode(NAMED[name][None])[0].item() == descriptor


@pytest.mark.parametrize("low", [0, 1, 2, 3, 100, 101, 238, 239])
def test_a_window_is_sixteen_exponents_from_an_even_base(low: int) -> None:
    rng = np.random.default_rng(low)
    for span in range(12, 17):
        fits = low % 2 + span <= 15
        want = low // 2 if fits else RAW_DESCRIPTOR
        assert encode(_spread(low, low + span, rng)[None])[0].item() == want, span


def test_ties_between_windows_go_to_the_lowest_base() -> None:
    # One exponent almost everywhere and one other value: every window that holds the first ties,
    # unless one holds both.  All 256 x 256 pairs of exponents, counted by brute force.
    bulk, other = (x.ravel() for x in np.meshgrid(np.arange(256), np.arange(256), indexing="ij"))
    base = np.arange(0, 256, 2)
    inside = (base <= bulk[:, None]) & (bulk[:, None] < base + 16)
    held = 511 * inside + ((base <= other[:, None]) & (other[:, None] < base + 16))
    lowest = base[held.argmax(1)]  # argmax keeps the first
    least = np.minimum(bulk, other) & ~1
    fits = np.maximum(bulk, other) < least + 16
    want = np.where(fits, least // 2, 128 + lowest // 2)
    some = np.arange(0, len(bulk), 5)  # 5 shares no factor with 256: every exponent in both roles
    got = []
    for part in np.array_split(some, 4):  # bounds the memory
        blocks = np.repeat(bulk[part, None] << 7, VALUES, 1)
        blocks[np.arange(len(part)), part % VALUES] = other[part] << 7
        got.append(encode(blocks)[0])
    np.testing.assert_array_equal(np.concatenate(got), want[some])


def test_a_tie_between_two_groups_goes_to_the_lower() -> None:
    # 256 values each at exponents 100 and 200: both windows hold half, and the block is raw; the
    # base that outlier_counts reports is what reports and other writers see.
    block = torch.full((1, VALUES), pattern(200), dtype=torch.int32)
    block[0, ::2] = pattern(100)
    base, outliers = reference.outlier_counts(block)
    assert (base.item(), outliers.item()) == (86, 256)  # [86, 101] is the lowest that holds 100
    block[0, 0] = pattern(200)  # one more at 200, and it wins
    base, outliers = reference.outlier_counts(block)
    assert (base.item(), outliers.item()) == (186, 255)


@pytest.mark.parametrize("max_exceptions", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("outliers", [0, 1, 2, 3, 4, 5, 6])
def test_max_exceptions_decides_between_exceptions_and_raw(
    outliers: int, max_exceptions: int
) -> None:
    rng = np.random.default_rng(37)
    block = _few(_spread(120, 129, rng), [0] * outliers, rng)
    descriptor = encode(block[None], max_exceptions)[0].item()
    if outliers == 0:
        assert descriptor == 60
    elif outliers <= max_exceptions:
        assert descriptor == 128 + 57
    else:
        assert descriptor == 255


@st.composite
def _blocks(draw: st.DrawFn) -> np.ndarray:
    """A block of a few exponents, with up to eight values of any pattern put over it."""
    low = draw(st.integers(0, 255))
    high = min(255, low + draw(st.integers(0, 18)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    block = rng.integers(0, 2, VALUES) << 15 | rng.integers(low, high + 1, VALUES) << 7
    block |= rng.integers(0, 128, VALUES)
    special = st.sampled_from([0, 0x8000, 1, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7FFF])
    over = draw(st.dictionaries(st.integers(0, 511), special | st.integers(0, 0xFFFF), max_size=8))
    for at, bits in over.items():
        block[at] = bits
    return block


@settings(max_examples=80)
@given(block=_blocks(), max_exceptions=st.integers(0, 4))
def test_any_block_is_that_of_plain_python(block: np.ndarray, max_exceptions: int) -> None:
    assert_same_as_plain_python(block[None], max_exceptions)


@settings(max_examples=40)
@given(st.lists(st.one_of(_blocks(), st.sampled_from(list(NAMED.values()))), max_size=12))
def test_blocks_do_not_depend_on_their_neighbours(blocks: list[np.ndarray]) -> None:
    # Together or alone: kinds are gathered and scattered, and must come back to their own rows.
    stacked = np.stack(blocks) if blocks else np.empty((0, VALUES), int)
    descriptors, rows = encode(stacked)
    assert rows.shape == (len(blocks), RAW)
    for i, block in enumerate(blocks):
        descriptor, row = encode(block[None])
        assert descriptor[0] == descriptors[i]
        assert (row[0] == rows[i])[: stored_bytes(int(descriptor[0]))].all()
    assert_lossless(torch.from_numpy(stacked.astype(np.int32)))


# ---- rejection: every reader refuses the same bytes --------------------------------------------
HEAD = {"num_kv_heads": 1, "head_dim": 64, "page_size": 16, "rope": "half", "heads_per_span": 1}


def _page_with(descriptor: int, data: bytes) -> tuple[bytes, int]:
    """A page of four blocks, K block 0 the given one and the others all +0; and its length."""
    zero = bytes(768)
    v_start = (16 + len(data) + len(zero)) // 16
    head = bytes([1, 0, 0, 0, descriptor, 0, 0, 0]) + v_start.to_bytes(4, "little") + bytes(4)
    span = head + data + 3 * zero
    return span, len(span)


def _read_blocks(descriptor: int, data: bytes, max_exceptions: int) -> None:
    row = torch.zeros(1, 1024, dtype=torch.uint8)
    row[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    reference.decode_blocks(torch.tensor([descriptor], dtype=torch.uint8), row, max_exceptions)


def _read_page(descriptor: int, data: bytes, max_exceptions: int) -> None:
    span, length = _page_with(descriptor, data)
    layout = zf_layouts.PageLayout(max_exceptions=max_exceptions, **HEAD)
    places = torch.tensor([[[0, length]]], dtype=torch.int32)
    pool = torch.frombuffer(bytearray(span), dtype=torch.uint8)
    reference.decode_pages(LayerPages(pool, places, layout), torch.tensor([0]))


def _read_independently(descriptor: int, data: bytes, max_exceptions: int) -> None:
    span, length = _page_with(descriptor, data)
    decode_page(span, [(0, length)], max_exceptions=max_exceptions, **HEAD)


def _unpack(descriptor: int, data: bytes, max_exceptions: int) -> None:
    unpack_entries(data[768:], max_exceptions)


Reader = Callable[[int, bytes, int], None]
READERS = [_read_blocks, _read_page, _read_independently]


@pytest.mark.parametrize("reader", READERS)
def test_descriptors_that_name_no_block(reader: Reader) -> None:
    error = ValueError if reader is _read_independently else FormatError
    for descriptor in range(249, 255):
        with pytest.raises(error, match=str(descriptor)):
            reader(descriptor, bytes(1024), 4)
    good = entry_bytes([entry(9, 0x80)] * 4)
    for descriptor in range(128, 249):
        reader(descriptor, bytes(768) + good, 1)
        with pytest.raises(error, match=str(descriptor)):
            reader(descriptor, bytes(768) + good, 0)
    for descriptor in (*range(128), 255):
        reader(descriptor, bytes(stored_bytes(descriptor)), 0)


def _accepts(reader: Reader, entries: tuple[int, ...], max_exceptions: int) -> bool:
    error = FormatError if reader in (_read_blocks, _read_page) else ValueError
    try:
        reader(128 + 63, bytes(768) + entry_bytes(entries), max_exceptions)
    except error:
        return False
    return True


def _one_flipped() -> list[tuple[int, ...]]:
    """Well-formed entries with one bit of a selector, or bit 23, flipped: in each entry."""
    # One of each selector, in ascending order; then one entry and its repetitions.
    rows = [[entry(at, 0x80) for at in (4, 133, 386, 511)]]
    rows += [[entry(at, 0x11)] * 4 for at in (0, 1, 2, 3)]
    flipped = []
    for row, i, bit in product(rows, range(4), (*range(16), 23)):
        changed = list(row)
        changed[i] ^= 1 << bit
        flipped.append(tuple(changed))
        if len(set(row)) == 1 and i == 0:
            # All four alike, so that the order is in order and the bit alone is wrong.
            flipped.append((changed[0],) * 4)
    return flipped


@pytest.mark.parametrize("reader", [*READERS, _unpack])
def test_malformed_entries(reader: Reader) -> None:
    for entries in _one_flipped():
        assert not _accepts(reader, entries, 4), [hex(e) for e in entries]


@pytest.mark.parametrize("reader", [*READERS, _unpack])
@pytest.mark.parametrize("max_exceptions", [1, 2, 3, 4])
def test_order_and_number_of_entries(reader: Reader, max_exceptions: int) -> None:
    # All 4-tuples over A < B < C, A with another high byte and C in the same word as B: ascending,
    # descending, A A B B, A B A B, A B B C and all others.  The rule is written out here.
    a, a_too, b, c = entry(7, 0x00), entry(7, 0x80), entry(300, 0x40), entry(301, 0x40)
    position = {a: 7, a_too: 7, b: 300, c: 301}
    accepted = 0
    for entries in product(position, repeat=4):
        used = next(n for n in range(1, 5) if all(e == entries[n - 1] for e in entries[n:]))
        fine = all(position[x] < position[y] for x, y in pairwise(entries[:used]))
        fine = fine and used <= max_exceptions
        assert _accepts(reader, entries, max_exceptions) == fine, [hex(e) for e in entries]
        accepted += fine
    # 4 of one; 5 ascending pairs (A B, A C, A' B, A' C, B C); 2 triples; no four ascend.
    assert accepted == (4, 9, 11, 11)[max_exceptions - 1]


def test_four_entries_are_allowed_only_by_four() -> None:
    entries = tuple(entry(at, 0xFF) for at in (0, 170, 341, 511))
    for reader, limit in product([*READERS, _unpack], (1, 2, 3, 4)):
        assert _accepts(reader, entries, limit) == (limit == 4)


def test_one_bad_block_among_many_is_found() -> None:
    rng = np.random.default_rng(41)
    blocks = np.stack([_few(_spread(120, 129, rng), [0, 0x8000], rng) for _ in range(50)])
    bits = torch.from_numpy(blocks.astype(np.int32))
    descriptors, rows = reference.encode_blocks(bits, 4)
    assert ((descriptors >= 128) & (descriptors < 249)).all()
    rows[37, 780] ^= 1  # the selector of its last entry
    with pytest.raises(FormatError, match="max_exceptions=4"):
        reference.decode_blocks(descriptors, rows, 4)


def test_an_entry_may_name_a_value_inside_the_window() -> None:
    # FORMAT.md section 7: a reader need not insist that an exception lies outside the window.
    bits = torch.full((1, VALUES), 0x3F80, dtype=torch.int32)
    _, rows = reference.encode_blocks(bits, 4)
    rows[0, 768:784] = torch.tensor(list(entry_bytes([entry(100, 0x3E)] * 4)))
    got = reference.decode_blocks(torch.tensor([128 + 63], dtype=torch.uint8), rows, 4)
    bits[0, 100] = 0x3E80
    assert torch.equal(got, bits)


def test_offsets_past_the_last_high_byte_are_no_error() -> None:
    # half_base + offset above 127: FORMAT.md leaves the value open, but it is 16 bits, and blocks
    # beside it are not touched.
    rows = torch.full((2, 1024), 0xFF, dtype=torch.uint8)
    rows[1] = 0
    got = reference.decode_blocks(torch.tensor([127, 127], dtype=torch.uint8), rows, 4)
    assert ((got >= 0) & (got < 1 << 16)).all()
    assert (got[1] == 0x7F00).all()
