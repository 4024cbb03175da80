"""Instructions that a warp's lanes carry out together: shuffles, votes, reductions, elections.

Each names its participants by a mask.  Those that have not exited wait for one another, also when
they come on different ways.  A lane that is not in its own mask is an error, and so is reading a
lane that is absent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import ALL, BLOCKED, LANES, Decoder, Fetch, Kind, Put, Step, operation
from .errors import PtxError
from .parser import Immediate
from .warp import LANE, Warp, bits_of

Groups = Callable[[Warp], "list[tuple[int, np.ndarray]] | None"]


def participants(d: Decoder, which: int) -> Groups:
    """Make the function that splits the active lanes by the mask they name.

    It returns None while a participant is missing that has not exited, otherwise the participants
    of each mask, as bits and as truth values: usually one such pair.
    """
    fetch = d.fetch(which, 32)
    operand = d.operands[which]
    everyone = isinstance(operand, Immediate) and operand.value & ALL == ALL
    whole = [(ALL, np.ones(LANES, bool))]

    def groups(w: Warp) -> list[tuple[int, np.ndarray]] | None:
        if everyone and w.full:
            return whole
        masks = fetch(w)
        found = []
        for mask in np.unique(masks[w.active]).tolist():
            lanes = w.active & (masks == mask)
            present = bits_of(lanes)
            if present & ~mask:
                raise PtxError(f"lanes {present:#010x} take part with the mask {mask:#010x}")
            if present != mask & w.live:
                return None
            found.append((present, lanes))
        return found

    return groups


@operation("shfl")
def _shfl(d: Decoder) -> Step:
    """Read a register of another lane of the same segment.

    The lane is in bounds if it lies in the segment that the mask in bits 12..8 of `c` cuts out and
    does not pass the clamp in bits 4..0; otherwise a lane reads its own value and the predicate
    is false.
    """
    if not d.flag("sync") or d.kind() != Kind("b", 32):
        raise d.unknown()
    mode = d.choice("up", "down", "bfly", "idx")
    d.expect(5)
    out = d.items(0)
    put = d.put(out[0], 32)
    ok = d.put(out[1], 1) if len(out) == 2 else None
    a, b, c, groups = d.fetch(1, 32), d.fetch(2, 32), d.fetch(3, 32), participants(d, 4)
    fixed = isinstance(d.operands[2], Immediate) and isinstance(d.operands[3], Immediate)
    known: list[tuple[np.ndarray, np.ndarray]] = []

    def sources(w: Warp) -> tuple[np.ndarray, np.ndarray]:
        lane = LANE.astype(np.int64)
        by, control = b(w).astype(np.int64) & 31, c(w).astype(np.int64)
        clamp, segment = control & 31, control >> 8 & 31
        highest = (lane & segment) | (clamp & ~segment)
        lowest = lane & segment
        if mode == "up":
            source = lane - by
            inside = source >= highest
        elif mode == "down":
            source = lane + by
            inside = source <= highest
        elif mode == "bfly":
            source = lane ^ by
            inside = source <= highest
        else:
            source = lowest | (by & ~segment)
            inside = source <= highest
        return np.where(inside, source, lane), inside

    def step(w: Warp) -> int | None:
        together = groups(w)
        if together is None:
            return BLOCKED
        if fixed:
            if not known:
                known.append(sources(w))
            source, inside = known[0]
        else:
            source, inside = sources(w)
        if not w.full:
            for _, lanes in together:
                absent = lanes & ~lanes[source]
                if absent.any():
                    lane = int(np.flatnonzero(absent)[0])
                    raise PtxError(f"lane {lane} reads from lane {source[lane]}, which is absent")
        put(w, a(w).take(source))
        if ok:
            ok(w, inside)
        return None

    return step


def _reduction(values: Fetch, groups: Groups, put: Put, dtype: type, function: Callable) -> Step:
    """Give all participants one function of their values."""

    def step(w: Warp) -> int | None:
        together = groups(w)
        if together is None:
            return BLOCKED
        given = values(w)
        if len(together) == 1 and w.full:
            put(w, np.full(LANES, function(given), dtype))
            return None
        result = np.zeros(LANES, dtype)
        for _, lanes in together:
            result[lanes] = function(given[lanes])
        put(w, result)
        return None

    return step


@operation("vote")
def _vote(d: Decoder) -> Step:
    if not d.flag("sync"):
        raise d.unknown()
    mode, kind = d.choice("all", "any", "uni", "ballot"), d.kind()
    if mode is None:
        raise d.unknown()
    d.expect(3)
    values, groups = d.fetch(1, 1), participants(d, 2)
    if mode != "ballot":
        function = {
            "all": np.all,
            "any": np.any,
            "uni": lambda x: x.all() or not x.any(),
        }[mode]
        return _reduction(values, groups, d.put(0, 1), bool, function)
    if kind != Kind("b", 32):
        raise d.unknown()
    put = d.put(0, 32)

    def ballot(w: Warp) -> int | None:
        together = groups(w)
        if together is None:
            return BLOCKED
        given = values(w)
        result = np.zeros(LANES, np.uint32)
        for _, lanes in together:
            result[lanes] = bits_of(given & lanes)
        put(w, result)
        return None

    return ballot


@operation("redux")
def _redux(d: Decoder) -> Step:
    if not d.flag("sync"):
        raise d.unknown()
    name = d.choice("add", "min", "max", "and", "or", "xor")
    kind = d.kind()
    logic = name in ("and", "or", "xor")
    if name is None or kind.bits != 32 or kind.letter not in ("b" if logic else "us"):
        raise d.unknown()
    d.expect(3)
    function = {
        "add": lambda x: np.add.reduce(x, dtype=x.dtype),
        "min": np.min,
        "max": np.max,
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }[name]
    return _reduction(d.fetch(1, kind), participants(d, 2), d.put(0, kind), kind.dtype, function)


@operation("match")
def _match(d: Decoder) -> Step:
    if not d.flag("sync"):
        raise d.unknown()
    everyone = d.choice("any", "all") == "all"
    bits = d.kind().bits
    d.expect(3)
    values, groups = d.fetch(1, bits), participants(d, 2)
    out = d.items(0)
    put = d.put(out[0], 32)
    ok = d.put(out[1], 1) if len(out) == 2 else None

    def step(w: Warp) -> int | None:
        together = groups(w)
        if together is None:
            return BLOCKED
        result = np.zeros(LANES, np.uint32)
        given = values(w)
        for mask, lanes in together:
            for value in np.unique(given[lanes]):
                equal = lanes & (given == value)
                found = bits_of(equal)
                result[equal] = found if not everyone or found == mask else 0
        put(w, result)
        if ok:
            ok(w, result != 0)
        return None

    return step


@operation("elect")
def _elect(d: Decoder) -> Step:
    """Elect the lowest participant, as SM90 does."""
    if not d.flag("sync"):
        raise d.unknown()
    d.expect(2)
    groups = participants(d, 1)
    out = d.items(0)
    put, leads = d.put(out[0], 32), d.put(out[1], 1)

    def step(w: Warp) -> int | None:
        together = groups(w)
        if together is None:
            return BLOCKED
        leader = np.zeros(LANES, np.uint32)
        for mask, lanes in together:
            leader[lanes] = (mask & -mask).bit_length() - 1
        put(w, leader)
        leads(w, leader == LANE)
        return None

    return step


@operation("activemask")
def _activemask(d: Decoder) -> Step:
    put = d.put(0, d.kind())
    return lambda w: put(w, np.full(LANES, w.mask, np.uint32))
