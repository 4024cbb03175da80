"""BF16 bit patterns as the codec sees them: a low byte kept as it is, and a high byte coded.

A BF16 value is 1 sign, 8 exponent and 7 fraction bits.  Its low byte holds the fraction and the
least exponent bit; its high byte the sign and ``exponent >> 1``.  A block stores all low bytes and,
for each high byte, four bits: the sign and ``offset = (exponent - base) >> 1``, which fits three
bits when ``base`` is even and the exponent lies in the window ``[base, base + 15]``.

Exponents are raw exponent *fields* (0 to 255).  Zeros and denormals have field 0, infinities and
NaNs 255; they are coded like any other value, so NaN payloads and the sign of zero survive.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 16
"""Exponent fields in one window: eight offsets, two fields each."""


def exponent(bits: int) -> int:
    """Exponent field (0 to 255) of the 16-bit pattern `bits`."""
    return bits >> 7 & 0xFF


def sign(bits: int) -> int:
    """Sign bit of the 16-bit pattern `bits`."""
    return bits >> 15


def low_byte(bits: int) -> int:
    """Fraction and least exponent bit: stored as it is in every block kind."""
    return bits & 0xFF


def high_byte(bits: int) -> int:
    """Sign and the upper seven exponent bits: what the code replaces."""
    return bits >> 8


def fits(bits: int, base: int) -> bool:
    """Whether the value's exponent field lies in the window that starts at `base`."""
    return base <= exponent(bits) < base + WINDOW


def code(bits: int, base: int) -> int:
    """Four-bit code: sign in bit 3, offset in bits 2..0.  An outlier's code is its sign alone."""
    offset = (exponent(bits) - base) >> 1 if fits(bits, base) else 0
    return sign(bits) << 3 | offset


def rebuild(low: int, four_bit_code: int, base: int) -> int:
    """Bit pattern from a low byte, a four-bit code and the (even) base of its block."""
    high = (four_bit_code & 8) << 4 | ((base >> 1) + (four_bit_code & 7))
    return high << 8 | low


def choose_base(exponents: Sequence[int]) -> tuple[int, list[int]]:
    """Base of a block and the positions of its outliers (empty if every value fits).

    The least exponent rounded down to even if all fit; otherwise the lowest even base whose window
    holds the most values.  The second case never yields more than 240, since every window above
    240 is part of the one at 240; then ``base / 2 + offset <= 127`` even for values that wrap.
    """
    base = min(exponents) & ~1
    if max(exponents) < base + WINDOW:
        return base, []

    def held(candidate: int) -> int:
        return sum(candidate <= e < candidate + WINDOW for e in exponents)

    base = max(range(0, 256, 2), key=held)  # max() keeps the first, hence the lowest
    return base, [i for i, e in enumerate(exponents) if not base <= e < base + WINDOW]
