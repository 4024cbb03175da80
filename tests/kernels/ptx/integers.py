"""Integer arithmetic, moves and conversions between integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import floats
from .decode import UNSIGNED, Decoder, Kind, Step, columns, kind_of, operation
from .parser import Sequence
from .warp import Warp


def binary(d: Decoder, kind: Kind, function: Callable) -> Step:
    """Make the step of ``op d, a, b`` from a function of two vectors of the type."""
    d.expect(3)
    a, b, put = d.fetch(1, kind), d.fetch(2, kind), d.put(0, kind)
    return lambda w: put(w, function(a(w), b(w)))


def unary(d: Decoder, kind: Kind, function: Callable) -> Step:
    """Make the step of ``op d, a``."""
    d.expect(2)
    a, put = d.fetch(1, kind), d.put(0, kind)
    return lambda w: put(w, function(a(w)))


@operation("add", "sub")
def _add(d: Decoder) -> Step:
    kind = d.kind()
    if kind.letter == "f":
        return floats.arithmetic(d, kind)
    if kind.bits == 8:
        raise d.unknown()
    # The sum of two's complements does not depend on the sign.
    return binary(d, Kind("b", kind.bits), np.add if d.name == "add" else np.subtract)


def _halves(function: Callable, dtype: type) -> Callable:
    def each(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return function(a.view(dtype), b.view(dtype)).view(np.uint32)

    return each


@operation("min", "max")
def _extremum(d: Decoder) -> Step:
    function = np.minimum if d.name == "min" else np.maximum
    packed = d.choice("u16x2", "s16x2")
    if packed:
        dtype = np.uint16 if packed[0] == "u" else np.int16
        return binary(d, Kind("b", 32), _halves(function, dtype))
    kind = d.kind()
    if kind.letter == "f":
        return floats.arithmetic(d, kind)
    if kind.letter == "b" or kind.bits == 8:
        raise d.unknown()
    return binary(d, kind, function)


def high_product(a: np.ndarray, b: np.ndarray, kind: Kind) -> np.ndarray:
    """Return the upper half of products."""
    if kind.bits < 64:
        wide = np.int64 if kind.signed else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(kind.bits)).astype(kind.dtype)
    products = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    return np.array(products, kind.dtype)


def widened(a: np.ndarray, b: np.ndarray, kind: Kind) -> np.ndarray:
    """Return products of twice the width."""
    wide = Kind(kind.letter, 2 * kind.bits).dtype
    return a.astype(wide) * b.astype(wide)


@operation("mul", "mad")
def _multiply(d: Decoder) -> Step:
    kind = d.kind()
    if kind.letter == "f":
        return floats.arithmetic(d, kind)
    part = d.choice("lo", "hi", "wide")
    if part is None or kind.letter == "b" or (part == "wide" and kind.bits == 64):
        raise d.unknown()
    d.expect(4 if d.name == "mad" else 3)
    a, b = d.fetch(1, kind), d.fetch(2, kind)
    result = Kind(kind.letter, 2 * kind.bits) if part == "wide" else kind
    product = {
        "lo": np.multiply,
        "hi": lambda x, y: high_product(x, y, kind),
        "wide": lambda x, y: widened(x, y, kind),
    }[part]
    put = d.put(0, result)
    if d.name == "mul":
        return lambda w: put(w, product(a(w), b(w)))
    c = d.fetch(3, result)
    return lambda w: put(w, product(a(w), b(w)) + c(w))


def _low24(values: np.ndarray, kind: Kind) -> np.ndarray:
    eight = kind.dtype(8)
    return (values << eight) >> eight


@operation("mul24", "mad24")
def _multiply24(d: Decoder) -> Step:
    kind = d.kind()
    if not d.flag("lo"):
        raise d.unknown()
    a, b, put = d.fetch(1, kind), d.fetch(2, kind), d.put(0, kind)
    if d.name == "mul24":
        return lambda w: put(w, _low24(a(w), kind) * _low24(b(w), kind))
    c = d.fetch(3, kind)
    return lambda w: put(w, _low24(a(w), kind) * _low24(b(w), kind) + c(w))


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide towards zero."""
    if a.dtype.kind == "u":
        return a // b
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a))


