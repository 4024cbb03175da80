"""Blocks of 512 patterns, by position, that each meet one rule of FORMAT.md section 6."""

from __future__ import annotations

from itertools import product

import numpy as np
from bits import pattern

VALUES = 512


def spread(low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Exponents `low` to `high`, both met, with random signs and fractions."""
    exponents = rng.integers(low, high + 1, VALUES)
    exponents[rng.permutation(VALUES)[:2]] = low, high
    return rng.integers(0, 2, VALUES) << 15 | exponents << 7 | rng.integers(0, 128, VALUES)


def replaced(block: np.ndarray, values: dict[int, int]) -> np.ndarray:
    """Some positions with other patterns."""
    block = block.copy()
    for at, bits in values.items():
        block[at] = bits
    return block


def _with_exponents(bulk: int, others: dict[int, int]) -> np.ndarray:
    """One exponent, but for some values of others: {exponent: how many}."""
    exponents = np.full(VALUES, bulk)
    at = 0
    for exponent, count in others.items():
        exponents[at : at + 37 * count : 37] = exponent
        at += 37 * count
    return exponents << 7 | np.arange(VALUES) % 128


def hard_blocks() -> dict[str, np.ndarray]:
    """Blocks by what they are about."""
    rng = np.random.default_rng(47)
    bulk = spread(120, 129, rng)
    ones = np.full(VALUES, 0x3F80)
    zeros = np.zeros(VALUES, int)
    signs = rng.integers(0, 2, VALUES) << 15
    blocks = {
        # The worked bytes of section 8, then the table of section 6.
        "8.1": ones,
        "8.2": replaced(ones, {1: 0xBFB6, 5: 0xC1DA}),
        "8.3": replaced(ones, {5: 0x0000, 24: 0x8001}),
        "8.4": replaced(zeros, {2: 0x8000, 511: 0x807F}),
        "8.5": replaced(np.full(VALUES, 0x7F80), {0: 0xFFC1}),
        "8.6": replaced(ones, dict.fromkeys(range(5), 0)),
        "all +0": zeros,
        "all -0": zeros | 0x8000,
        "denormals of both signs": rng.integers(0, 128, VALUES) | signs,
        "NaN and infinity": rng.integers(0x7F80, 0x8000, VALUES) | signs,
        "exponents 240 to 255": spread(240, 255, rng),
        "exponents 241 to 255": spread(241, 255, rng),
        "exponents 239 to 255": spread(239, 255, rng),
        "large among zeros": replaced(zeros, {3: 0x7F80, 99: 0xFFFF, 100: 0x3F80, 511: 0x0800}),
        "too many large among zeros": replaced(zeros, dict.fromkeys(range(7, 12), 0xBF80)),
        "random bits": rng.integers(0, 1 << 16, VALUES),
        "random bits again": rng.integers(0, 1 << 16, VALUES),
        # Two groups: no window holds more than half.
        "two groups": np.where(np.arange(VALUES) % 2, pattern(200), pattern(100)),
        # Which window: ties go to the lowest.  All held by windows from 106 on; a value each side;
        # a value below that loses, as two are above; the lowest window, [0, 15], for values
        # that would fit a lower one were there any.
        "a tie of all windows": _with_exponents(121, {0: 1}),
        "a tie of one below and one above": _with_exponents(121, {114: 1, 134: 1}),
        "one below, two above": _with_exponents(121, {110: 1, 134: 2}),
        "two below, one above": _with_exponents(121, {110: 2, 134: 1}),
        "one below, one far above, one farther": _with_exponents(121, {110: 1, 180: 1, 250: 1}),
        "bulk in the lowest window": _with_exponents(4, {16: 1}),
        "bulk in the lowest window, four far": _with_exponents(9, {30: 1, 90: 1, 160: 1, 255: 1}),
        "bulk at the top": _with_exponents(255, {239: 1, 0: 3}),
        "bulk at the top, odd": _with_exponents(253, {237: 2}),
        # More different exponents above the window than exceptions.
        "five different above": _with_exponents(60, {90: 1, 120: 1, 150: 1, 180: 1, 210: 1}),
        "four different above, eight below": np.where(
            np.arange(VALUES) % 128 == 0, np.arange(VALUES) // 128 + 180 << 7, spread(60, 75, rng)
        ),
    }
    # Spans of 14 to 17 exponents from even and odd minima, at both ends and in the middle.
    for low, exponents in product((0, 1, 2, 3, 100, 101, 238, 239, 240), (14, 15, 16, 17)):
        if low + exponents - 1 <= 255:
            blocks[f"{exponents} exponents from {low}"] = spread(low, low + exponents - 1, rng)
    # Outliers: how many, on which side, and where they lie.
    low, high = 0x8001, pattern(255, 1, 1)
    for count in (1, 2, 3, 4, 5):
        for side, values in (
            ("below", [0, low, pattern(3), 0x8000, pattern(90)]),
            ("above", [high, 0x7F80, pattern(160), 0x7FC0, pattern(254, 1)]),
            ("on both sides", [low, 0x7F80, pattern(160, 1), 0, pattern(254)]),
        ):
            at = sorted(rng.permutation(VALUES)[:count].tolist())
            blocks[f"{count} outliers {side}"] = replaced(bulk, dict(zip(at, values, strict=False)))
    for name, at in {
        "first and last position": (0, 511),
        "one word": (200, 201, 202, 203),
        "one byte of four words": (16, 20, 24, 28),
        "one lane, four words, four bytes": (499, 502, 505, 508),
        "two lanes": (31, 32, 47, 33),
        "four lanes": (15, 16, 256, 511),
        "the last lane": (496, 497, 510, 511),
        "one tile of the first lane": (8, 11, 12, 15),
        "five in one lane": (64, 67, 70, 73, 79),
    }.items():
        values = [0x8000 | 7 * i if i % 2 else 0x7F00 + 31 * i for i in range(len(at))]
        blocks[f"outliers in {name}"] = replaced(bulk, dict(zip(at, values, strict=True)))
    return blocks


def outlier_in_every_position() -> np.ndarray:
    """[128, 512]: blocks of four outliers each, of all positions and nearly all high bytes."""
    rng = np.random.default_rng(53)
    blocks = np.stack([spread(118, 131, rng) for _ in range(128)])
    at = rng.permutation(VALUES).reshape(128, 4)
    exponents = rng.permutation(np.r_[0:112, 144:256].repeat(3)[:VALUES]).reshape(128, 4)
    values = rng.integers(0, 2, at.shape) << 15 | exponents << 7 | rng.integers(0, 128, at.shape)
    np.put_along_axis(blocks, at, values, 1)
    return blocks


HARD = hard_blocks()
