"""A block: where its bytes are, what is written for which values, and that all come back."""

import random

import pytest

from zf_layouts import bf16
from zf_layouts.block import (
    BLOCK_VALUES,
    CODE_PLANE,
    COMPRESSED_KIND,
    EXCEPTIONS_KIND,
    KINDS,
    LOW_PLANE,
    RAW,
    RAW_KIND,
    TILES,
    code_place,
    decode_block,
    encode_block,
    kind_of,
    pack_entry,
    position,
    raw_byte,
    unpack_entries,
    unpack_entry,
)
from zf_layouts.fragment import FRAGMENT, LANES

ONE = 0x3F80  # exponent 127
SELECTORS = (0x3217, 0x3270, 0x3710, 0x7210)
PATTERNS = 1 << 16


def value(exponent, low=0, sign=0):
    """Bit pattern with an exponent field and a 7-bit fraction."""
    return sign << 15 | exponent << 7 | low & 0x7F


def block_of(exponents):
    """Block that cycles through `exponents`, with signs and fractions that vary."""
    return [
        value(exponents[i % len(exponents)], low=i * 37, sign=i * 5 >> 2 & 1)
        for i in range(BLOCK_VALUES)
    ]


def stored(bits, max_exceptions=4):
    """Descriptor of an encoded block, after checking its size and that it decodes to `bits`."""
    descriptor, data = encode_block(bits, max_exceptions)
    kind = kind_of(descriptor)
    assert kind is not None
    assert len(data) == kind.nbytes
    assert decode_block(descriptor, data) == list(bits)
    return descriptor


# ---- places ------------------------------------------------------------------------------------
def test_descriptors_name_one_kind_each_or_none():
    sizes = [getattr(kind_of(descriptor), "nbytes", None) for descriptor in range(256)]
    assert sizes == [768] * 128 + [784] * 121 + [None] * 6 + [1024]
    assert all(kind.nbytes % 16 == 0 for kind in KINDS)


def test_raw_bytes_cover_the_block():
    starts = sorted(raw_byte(at) for at in range(BLOCK_VALUES))
    assert starts == list(range(0, RAW_KIND.nbytes, 2))


def test_codes_cover_every_bit_of_the_code_plane_once():
    bits = []
    for at in range(BLOCK_VALUES):
        byte, sign_bit, shift = code_place(at)
        bits += [byte * 8 + sign_bit] + [byte * 8 + shift + i for i in range(3)]
    first = LOW_PLANE * 8
    assert sorted(bits) == list(range(first, first + CODE_PLANE * 8))