@operation("div", "rem")
def _division(d: Decoder) -> Step:
    kind = d.kind()
    if kind.letter == "f":
        return floats.arithmetic(d, kind)
    if kind.letter == "b":
        raise d.unknown()
    d.expect(3)
    a, b, put = d.fetch(1, kind), d.fetch(2, kind), d.put(0, kind)
    name = d.name

    def step(w: Warp) -> None:
        # Division by zero gives a machine-specific value; all ones, as SM90's own routine does,
        # and in lanes that do not take part it must only not warn.
        x, y = a(w), b(w)
        zero = y == 0
        with np.errstate(over="ignore"):
            quotient = _divide(x, np.where(zero, kind.dtype(1), y))
            result = quotient if name == "div" else x - quotient * y
        if zero.any():
            result = np.where(zero, x if name == "rem" else ~kind.dtype(0), result)
        put(w, result)

    return step


@operation("abs", "neg")
def _sign(d: Decoder) -> Step:
    kind = d.kind()
    if kind.letter == "f":
        return floats.arithmetic(d, kind)
    if not kind.signed:
        raise d.unknown()
    return unary(d, kind, np.abs if d.name == "abs" else np.negative)


@operation("sad")
def _sad(d: Decoder) -> Step:
    kind = d.kind()
    a, b, c, put = d.fetch(1, kind), d.fetch(2, kind), d.fetch(3, kind), d.put(0, kind)

    def step(w: Warp) -> None:
        x, y = a(w), b(w)
        put(w, c(w) + (np.maximum(x, y) - np.minimum(x, y)))

    return step


@operation("mov")
def _mov(d: Decoder) -> Step:
    kind = d.kind()
    d.expect(2)
    if isinstance(d.operands[0], Sequence):
        return _unpack(d, kind)
    if isinstance(d.operands[1], Sequence):
        return _pack(d, kind)
    bits = kind.bits
    a, put = d.fetch(1, bits), d.put(0, bits)
    return lambda w: put(w, a(w))


def _pack(d: Decoder, kind: Kind) -> Step:
    items = d.items(1)
    part = kind.bits // len(items)
    if part not in UNSIGNED:
        raise d.unknown()
    fetches = [d.fetch(item, part) for item in items]
    put = d.put(0, kind.bits)

    def step(w: Warp) -> None:
        parts = columns(*[fetch(w) for fetch in fetches])
        put(w, parts.view(UNSIGNED[kind.bits])[:, 0])

    return step


def _unpack(d: Decoder, kind: Kind) -> Step:
    items = d.items(0)
    part = kind.bits // len(items)
    if part not in UNSIGNED:
        raise d.unknown()
    a = d.fetch(1, kind.bits)
    puts = [d.put(item, part) for item in items]

    def step(w: Warp) -> None:
        parts = np.ascontiguousarray(a(w)).view(UNSIGNED[part]).reshape(-1, len(puts))
        for column, put in enumerate(puts):
            put(w, parts[:, column].copy())

    return step


@operation("cvta")
def _cvta(d: Decoder) -> Step:
    """Convert between generic addresses and those of a state space."""
    from .memory import SHARED_WINDOW

    to = d.flag("to")
    space = d.choice("global", "shared", "shared::cta", "shared::cluster", "const", "param")
    kind = d.kind()
    if space is None or space == "param" or kind != Kind("u", 64):
        raise d.unknown()
    if not space.startswith("shared"):
        return unary(d, kind, lambda a: a)
    window = np.uint64(SHARED_WINDOW)
    if to:
        return unary(d, kind, lambda a: a - window)
    return unary(d, kind, lambda a: a + window)


@operation("cvt")
def _cvt(d: Decoder) -> Step:
    kinds = [kind_of(part) for part in d.parts if kind_of(part)]
    if len(kinds) != 2 or any(kind.letter not in "us" for kind in kinds):
        return floats.convert(d)
    into, source = kinds
    d.kind(), d.kind()
    saturate = d.flag("sat")
    d.expect(2)
    a = d.fetch(1, source, narrow=True)
    # A result narrower than its register is extended by its own sign.
    put = d.put(0, into, widen=True)
    if saturate:
        limits = np.iinfo(into.dtype)
        low = max(limits.min, int(np.iinfo(source.dtype).min))
        high = min(limits.max, int(np.iinfo(source.dtype).max))

        def saturated(w: Warp) -> None:
            put(w, np.clip(a(w), source.dtype(low), source.dtype(high)).astype(into.dtype))

        return saturated
    dtype = into.dtype
    return lambda w: put(w, a(w).astype(dtype))
