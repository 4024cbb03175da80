"""One warp encodes one block: choose the window, pack the codes, list the exceptions.

A lane holds the block's values at its positions ``lane * 16 .. lane * 16 + 15``: four words of tile
0 and four of tile 1, two values each.  What a block is stored as depends only on the upper seven
bits of exponents, called *pairs* here (``exponent >> 1``, the bits 14..8 of a value), because
windows start at even exponents and span eight pairs.

Source   FORMAT.md sections 5 and 6.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from zf_cute.kernels.ptx import max_s16x2, max_u16x2, min_u16x2, prmt
from zf_cute.kernels.rebuild import SECOND_OFFSET, SPREAD
from zf_cute.kernels.rebuild import SECOND_SIGN as SIGNS
from zf_layouts.block import (
    COMPRESSED_KIND,
    EXCEPTIONS,
    EXCEPTIONS_KIND,
    IDENTITY_SELECTOR,
    MAX_EXCEPTIONS,
    RAW,
    RAW_KIND,
)
from zf_layouts.page import UNIT

LANE_WORDS = 8
"""Words of a block that one lane holds, two values each."""

PAIRS = 8
"""Pairs of exponents in a window."""

PAIR_BITS = 0x7F007F00  # of two values in a word
HIGH_PAIRS = 0x7F7F7F7F  # of four high bytes in a word
TAKE_LOW = 0x6420  # PRMT: low bytes of four values in two words
TAKE_HIGH = 0x7531  # PRMT: their high bytes
EACH_BYTE = 0x01010101


def block_units(descriptor: Any) -> Any:
    """Size of a block in units of 16 bytes; `cute.jit` code calls it with a valid descriptor."""
    small = COMPRESSED_KIND.nbytes // UNIT
    with_entries = EXCEPTIONS_KIND.nbytes // UNIT - small
    rest = RAW_KIND.nbytes // UNIT - small
    # A compare each and no branch: True counts 1.
    more = Int32(descriptor >= EXCEPTIONS) * with_entries
    return more * Int32(descriptor != RAW) + Int32(descriptor == RAW) * rest + small


def high_words(words: Any) -> list[Any]:
    """High bytes of a lane's 16 values, in order of position: four words."""
    return [prmt(words[2 * q], words[2 * q + 1], TAKE_HIGH) for q in range(4)]


def low_words(words: Any) -> list[Any]:
    """Low bytes of a lane's 16 values, in order of position: four words."""
    return [prmt(words[2 * q], words[2 * q + 1], TAKE_LOW) for q in range(4)]


def outside(high: Any, half_base: Any) -> Any:
    """Bit 7 of each byte: whether that value's pair is outside half_base .. half_base + 7.

    Pairs are at most 127 and half_base at most 120 where this is asked, so no sum passes 255.
    """
    pairs = high & Uint32(HIGH_PAIRS)
    reaches = pairs + Uint32(EACH_BYTE) * (0x80 - half_base)  # bit 7: pair >= half_base
    passes = pairs + Uint32(EACH_BYTE) * (0x80 - PAIRS - half_base)
    return (reaches & ~passes & Uint32(SIGNS)) ^ Uint32(SIGNS)


@cute.jit
def extent(words: Any) -> tuple[Any, Any]:
    """Least and greatest pair of a block; the same in every lane."""
    low = words[0] & Uint32(PAIR_BITS)
    high = low
    for i in cutlass.range_constexpr(1, LANE_WORDS):
        pairs = words[i] & Uint32(PAIR_BITS)
        low, high = min_u16x2(low, pairs), max_u16x2(high, pairs)
    low = cutlass.min(low & 0xFFFF, low >> 16)
    high = cutlass.max(high & 0xFFFF, high >> 16)
    least = cute.arch.warp_redux_sync(low, "umin")
    most = cute.arch.warp_redux_sync(high, "umax")
    return Int32(least >> 8), Int32(most >> 8)


@cute.jit
def next_below(words: Any, top: Int32) -> Int32:
    """Greatest pair of a block that is below `top`; negative if there is none."""
    # Adding 0x8000 - (top << 8) makes exactly the pairs from `top` on negative as 16-bit numbers.
    shift = (0x8000 - (top << 8)) * 0x10001
    most = Uint32(0x80008000)
    for i in cutlass.range_constexpr(LANE_WORDS):
        most = max_s16x2(most, (words[i] & Uint32(PAIR_BITS)) + Uint32(shift))
    both = Int32(most)
    lane_most = cutlass.max((both << 16) >> 16, both >> 16)
    warp_most = cute.arch.warp_redux_sync(lane_most, "max")
    return ((warp_most - 0x8000) >> 8) + top if warp_most >= 0 else Int32(-1)


