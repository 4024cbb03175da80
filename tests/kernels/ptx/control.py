"""Instructions that choose: comparisons, selections, branches and exits."""

from __future__ import annotations

import operator

import numpy as np

from .decode import LANES, Decoder, Kind, Step, operation
from .parser import Symbol
from .warp import DONE, Warp

ALL_TRUE, ALL_FALSE = b"\1" * LANES, b"\0" * LANES
COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _compare(d: Decoder, kind: Kind):
    """Take a comparison off the opcode: a function of two vectors."""
    name = d.choice(*COMPARE, *(f"{each}u" for each in COMPARE if len(each) == 2), "num", "nan")
    if name in COMPARE:
        if name in ("lo", "ls", "hi", "hs") and kind.letter != "u":
            raise d.unknown()
        if kind.letter == "b" and name not in ("eq", "ne"):
            raise d.unknown()
        if kind.letter == "f" and name == "ne":  # ordered: false for a NaN
            return lambda a, b: (a < b) | (a > b)
        return COMPARE[name]
    if kind.letter != "f" or name is None:
        raise d.unknown()
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    ordered = COMPARE[name[:2]]
    return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)


def _operands(d: Decoder, kind: Kind, *which: int):
    """Make fetches of operands to compare, as floats if the type is one."""
    fetches = [d.fetch(i, Kind("b", 32) if kind.letter == "f" else kind) for i in which]
    if kind.letter != "f":
        return fetches
    if kind.bits != 32:
        raise d.unknown()

    def as_float(fetch):
        return lambda w: fetch(w).view(np.float32)

    return [as_float(fetch) for fetch in fetches]


@operation("setp")
def _setp(d: Decoder) -> Step:
    kind = d.kind()
    compare = _compare(d, kind)
    combine = COMBINE.get(d.choice(*COMBINE))
    d.expect(4 if combine else 3)
    a, b = _operands(d, kind, 1, 2)
    outs = d.items(0)
    put = d.put(outs[0], 1)
    if combine is None and len(outs) == 1:
        return lambda w: put(w, compare(a(w), b(w)))
    also = d.fetch(3, 1) if combine else None
    opposite = d.put(outs[1], 1) if len(outs) == 2 else None

    def step(w: Warp) -> None:
        result = compare(a(w), b(w))
        c = also(w) if also else None
        put(w, combine(result, c) if combine else result)
        if opposite:
            opposite(w, combine(~result, c) if combine else ~result)

    return step


@operation("set")
def _set(d: Decoder) -> Step:
    kind = d.kind()
    into = d.kind()
    if into.letter == "f" or into.bits != 32:
        raise d.unknown()
    compare = _compare(d, kind)
    combine = COMBINE.get(d.choice(*COMBINE))
    d.expect(4 if combine else 3)
    a, b = _operands(d, kind, 1, 2)
    put = d.put(0, 32)
    also = d.fetch(3, 1) if combine else None

    def step(w: Warp) -> None:
        result = compare(a(w), b(w))
        if also:
            result = combine(result, also(w))
        put(w, np.where(result, np.uint32(0xFFFFFFFF), np.uint32(0)))

    return step


@operation("selp")
def _selp(d: Decoder) -> Step:
    bits = d.kind().bits
    a, b, condition, put = d.fetch(1, bits), d.fetch(2, bits), d.fetch(3, 1), d.put(0, bits)
    return lambda w: put(w, np.where(condition(w), a(w), b(w)))


@operation("slct")
def _slct(d: Decoder) -> Step:
    sign, kind = d.kind(), d.kind()
    if sign != Kind("s", 32):
        raise d.unknown()
    a, b, c, put = (
        d.fetch(1, kind.bits),
        d.fetch(2, kind.bits),
        d.fetch(3, sign),
        d.put(0, kind.bits),
    )
    return lambda w: put(w, np.where(c(w) >= 0, a(w), b(w)))


def _target(d: Decoder, operand) -> int:
    if not isinstance(operand, Symbol):
        raise d.unknown()
    return operand.scope.label(operand.name)


@operation("bra", predicates_itself=True)
def _bra(d: Decoder) -> Step:
    d.flag("uni")
    d.expect(1)
    return _jump(d, _target(d, d.operands[0]))


@operation("ret", "exit", predicates_itself=True)
def _exit(d: Decoder) -> Step:
    d.flag("uni")
    d.expect(0)
    return _jump(d, DONE)


def _jump(d: Decoder, target: int) -> Step:
    if d.instruction.predicate is None:
        return lambda w: target
    predicate, pc = d.fetch(d.instruction.predicate, 1), d.pc

    def step(w: Warp) -> int | None:
        taken = predicate(w)
        if not w.full:
            taken = taken & w.active
        lanes = taken.tobytes()
        if lanes == ALL_FALSE:
            return None
        if lanes == ALL_TRUE or lanes.count(1) == w.count:
            return target
        return w.split(taken, target, pc)

    return step


@operation("trap", "brkpt")
def _trap(d: Decoder) -> Step:
    from .errors import PtxError

    def step(w: Warp) -> None:
        raise PtxError("the kernel trapped")

    return step


@operation("nanosleep", "griddepcontrol", "setmaxnreg", "prefetch", "prefetchu")
def _nothing(d: Decoder) -> Step:
    """Change timing only."""
    d.parts.clear()
    return lambda w: None
