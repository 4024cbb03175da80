"""512 values (two tiles) to bytes: block kinds, planes, exception entries.

This is the format in plain Python, one value at a time: the text of FORMAT.md as code, and the
oracle that the vectorised and the device codecs are held against.

A block's values are ordered by *position* ``lane * 16 + tile * 8 + v``.  Kinds, by descriptor:

==================  =====  =======================================================================
kind                bytes  contents
==================  =====  =======================================================================
compressed            768  512 low bytes by position, then 256 code bytes by (lane, tile, v % 4)
with exceptions       784  the same, then four entries of four bytes
raw                  1024  16-bit values, little endian, by (tile, lane, v)
==================  =====  =======================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zf_layouts import bf16
from zf_layouts.fragment import FRAGMENT, LANES

TILES = 2
"""Tiles in a block."""

BLOCK_VALUES = TILES * LANES * FRAGMENT
LOW_PLANE = BLOCK_VALUES
CODE_PLANE = BLOCK_VALUES // 2
MAX_EXCEPTIONS = 4
ENTRY_BYTES = 4
RAW = 255
"""Descriptor of a raw block."""

EXCEPTIONS = 128
"""Bit of a descriptor that says: exception entries follow (unless the descriptor is RAW)."""

MAX_EXCEPTION_BASE = 240
"""Highest base of a block with exceptions."""

IDENTITY_SELECTOR = 0x3210
"""PRMT selector that changes nothing; an entry replaces one nibble of it by 7."""


@dataclass(frozen=True)
class BlockKind:
    """How a block is stored.

    Attributes
    ----------
    name : str
        Key in reports: ``compressed``, ``exceptions`` or ``raw``.
    nbytes : int
        Stored bytes of one block, a multiple of 16.
    first, last : int
        Inclusive range of descriptors that mean this kind.
    """

    name: str
    nbytes: int
    first: int
    last: int


COMPRESSED_KIND = BlockKind("compressed", LOW_PLANE + CODE_PLANE, 0, 127)
EXCEPTIONS_KIND = BlockKind(
    "exceptions",
    LOW_PLANE + CODE_PLANE + MAX_EXCEPTIONS * ENTRY_BYTES,
    EXCEPTIONS,
    EXCEPTIONS + MAX_EXCEPTION_BASE // 2,
)
RAW_KIND = BlockKind("raw", 2 * BLOCK_VALUES, RAW, RAW)

KINDS = (COMPRESSED_KIND, EXCEPTIONS_KIND, RAW_KIND)
"""Every kind a descriptor can name.  Code that sizes or places blocks asks this table."""


def kind_of(descriptor: int) -> BlockKind | None:
    """Kind that `descriptor` (0 to 255) names, or None where the format gives it no meaning."""
    for kind in KINDS:
        if kind.first <= descriptor <= kind.last:
            return kind
    return None


def position(tile: int, lane: int, v: int) -> int:
    """Position (0 to 511) of a value in its block: the index of its low byte."""
    return lane * TILES * FRAGMENT + tile * FRAGMENT + v


def tile_lane_value(at: int) -> tuple[int, int, int]:
    """(tile, lane, v) of position `at`: inverse of `position`."""
    return at // FRAGMENT % TILES, at // (TILES * FRAGMENT), at % FRAGMENT


def code_place(at: int) -> tuple[int, int, int]:
    """Byte of a compressed block that holds position `at`'s code, its sign bit, its offset's shift.

    Values i and i + 4 of a fragment share a byte: value i has its sign in bit 7 and its offset in
    bits 2..0, value i + 4 its sign in bit 6 and its offset in bits 5..3.
    """
    byte = LOW_PLANE + at // FRAGMENT * 4 + at % 4
    return (byte, 7, 0) if at % FRAGMENT < 4 else (byte, 6, 3)


def raw_byte(at: int) -> int:
    """Byte of a raw block where the 16-bit value of position `at` starts."""
    tile, lane, v = tile_lane_value(at)
    return ((tile * LANES + lane) * FRAGMENT + v) * 2


def pack_entry(at: int, high_byte: int) -> int:
    """32-bit exception entry: ``selector | (at >> 2) << 16 | high_byte << 24``.

    The selector is the PRMT selector that takes the entry's own top byte (byte 7 of the register
    pair) into byte ``at & 3`` of a word of four high bytes, and leaves the other three.
    """
    byte = at & 3
    selector = IDENTITY_SELECTOR & ~(0xF << 4 * byte) | 7 << 4 * byte
    return selector | at >> 2 << 16 | high_byte << 24


def unpack_entry(entry: int) -> tuple[int, int] | None:
    """(position, high byte) of an exception entry, or None if no writer makes such an entry."""
    for byte in range(4):
        at = (entry >> 16 & 0x7F) << 2 | byte
        if pack_entry(at, entry >> 24) == entry:
            return at, entry >> 24
    return None


def unpack_entries(data: bytes, max_exceptions: int = MAX_EXCEPTIONS) -> dict[int, int]:
    """Position to high byte of the four entries in `data`.

    Raises
    ------
    ValueError
        If an entry is malformed, positions do not ascend, a repetition is not of the last used
        entry, or more than `max_exceptions` positions are used.
    """
    words = [
        int.from_bytes(data[i : i + ENTRY_BYTES], "little")
        for i in range(0, MAX_EXCEPTIONS * ENTRY_BYTES, ENTRY_BYTES)
    ]
    used: dict[int, int] = {}
    last_at, ended = -1, False
    for i, word in enumerate(words):
        entry = unpack_entry(word)
        if entry is None:
            raise ValueError(f"exception entry {i} is malformed: {word:#010x}")
        repeats = i > 0 and word == words[i - 1]
        if not repeats and (ended or entry[0] <= last_at):
            raise ValueError(f"exception entry {i} does not ascend: {word:#010x}")
        last_at, ended = entry[0], repeats
        used[entry[0]] = entry[1]
    if len(used) > max_exceptions:
        raise ValueError(f"{len(used)} exceptions; the layout allows {max_exceptions}")
    return used


def encode_block(bits: Sequence[int], max_exceptions: int = MAX_EXCEPTIONS) -> tuple[int, bytes]:
    """Encode 512 bit patterns, ordered by position.

    Returns
    -------
    descriptor, data : int, bytes
        `data` has the length that the descriptor's kind gives.
    """
    base, outliers = bf16.choose_base([bf16.exponent(x) for x in bits])
    if len(outliers) > max_exceptions:
        data = bytearray(RAW_KIND.nbytes)
        for at, x in enumerate(bits):
            data[raw_byte(at) : raw_byte(at) + 2] = x.to_bytes(2, "little")
        return RAW, bytes(data)
    data = bytearray(COMPRESSED_KIND.nbytes)
    for at, x in enumerate(bits):
        data[at] = bf16.low_byte(x)
        byte, sign_bit, shift = code_place(at)
        code = bf16.code(x, base)
        data[byte] |= code >> 3 << sign_bit | (code & 7) << shift
    if not outliers:
        return base // 2, bytes(data)
    padded = outliers + [outliers[-1]] * (MAX_EXCEPTIONS - len(outliers))
    for at in padded:
        data += pack_entry(at, bf16.high_byte(bits[at])).to_bytes(ENTRY_BYTES, "little")
    return EXCEPTIONS + base // 2, bytes(data)


def decode_block(descriptor: int, data: bytes, max_exceptions: int = MAX_EXCEPTIONS) -> list[int]:
    """512 bit patterns, ordered by position: inverse of `encode_block`.

    Raises
    ------
    ValueError
        If the descriptor means nothing or `max_exceptions` forbids it, `data` is too short for it,
        or an entry is malformed.
    """
    kind = kind_of(descriptor)
    if kind is None or (kind is EXCEPTIONS_KIND and not max_exceptions):
        raise ValueError(
            f"descriptor {descriptor} names no block kind with max_exceptions={max_exceptions}"
        )
    if len(data) < kind.nbytes:
        raise ValueError(f"{len(data)} bytes; a {kind.name} block has {kind.nbytes}")
    if kind is RAW_KIND:
        return [
            int.from_bytes(data[raw_byte(at) : raw_byte(at) + 2], "little")
            for at in range(BLOCK_VALUES)
        ]
    base = (descriptor & 0x7F) * 2
    values = []
    for at in range(BLOCK_VALUES):
        byte, sign_bit, shift = code_place(at)
        code = (data[byte] >> sign_bit & 1) << 3 | data[byte] >> shift & 7
        values.append(bf16.rebuild(data[at], code, base) & 0xFFFF)
    if kind is EXCEPTIONS_KIND:
        for at, high in unpack_entries(
            data[COMPRESSED_KIND.nbytes : kind.nbytes], max_exceptions
        ).items():
            values[at] = high << 8 | data[at]
    return values