@cute.jit
def best_window(words: Any, top: Int32, max_exceptions: Int32) -> tuple[Int32, Int32]:
    """half_base of the best window and how many values lie outside it.

    Exact where at most `max_exceptions` do, which is all that is asked of it: the lowest of the
    best windows ends at some value's pair (moved lower it would lose that value; moved to end there
    it loses none), and at most `max_exceptions` values lie above, so it ends at one of the highest
    ``max_exceptions + 1`` different pairs.
    """
    best, outliers, tried = Int32(0), Int32(1 << 16), Int32(0)
    while (top >= 0) & (tried <= max_exceptions):
        half_base = cutlass.max(top - (PAIRS - 1), 0)
        mine = Int32(0)
        for q in cutlass.range_constexpr(4):
            high = prmt(words[2 * q], words[2 * q + 1], TAKE_HIGH)
            mine += Int32(cute.arch.popc(outside(high, half_base)))
        count = cute.arch.warp_redux_sync(mine, "add")
        if count <= outliers:  # tops fall, so of equals the lowest stays
            best, outliers = half_base, count
        top = next_below(words, top)
        tried += 1
    return best, outliers


@cute.jit
def choose(words: Any, max_exceptions: Int32) -> Int32:
    """Descriptor of a block."""
    least, most = extent(words)
    descriptor = least
    if most - least >= PAIRS:
        half_base, outliers = best_window(words, most, max_exceptions)
        descriptor = half_base + EXCEPTIONS if outliers <= max_exceptions else Int32(RAW)
    return descriptor


def pack_codes(high: Any, half_base_x4: Any) -> list[Any]:
    """Code bytes of a lane's two fragments, from high bytes that are all inside the window."""
    codes = []
    for tile in range(2):
        # half_base <= pair, so no byte borrows; what is left is the sign and an offset of 0..7.
        first = high[2 * tile] - half_base_x4
        second = high[2 * tile + 1] - half_base_x4
        codes.append(
            first | ((second & Uint32(SIGNS)) >> 1) | ((second & Uint32(SECOND_OFFSET)) << 3)
        )
    return codes


@cute.jit
def split_exceptions(high: Any, half_base: Int32, lane: Int32) -> Any:
    """The block's four exception entries; outliers in `high` become their sign with offset 0.

    `high` is a register tensor of the four words of `high_words`, changed in place.  The entries
    come out the same in every lane.
    """
    half_base_x4 = Uint32(EACH_BYTE) * half_base
    left = cute.make_rmem_tensor(4, Uint32)  # outliers not listed yet, as bit 7 of their bytes
    true = cute.make_rmem_tensor(4, Uint32)
    for q in cutlass.range_constexpr(4):
        true[q] = high[q]
        left[q] = outside(high[q], half_base)
        whole = (left[q] - (left[q] >> 7)) | left[q]  # 0xFF in the bytes of outliers
        high[q] = (high[q] & ~whole) | (((high[q] & Uint32(SIGNS)) + half_base_x4) & whole)
    entries = cute.make_rmem_tensor(MAX_EXCEPTIONS, Uint32)
    entry = Uint32(0)
    for i in cutlass.range_constexpr(MAX_EXCEPTIONS):
        # The lane's own next outlier, its lowest position first.
        word, bits, bytes_ = Int32(3), left[3], true[3]
        for q in cutlass.range_constexpr(2, -1, -1):
            if left[q] != 0:
                word, bits, bytes_ = Int32(q), left[q], true[q]
        has = bits != 0
        lowest = bits & (Uint32(0) - bits)
        byte = Int32(cute.arch.popc(lowest - 1)) >> 3
        selector = IDENTITY_SELECTOR + ((7 - byte) << (4 * byte))
        true_high = (bytes_ >> Uint32(8 * byte)) & 0xFF
        mine = Uint32(selector) | (Uint32(lane * 4 + word) << 16) | (true_high << 24)
        owners = cute.arch.vote_ballot_sync(has)
        if owners != 0:  # the same in every lane; otherwise the last one is repeated
            owner = Int32(cute.arch.popc((owners & (0 - owners)) - 1))
            entry = cute.arch.shuffle_sync(mine, owner)
            if lane == owner:
                for q in cutlass.range_constexpr(4):
                    if word == q:
                        left[q] = left[q] ^ lowest
        entries[i] = entry
    return entries


def spread(byte: Any) -> Any:
    """A byte, four times."""
    return prmt(Uint32(byte), Uint32(0), SPREAD)
