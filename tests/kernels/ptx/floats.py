"""FP32 arithmetic, its conversions, and BF16 pairs.

Limits   ``ex2.approx``, ``lg2.approx`` and ``rcp.approx`` are computed in float64 and rounded, so
         they are more exact than the hardware.  ``.ftz`` flushes inputs and results.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Decoder, Fetch, Kind, Step, kind_of, operation
from .warp import Warp

Floats = Callable[[Warp], np.ndarray]
TINY = np.float32(2.0**-126)


def flush(values: np.ndarray) -> np.ndarray:
    """Return zeros of the same sign in place of subnormals."""
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def _fetches(d: Decoder, count: int, *, ftz: bool) -> list[Floats]:
    d.expect(count + 1)

    def make(fetch: Fetch) -> Floats:
        if ftz:
            return lambda w: flush(fetch(w).view(np.float32))
        return lambda w: fetch(w).view(np.float32)

    return [make(d.fetch(1 + i, 32)) for i in range(count)]


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Multiply and add with one rounding.

    The product is exact in float64; where the float64 sum is inexact, its last bit is made odd, so
    that rounding it again to FP32 gives what one rounding would.
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + away, bits).view(np.float64).astype(np.float32)


UNARY = {
    "neg": lambda x: (x.view(np.uint32) ^ np.uint32(0x80000000)).view(np.float32),
    "abs": lambda x: (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32),
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(np.float32),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(np.float32),
    "rcp": lambda x: (1 / x.astype(np.float64)).astype(np.float32),
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
    "sqrt": lambda x: np.sqrt(x.astype(np.float64)).astype(np.float32),
    "tanh": lambda x: np.tanh(x.astype(np.float64)).astype(np.float32),
    "sin": lambda x: np.sin(x.astype(np.float64)).astype(np.float32),
    "cos": lambda x: np.cos(x.astype(np.float64)).astype(np.float32),
}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.fmin,
    "max": np.fmax,
    "div": lambda a, b: (a.astype(np.float64) / b).astype(np.float32),
}


def _canonical(values: np.ndarray) -> np.ndarray:
    """Return the bits of results; the NaN of FP32 arithmetic is always the same."""
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32))


def arithmetic(d: Decoder, kind: Kind) -> Step:
    """Make the step of an instruction whose type is a float."""
    if kind != Kind("f", 32):
        raise d.unknown()
    ftz = d.flag("ftz")
    d.flag("approx", "full", "rn")
    nan = d.name in ("min", "max") and d.flag("NaN")
    put = d.put(0, 32)
    keeps_nan = d.name in ("neg", "abs")

    def finish(w: Warp, values: np.ndarray) -> None:
        if ftz:
            values = flush(values)
        put(w, values.view(np.uint32) if keeps_nan else _canonical(values))

    if d.name in UNARY:
        function = UNARY[d.name]
        (x,) = _fetches(d, 1, ftz=ftz)

        def unary(w: Warp) -> None:
            with np.errstate(all="ignore"):
                finish(w, function(x(w)))

        return unary
    if d.name in ("fma", "mad"):
        a, b, c = _fetches(d, 3, ftz=ftz)

        def fused(w: Warp) -> None:
            with np.errstate(all="ignore"):
                finish(w, _fma(a(w), b(w), c(w)))

        return fused
    function = BINARY[d.name]
    if len(d.operands) == 4 and d.name in ("min", "max"):
        a, b, c = _fetches(d, 3, ftz=ftz)
    else:
        a, b = _fetches(d, 2, ftz=ftz)
        c = None
    if nan:
        function = np.minimum if d.name == "min" else np.maximum

    def binary(w: Warp) -> None:
        with np.errstate(all="ignore"):
            result = function(a(w), b(w))
            finish(w, result if c is None else function(result, c(w)))

    return binary


@operation("fma", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos")
def _float_only(d: Decoder) -> Step:
    return arithmetic(d, d.kind())


@operation("testp", "copysign")
def _signs(d: Decoder) -> Step:
    if d.name != "copysign" or d.kind() != Kind("f", 32):
        raise d.unknown()
    a, b, put = d.fetch(1, 32), d.fetch(2, 32), d.put(0, 32)
    sign = np.uint32(0x80000000)
    return lambda w: put(w, (a(w) & sign) | (b(w) & ~sign))


def to_bf16(words: np.ndarray, *, relu: bool = False) -> np.ndarray:
    """Round FP32 bits to BF16 bits, to nearest even; a NaN becomes 0x7FFF."""
    values = words.view(np.float32)
    if relu:
        words = np.where(values > 0, words, np.where(np.isnan(values), words, np.uint32(0)))
    rounded = words.astype(np.uint64) + 0x7FFF + (words >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(values), 0x7FFF, rounded >> np.uint64(16)).astype(np.uint16)


def convert(d: Decoder) -> Step:
    """Make the step of a ``cvt`` from or to a float."""
    parts = [part for part in d.parts if kind_of(part) or part in ("bf16", "bf16x2")]
    d.parts = [part for part in d.parts if part not in parts]
    if len(parts) != 2:
        raise d.unknown()
    into, source = parts
    if into == "bf16x2" and source == "f32" and d.flag("rn"):
        relu = d.flag("relu")
        d.expect(3)
        a, b, put = d.fetch(1, 32), d.fetch(2, 32), d.put(0, 32)

        def pair(w: Warp) -> None:
            high = to_bf16(a(w), relu=relu).astype(np.uint32)
            put(w, high << np.uint32(16) | to_bf16(b(w), relu=relu))

        return pair
    d.expect(2)
    if into == "bf16" and source == "f32" and d.flag("rn"):
        relu = d.flag("relu")
        a, put = d.fetch(1, 32), d.put(0, 16)
        return lambda w: put(w, to_bf16(a(w), relu=relu))
    if into == "f32" and source == "bf16":
        d.flag("ftz")
        a, put = d.fetch(1, 16), d.put(0, 32)
        return lambda w: put(w, a(w).astype(np.uint32) << np.uint32(16))
    if into == "f32" and source[0] in "us":
        if not d.flag("rn"):
            raise d.unknown()
        a, put = d.fetch(1, kind_of(source), narrow=True), d.put(0, 32)
        return lambda w: put(w, a(w).astype(np.float32).view(np.uint32))
    if source == "f32" and into[0] in "us":
        return _to_integer(d, kind_of(into))
    raise d.unknown()


def _to_integer(d: Decoder, kind: Kind) -> Step:
    """Round to an integer of at most 32 bits; out of range gives the nearest, a NaN gives 0."""
    mode = d.choice("rni", "rzi", "rmi", "rpi")
    ftz = d.flag("ftz")
    if mode is None or kind.bits > 32:
        raise d.unknown()
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    a, put = d.fetch(1, 32), d.put(0, kind, widen=True)
    limits = np.iinfo(kind.dtype)

    def step(w: Warp) -> None:
        values = a(w).view(np.float32)
        values = np.nan_to_num(flush(values) if ftz else values, posinf=np.inf, neginf=-np.inf)
        rounded = function(values.astype(np.float64))
        put(w, np.clip(rounded, limits.min, limits.max).astype(np.int64).astype(kind.dtype))

    return step
