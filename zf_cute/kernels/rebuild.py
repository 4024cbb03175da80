"""Low bytes and codes back to BF16: mask, unpack, add, join.  One routine for every backend.

A fragment of eight values comes as two words of low bytes, one word of code bytes and its block's
``half_base = base / 2``; it leaves as the four registers of an MMA A operand.  Where the block has
exceptions, its entries put the true high bytes in between.

The routine is written over an op set.  `IntegerOps` runs it on numpy uint32 arrays, torch int32
tensors and the DSL's Uint32 in its CPU JIT.  A kernel brings an op set in which PRMT is one
instruction, and otherwise runs these lines.

Limits   ``half_base + offset <= 127`` in every block a writer makes (FORMAT.md section 5), so no
         byte of an addition carries into a sign or into its neighbour.
Source   ZipFusion (arXiv 2610.33719), Figure 3, for the codes; exceptions are this project's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Word = Any
"""A 32-bit word of the op set: a scalar in a kernel, an array of them elsewhere."""

FIRST_SIGN_AND_OFFSET = 0x87878787  # values 0..3: bit 7 sign, bits 2..0 offset, in each byte
SECOND_SIGN = 0x80808080  # values 4..7: the sign, once shifted from bit 6 to bit 7
SECOND_OFFSET = 0x07070707  # values 4..7: the offset, once shifted from bits 5..3
SPREAD = 0x0000  # PRMT: byte 0, four times
JOIN_FIRST = 0x5140  # PRMT: low byte 0, high byte 0, low byte 1, high byte 1
JOIN_SECOND = 0x7362  # PRMT: low byte 2, high byte 2, low byte 3, high byte 3


class OpSet(Protocol):
    """What the routine needs beyond ``& | + << >>`` on words."""

    def u32(self, value: int) -> Word:
        """Return a 32-bit constant."""

    def prmt(self, a: Word, b: Word, selector: int) -> Word:
        """Pick four of the bytes of `a` (0..3) and `b` (4..7), by one nibble of selector each."""

    def prmt_if_equal(self, a: Word, x: Word, y: Word, entry: Word) -> Word:
        """Return ``prmt(a, entry, selector=entry)`` where `x` equals `y`, and `a` elsewhere."""


class IntegerOps:
    """The op set in plain integer arithmetic, for words without a PRMT instruction.

    Parameters
    ----------
    u32 : callable
        Makes a constant of the word type: ``np.uint32``, the DSL's ``Uint32``, or `signed_word`
        for torch int32 tensors.
    """

    def __init__(self, u32: Callable[[int], Word]) -> None:
        """Keep the constructor of constants."""
        self.u32 = u32

    def prmt(self, a: Word, b: Word, selector: int) -> Word:
        """Pick bytes by a selector known beforehand."""
        u32, word = self.u32, None
        for i in range(4):
            pick = selector >> 4 * i & 7
            source = a if pick < 4 else b
            byte = (source >> u32(8 * (pick & 3))) & u32(0xFF)
            byte = byte << u32(8 * i)
            word = byte if word is None else word | byte
        return word

    def prmt_if_equal(self, a: Word, x: Word, y: Word, entry: Word) -> Word:
        """Patch bytes of `a` by the selector in the low half of `entry`, where `x` equals `y`."""
        u32 = self.u32
        patched = None
        for i in range(4):
            pick = (entry >> u32(4 * i)) & u32(7)
            from_entry = u32(0) - (pick >> u32(2))  # all ones or zero
            source = (entry & from_entry) | (a & (from_entry ^ u32(0xFFFFFFFF)))
            byte = (source >> ((pick & u32(3)) << u32(3))) & u32(0xFF)
            byte = byte << u32(8 * i)
            patched = byte if patched is None else patched | byte
        difference = x ^ y
        nonzero = ((difference | (u32(0) - difference)) >> u32(31)) & u32(1)
        equal = nonzero - u32(1)  # all ones where x equals y
        return (patched & equal) | (a & (equal ^ u32(0xFFFFFFFF)))


def signed_word(value: int) -> int:
    """32-bit constant as the Python int that a torch int32 tensor takes."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def high_bytes(codes: Word, half_base_x4: Word, ops: OpSet) -> tuple[Word, Word]:
    """High bytes of values 0..3 and of values 4..7 of a fragment, before exceptions.

    `half_base_x4` holds half_base in each of its four bytes.
    """
    first = (codes & ops.u32(FIRST_SIGN_AND_OFFSET)) + half_base_x4
    second = ((codes << ops.u32(1)) & ops.u32(SECOND_SIGN)) | (
        (codes >> ops.u32(3)) & ops.u32(SECOND_OFFSET)
    )
    return first, second + half_base_x4


def patch(high: Word, word_number: Word, entries: tuple[Word, ...], ops: OpSet) -> Word:
    """Put the true high bytes of a block's exceptions into one word of high bytes.

    `word_number` is ``position >> 2`` of the word.  An entry is a ready PRMT selector, the number
    of the word it belongs to and the byte (FORMAT.md section 5): one compare and one predicated
    PRMT each.
    """
    for entry in entries:
        owner = (entry >> ops.u32(16)) & ops.u32(0x7F)
        high = ops.prmt_if_equal(high, owner, word_number, entry)
    return high


def join(low: tuple[Word, Word], high: tuple[Word, Word], ops: OpSet) -> tuple[Word, ...]:
    """Four registers of two BF16 values each, from the low and the high bytes of a fragment."""
    return (
        ops.prmt(low[0], high[0], JOIN_FIRST),
        ops.prmt(low[0], high[0], JOIN_SECOND),
        ops.prmt(low[1], high[1], JOIN_FIRST),
        ops.prmt(low[1], high[1], JOIN_SECOND),
    )


def rebuild(
    low: tuple[Word, Word],
    codes: Word,
    half_base: Word,
    ops: OpSet,
    *,
    fragment: Word = None,
    entries: tuple[Word, ...] = (),
) -> tuple[Word, ...]:
    """Four registers of two BF16 values each.

    Parameters
    ----------
    low : tuple of two words
        Low bytes of values 0..3 and 4..7.
    codes : word
        The fragment's four code bytes.
    half_base : word
        Half the block's base, 0 to 127.
    ops : OpSet
        How words are worked on.
    fragment : word
        ``position // 8 = lane * 2 + tile``: which fragment of the block this is.  Needed with
        entries alone.
    entries : tuple of words
        Exception entries of the block; empty for a block without exceptions.
    """
    high = high_bytes(codes, ops.prmt(half_base, half_base, SPREAD), ops)
    if entries:
        word_number = fragment << ops.u32(1)
        high = (
            patch(high[0], word_number, entries, ops),
            patch(high[1], word_number | ops.u32(1), entries, ops),
        )
    return join(low, high, ops)
