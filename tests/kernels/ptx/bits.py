"""Logic, shifts, bit fields and bytes."""

from __future__ import annotations

import operator

import numpy as np

from .decode import LANES, SIGNED, UNSIGNED, Decoder, Kind, Step, columns, operation
from .integers import binary, unary
from .parser import Immediate
from .warp import Warp


@operation("and", "or", "xor")
def _logic(d: Decoder) -> Step:
    kind = d.kind()
    if kind.letter not in "bp":
        raise d.unknown()
    function = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[d.name]
    return binary(d, kind, function)


@operation("not")
def _not(d: Decoder) -> Step:
    return unary(d, d.kind(), np.invert)


@operation("cnot")
def _cnot(d: Decoder) -> Step:
    kind = d.kind()
    return unary(d, kind, lambda a: (a == 0).astype(kind.dtype))


@operation("shl", "shr")
def _shift(d: Decoder) -> Step:
    """Shift; amounts of the width or more give zeros or, with a sign, the sign."""
    kind = d.kind()
    if d.name == "shl":
        kind = Kind("b", kind.bits)
    d.expect(3)
    bits, dtype = kind.bits, kind.dtype
    a, put = d.fetch(1, kind), d.put(0, kind)
    function = operator.lshift if d.name == "shl" else operator.rshift
    amount = d.operands[2]
    if isinstance(amount, Immediate):
        fixed = amount.value
        if fixed >= bits and not kind.signed:
            zeros = np.zeros(LANES, dtype)
            return lambda w: (a(w), put(w, zeros))[1]
        by = np.full(LANES, min(fixed, bits - 1), dtype)
        return lambda w: put(w, function(a(w), by))
    n = d.fetch(2, 32)
    top = np.uint32(bits - 1)

    def step(w: Warp) -> None:
        count = n(w)
        shifted = function(a(w), np.minimum(count, top).astype(dtype))
        put(w, shifted if kind.signed else np.where(count > top, dtype(0), shifted))

    return step


@operation("shf")
def _funnel(d: Decoder) -> Step:
    """Shift the 64 bits of ``b:a``; ``.wrap`` takes the amount modulo 32, ``.clamp`` up to 32."""
    side, mode, kind = d.choice("l", "r"), d.choice("wrap", "clamp"), d.kind()
    if side is None or mode is None or kind.bits != 32:
        raise d.unknown()
    d.expect(4)
    a, b, c, put = d.fetch(1, 32), d.fetch(2, 32), d.fetch(3, 32), d.put(0, 32)
    most = np.uint32(32)

    def step(w: Warp) -> None:
        n = c(w) & np.uint32(31) if mode == "wrap" else np.minimum(c(w), most)
        both = b(w).astype(np.uint64) << np.uint64(32) | a(w)
        if side == "r":
            put(w, (both >> n).astype(np.uint32))
        else:
            put(w, (both << n >> np.uint64(32)).astype(np.uint32))

    return step


@operation("bfe")
def _extract(d: Decoder) -> Step:
    kind = d.kind()
    d.expect(4)
    bits = kind.bits
    a, position, length = d.fetch(1, bits), d.fetch(2, 32), d.fetch(3, 32)
    put = d.put(0, bits)
    unsigned, byte = UNSIGNED[bits], np.uint32(255)

    def step(w: Warp) -> None:
        at = (position(w) & byte).astype(np.int64)
        count = (length(w) & byte).astype(np.int64)
        if kind.signed:  # copies of the field's sign above it, or of the word's past its end
            top = np.where(count == 0, 0, np.minimum(at + count - 1, bits - 1))
            wide = a(w).view(SIGNED[bits])
            left = (bits - 1 - top).astype(SIGNED[bits])
            right = np.minimum(left + np.minimum(at, bits - 1), bits - 1).astype(SIGNED[bits])
            value = (wide << left) >> right
            sign = wide >> SIGNED[bits](bits - 1)
            value = np.where(at >= bits, sign, value)
            put(w, np.where(count == 0, 0, value).astype(SIGNED[bits]).view(unsigned))
            return
        moved = np.where(at >= bits, 0, a(w) >> np.minimum(at, bits - 1).astype(unsigned))
        kept = (unsigned(1) << np.minimum(count, bits - 1).astype(unsigned)) - unsigned(1)
        kept = np.where(count >= bits, ~unsigned(0), kept)
        put(w, (moved.astype(unsigned) & kept).astype(unsigned))

    return step


@operation("bfi")
def _insert(d: Decoder) -> Step:
    bits = d.kind().bits
    d.expect(5)
    a, b = d.fetch(1, bits), d.fetch(2, bits)
    position, length, put = d.fetch(3, 32), d.fetch(4, 32), d.put(0, bits)
    unsigned, byte = UNSIGNED[bits], np.uint32(255)

    def step(w: Warp) -> None:
        at = (position(w) & byte).astype(np.int64)
        count = (length(w) & byte).astype(np.int64)
        ones = (unsigned(1) << np.minimum(count, bits - 1).astype(unsigned)) - unsigned(1)
        ones = np.where(count >= bits, ~unsigned(0), ones)
        by = np.minimum(at, bits - 1).astype(unsigned)
        field = np.where(at >= bits, unsigned(0), ones << by)
        put(w, (b(w) & ~field) | (a(w) << by & field))

    return step