def test_code_place_is_the_text_of_the_format():
    for at in range(BLOCK_VALUES):
        v = at % 8
        want = (7, 0) if v < 4 else (6, 3)
        assert code_place(at) == (512 + at // 8 * 4 + v % 4, *want)


@pytest.mark.parametrize(
    ("places", "each", "runs"),
    [
        (lambda at: (at,), 16, 1),
        (lambda at: (code_place(at)[0],), 8, 1),
        (lambda at: (raw_byte(at), raw_byte(at) + 1), 16, 2),
    ],
    ids=["low", "code", "raw"],
)
def test_a_warps_loads_are_contiguous_and_aligned(places, each, runs):
    """Each lane loads `runs` aligned pieces of `each` bytes; lane n + 1's lie next to lane n's.

    That is what makes a warp-wide load of shared memory free of bank conflicts.
    """
    pieces = []
    for lane in range(LANES):
        mine = [position(tile, lane, v) for tile in range(TILES) for v in range(FRAGMENT)]
        held = sorted({byte for at in mine for byte in places(at)})
        assert len(held) == each * runs
        for i in range(runs):
            piece = held[i * each : (i + 1) * each]
            assert piece == list(range(piece[0], piece[0] + each))
            assert piece[0] % each == 0
            pieces.append((i, piece[0]))
    for i in range(runs):
        starts = [start for run, start in pieces if run == i]
        assert starts == list(range(starts[0], starts[0] + each * LANES, each))


def test_each_raw_load_of_a_lane_is_a_fragment_in_register_order():
    for tile in range(TILES):
        for lane in range(LANES):
            places = [raw_byte(position(tile, lane, v)) for v in range(FRAGMENT)]
            assert places == list(range(places[0], places[0] + 16, 2))


# ---- exception entries -------------------------------------------------------------------------
def test_entries_round_trip_and_are_distinct():
    words = set()
    for at in range(BLOCK_VALUES):
        for high in range(256):
            word = pack_entry(at, high)
            assert unpack_entry(word) == (at, high)
            words.add(word)
    assert len(words) == BLOCK_VALUES * 256


def prmt(a, b, selector):
    """Byte permute as the PTX manual has it, without its sign mode."""
    pool = a | b << 32
    return sum((pool >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def test_an_entry_is_the_permutation_that_patches_its_word():
    word = 0x44332211
    for at in range(BLOCK_VALUES):
        byte = 8 * (at & 3)
        patched = word & ~(0xFF << byte) | 0xAB << byte
        entry = pack_entry(at, 0xAB)
        assert prmt(word, entry, entry & 0xFFFF) == patched


def test_no_other_selector_is_an_entry():
    for selector in range(1 << 16):
        for place, high in ((0, 0), (127, 255), (37, 0x3F)):
            entry = selector | place << 16 | high << 24
            if selector in SELECTORS:
                assert unpack_entry(entry) == (place << 2 | SELECTORS.index(selector), high)
            else:
                assert unpack_entry(entry) is None


def test_bit_23_makes_no_entry():
    for at in range(BLOCK_VALUES):
        for high in (0x00, 0x3F, 0xFF):
            assert unpack_entry(pack_entry(at, high) | 1 << 23) is None


def entries(*words):
    """Sixteen bytes of four entries."""
    return b"".join(word.to_bytes(4, "little") for word in words)


A, B, C, D = (pack_entry(at, 0x11 * i) for i, at in enumerate((3, 4, 90, 511)))


@pytest.mark.parametrize(
    ("words", "positions"),
    [
        ((A, A, A, A), [3]),
        ((A, B, B, B), [3, 4]),
        ((A, B, C, C), [3, 4, 90]),
        ((A, B, C, D), [3, 4, 90, 511]),
    ],
)
def test_entries_in_order_are_read(words, positions):
    assert list(unpack_entries(entries(*words))) == positions
    with pytest.raises(ValueError, match="exceptions; the layout allows"):
        unpack_entries(entries(*words), max_exceptions=len(positions) - 1)


@pytest.mark.parametrize(
    "words",
    [
        (B, A, A, A),  # descends
        (A, A, B, B),  # goes on after a repetition
        (A, A, A, B),
        (A, B, A, A),  # returns
        (A, A ^ 1 << 24, B, C),  # the same position twice, another value
        (A, B, B, B ^ 1 << 24),  # a repetition that differs in its value
    ],
)
def test_entries_out_of_order_are_refused(words):
    with pytest.raises(ValueError, match="does not ascend"):
        unpack_entries(entries(*words))


@pytest.mark.parametrize("bad", [0, 0x3210, A | 1 << 23, A ^ 0x10, 0xFFFFFFFF])
@pytest.mark.parametrize("where", range(4))
def test_malformed_entries_are_refused(bad, where):
    words = [A, B, C, D]
    words[where] = bad
    with pytest.raises(ValueError, match=f"entry {where} is malformed"):
        unpack_entries(entries(*words))


# ---- round trips -------------------------------------------------------------------------------
def test_every_pattern_comes_back_in_order():
    for first in range(0, PATTERNS, BLOCK_VALUES):
        stored(range(first, first + BLOCK_VALUES))


def test_every_pattern_comes_back_shuffled():
    patterns = list(range(PATTERNS))
    random.Random(0).shuffle(patterns)
    for first in range(0, PATTERNS, BLOCK_VALUES):
        assert stored(patterns[first : first + BLOCK_VALUES]) == RAW


@pytest.mark.parametrize("base", [0, 2, 60, 112, 126, 238, 240, 242, 254])
def test_every_pattern_of_a_window(base):
    """Up to sixteen exponents, 128 fractions, two signs: 4096 values."""
    inside = [
        value(exponent, low, sign)
        for exponent in range(base, min(base + bf16.WINDOW, 256))
        for low in range(128)
        for sign in (0, 1)
    ]
    # Each block also holds the lowest exponent, so that it has this base.
    for first in range(0, len(inside), BLOCK_VALUES - 1):
        part = inside[first : first + BLOCK_VALUES - 1]
        block = [value(base)] * (BLOCK_VALUES - len(part)) + part
        assert stored(block) == base // 2


def test_every_base():
    for base in range(0, 256, 2):
        assert stored(block_of([base, min(base + 15, 255)])) == base // 2
        assert stored([value(base + 1)] * BLOCK_VALUES) == base // 2


@pytest.mark.parametrize(
    ("least", "count"),
    [
        (least, count)
        for least in (0, 1, 2, 3, 100, 101, 239, 240, 241)
        for count in (14, 15, 16)
        if least + count <= 256
    ],
)
def test_spans_of_exponents_around_a_window(least, count):
    """Sixteen exponents fit from an even minimum; from an odd one only fifteen do."""
    fits = count <= (16 if least % 2 == 0 else 15)
    assert stored(block_of(range(least, least + count))) == (least // 2 if fits else RAW)


@pytest.mark.parametrize("sign", [0, 1])
def test_lowest_and_highest_base(sign):
    assert stored([value(0, low=i, sign=sign) for i in range(BLOCK_VALUES)]) == 0
    assert stored([value(255, low=i, sign=sign) for i in range(BLOCK_VALUES)]) == 127
    assert stored(block_of([254, 255])) == 127
    assert stored(block_of([253, 255])) == 126


@pytest.mark.parametrize(
    ("bits", "descriptor"),
    [
        ([0] * BLOCK_VALUES, 0),
        ([0x8000] * BLOCK_VALUES, 0),
        ([0x0000, 0x8000] * (BLOCK_VALUES // 2), 0),
        ([0x0001, 0x807F, 0x8000, 0x0000] * (BLOCK_VALUES // 4), 0),  # denormals
        ([0x7F80, 0xFF80] * (BLOCK_VALUES // 2), 127),  # infinities
        ([0x7FC0 | i % 64 for i in range(BLOCK_VALUES)], 127),  # quiet NaNs, all payloads
        ([0xFF81 + i % 63 for i in range(BLOCK_VALUES)], 127),  # signalling NaNs, all payloads
        (block_of([240, 255]), 120),
        (block_of([241, 255]), 120),
    ],
)
def test_special_values_are_values(bits, descriptor):
    assert stored(bits) == descriptor


@pytest.mark.parametrize("max_exceptions", range(5))
@pytest.mark.parametrize("outliers", range(6))
@pytest.mark.parametrize("special", [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0xFF81])
def test_exceptions_up_to_what_the_layout_allows(special, outliers, max_exceptions):
    """The last value of a block, the first, and neighbours in one word, in any order."""
    bits = [ONE] * BLOCK_VALUES
    for at in (511, 0, 17, 18, 300)[:outliers]:
        bits[at] = special
    descriptor = stored(bits, max_exceptions)
    if outliers == 0:
        assert descriptor == 63
    elif outliers > max_exceptions:
        assert descriptor == RAW
    else:
        assert descriptor == 128 + 112 // 2  # the lowest window that holds exponent 127


def test_an_exception_at_every_position():
    usual = block_of([120, 121, 130])
    for at in range(BLOCK_VALUES):
        bits = list(usual)
        bits[at] = 0x8000 | at & 0x7F
        assert kind_of(stored(bits)) is EXCEPTIONS_KIND, f"position {at}"


def test_an_outliers_code_is_its_sign():
    bits = [ONE] * BLOCK_VALUES
    bits[8], bits[9], bits[13] = 0x8000, 0x0000, 0xFF80
    _, data = encode_block(bits)
    first = LOW_PLANE + 4
    # The others have offset 7: exponent 127 in the window from 112.
    assert data[first : first + 4] == bytes([0x80 | 7 << 3, 0x40, 0x3F, 0x3F])


@pytest.mark.parametrize(
    ("exponents", "descriptor"),
    [
        ({127: 509, 0: 3}, 128 + 56),  # 112..126 hold 127 alike
        ({100: 508, 90: 2, 110: 2}, 128 + 43),  # 86..90 hold 90, 96..100 hold 110
        ({100: 508, 84: 2, 115: 2}, 128 + 50),  # no window holds 84 and 100, so no tie
        ({200: 511, 10: 1}, 128 + 93),
        ({255: 511, 0: 1}, 128 + 120),
        ({0: 511, 255: 1}, 128 + 0),
    ],
)
def test_ties_go_to_the_lowest_base(exponents, descriptor):
    bits = [value(e) for e, count in exponents.items() for _ in range(count)]
    random.Random(1).shuffle(bits)
    held = {
        base: sum(n for e, n in exponents.items() if base <= e <= base + 15)
        for base in range(0, 256, 2)
    }
    best = max(held.values())
    assert descriptor == 128 + min(base for base, n in held.items() if n == best) // 2
    assert stored(bits) == descriptor


def test_exception_bases_stay_below_241():
    """Above 240 an offset could carry into the sign, since outliers are coded too."""
    for exponents in ([255, 0], [254, 200], [241, 0]):
        bits = [value(exponents[0])] * BLOCK_VALUES
        bits[100] = value(exponents[1])
        descriptor = stored(bits)
        assert kind_of(descriptor) is EXCEPTIONS_KIND
        assert (descriptor & 0x7F) * 2 <= 240


def test_unused_entries_repeat_the_last_used():
    bits = [ONE] * BLOCK_VALUES
    bits[40], bits[7] = 0x8001, 0x0002
    _, data = encode_block(bits)
    assert data[COMPRESSED_KIND.nbytes :] == entries(
        pack_entry(7, 0x00), *[pack_entry(40, 0x80)] * 3
    )


def test_encoding_is_the_same_every_time():
    bits = block_of([90, 95, 103])
    for at in (5, 200, 203):
        bits[at] = 0x8001
    assert encode_block(bits) == encode_block(list(bits))


# ---- what a reader refuses ---------------------------------------------------------------------
@pytest.mark.parametrize("descriptor", range(249, 255))
def test_descriptors_without_a_meaning_are_refused(descriptor):
    with pytest.raises(ValueError, match=f"descriptor {descriptor} names no block kind"):
        decode_block(descriptor, bytes(1024))


@pytest.mark.parametrize(("descriptor", "nbytes"), [(0, 768), (127, 768), (128, 784), (255, 1024)])
def test_short_blocks_are_refused(descriptor, nbytes):
    with pytest.raises(ValueError, match=f"a .* block has {nbytes}"):
        decode_block(descriptor, bytes(nbytes - 1))


def test_a_malformed_entry_is_refused():
    bits = [ONE] * BLOCK_VALUES
    bits[0] = 0
    descriptor, data = encode_block(bits)
    with pytest.raises(ValueError, match="malformed"):
        decode_block(descriptor, data[:-16] + bytes(16))


def test_any_bytes_of_a_well_formed_kind_decode_to_16_bits():
    noise = random.Random(3).randbytes(RAW_KIND.nbytes)
    for descriptor in (*range(128), RAW):
        values = decode_block(descriptor, noise)
        assert len(values) == BLOCK_VALUES
        assert all(0 <= x < PATTERNS for x in values)