@operation("bfind")
def _find(d: Decoder) -> Step:
    """Give the position of the highest bit unlike the sign, or all ones if there is none."""
    kind = d.kind()
    shift = d.flag("shiftamt")
    a, put = d.fetch(1, kind), d.put(0, 32)
    bits = kind.bits

    def step(w: Warp) -> None:
        values = a(w)
        values = np.where(values < 0, ~values, values) if kind.signed else values
        top = bits - 1 - _leading(values.view(UNSIGNED[bits]), bits)
        result = np.where(top < 0, top, bits - 1 - top) if shift else top
        put(w, result.astype(np.int32).view(np.uint32))

    return step


def _leading(values: np.ndarray, bits: int) -> np.ndarray:
    """Count leading zeros."""
    return np.array([bits - int(v).bit_length() for v in values.tolist()], np.int64)


@operation("clz")
def _clz(d: Decoder) -> Step:
    bits = d.kind().bits
    a, put = d.fetch(1, bits), d.put(0, 32)
    return lambda w: put(w, _leading(a(w), bits).astype(np.uint32))


@operation("popc")
def _popc(d: Decoder) -> Step:
    a, put = d.fetch(1, d.kind().bits), d.put(0, 32)

    def step(w: Warp) -> None:
        octets = np.ascontiguousarray(a(w)).view(np.uint8).reshape(LANES, -1)
        put(w, np.unpackbits(octets, axis=1).sum(axis=1, dtype=np.uint32))

    return step


@operation("brev")
def _brev(d: Decoder) -> Step:
    bits = d.kind().bits
    dtype = UNSIGNED[bits]

    def reverse(a: np.ndarray) -> np.ndarray:
        for by, keep in ((1, 0x55), (2, 0x33), (4, 0x0F)):
            each = dtype(int.from_bytes(bytes([keep]) * (bits // 8), "little"))
            a = (a >> dtype(by) & each) | ((a & each) << dtype(by))
        return a.byteswap()

    return unary(d, Kind("b", bits), reverse)


SPECIAL_PERMUTES = {
    "f4e": lambda c: c * 0x1111 + 0x3210,
    "b4e": lambda c: sum(((c - i) % 8) << 4 * i for i in range(4)),
    "rc8": lambda c: c * 0x1111,
    "rc16": lambda c: 0x1010 if c % 2 == 0 else 0x3232,
    "ecl": lambda c: sum(max(i, c) << 4 * i for i in range(4)),
    "ecr": lambda c: sum(min(i, c) << 4 * i for i in range(4)),
}


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Pick bytes of ``b:a`` by the nibbles of selectors; bit 3 of one spreads the byte's sign."""
    source = columns(a, b).view(np.uint8)
    nibbles = selector[:, None] >> NIBBLES & np.uint32(15)
    picked = np.take_along_axis(source, (nibbles & np.uint32(7)).astype(np.int64), axis=1)
    if (nibbles & np.uint32(8)).any():
        sign = (picked.view(np.int8) >> np.int8(7)).view(np.uint8)
        picked = np.where(nibbles & np.uint32(8), sign, picked)
    return picked.view(np.uint32)[:, 0]


NIBBLES = np.array([0, 4, 8, 12], np.uint32)


@operation("prmt")
def _prmt(d: Decoder) -> Step:
    mode = d.choice(*SPECIAL_PERMUTES)
    if d.kind().bits != 32:
        raise d.unknown()
    d.expect(4)
    a, b, c, put = d.fetch(1, 32), d.fetch(2, 32), d.fetch(3, 32), d.put(0, 32)
    if mode:
        selectors = np.array([SPECIAL_PERMUTES[mode](i) & 0xFFFF for i in range(4)], np.uint32)
        return lambda w: put(w, permute(a(w), b(w), selectors[c(w) & np.uint32(3)]))
    if isinstance(d.operands[3], Immediate) and not d.operands[3].value & 0x8888:
        order = [d.operands[3].value >> 4 * i & 7 for i in range(4)]

        def fixed(w: Warp) -> None:
            source = columns(a(w), b(w)).view(np.uint8)
            put(w, source.take(order, axis=1).view(np.uint32)[:, 0])

        return fixed
    return lambda w: put(w, permute(a(w), b(w), c(w)))


@operation("lop3")
def _lop3(d: Decoder) -> Step:
    if d.kind() != Kind("b", 32):
        raise d.unknown()
    d.expect(5)
    table = d.operands[4]
    if not isinstance(table, Immediate):
        raise d.unknown()
    a, b, c, put = d.fetch(1, 32), d.fetch(2, 32), d.fetch(3, 32), d.put(0, 32)
    rows = [row for row in range(8) if table.value >> row & 1]
    zeros = np.zeros(LANES, np.uint32)

    def step(w: Warp) -> None:
        x, y, z = a(w), b(w), c(w)
        result = zeros
        for row in rows:
            term = (x if row & 4 else ~x) & (y if row & 2 else ~y)
            result = result | (term & (z if row & 1 else ~z))
        put(w, result)

    return step
