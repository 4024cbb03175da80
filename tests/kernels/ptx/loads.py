"""Loads, stores and atomics, of global, shared, generic and parameter addresses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import LANES, SIGNED, UNSIGNED, YIELDED, Decoder, Kind, Step, columns, operation
from .errors import MemoryFault, Misaligned, Race, Unwritten
from .memory import SHARED_WINDOW, Located, Region, locate_shared
from .parser import Address, Symbol
from .warp import Warp

SHARED = ("shared", "shared::cta")
# Where and how long lines stay in caches, and whether neighbours are fetched.
CACHE = r"L[12](::\S+)?|ca|cg|cs|lu|wb|wt|(64|128|256)B|evict_\w+|no_allocate"
STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")

Locate = Callable[[Warp, np.ndarray, int], Located]


def locator(space: str | None) -> Locate:
    """Make the function that finds accesses of a state space, None for generic addresses.

    Each instruction has its own, which first tries the allocation it used last.
    """
    instruction = object()
    if space in SHARED:
        return lambda w, addresses, width: locate_shared(w.cta.shared, addresses, width)

    def in_global(w: Warp, addresses: np.ndarray, width: int) -> Located:
        if addresses.dtype != np.uint64:
            addresses = addresses.astype(np.uint64)
        return w.cta.sim.memory.locate(addresses, width, instruction)

    if space == "global":
        return in_global
    if space is not None:
        raise NotImplementedError(space)
    window = np.uint64(SHARED_WINDOW)

    def generic(w: Warp, addresses: np.ndarray, width: int) -> Located:
        shared = addresses - window < np.uint64(1 << 24)
        if not shared.any():
            return in_global(w, addresses, width)
        if shared.all():
            return locate_shared(w.cta.shared, addresses - window, width)
        parts = []
        for which, part in (
            (
                np.flatnonzero(shared),
                locate_shared(w.cta.shared, addresses[shared] - window, width),
            ),
            (np.flatnonzero(~shared), in_global(w, addresses[~shared], width)),
        ):
            parts += [(r, o, which if s is None else which[s]) for r, o, s in part]
        return tuple(parts)

    return generic


def gather(
    w: Warp, located: Located, bits: int, vector: int, lanes: np.ndarray, *, strong: bool = False
) -> np.ndarray:
    """Read one row of `vector` words of `bits` for each of `lanes`.

    Returns
    -------
    ndarray
        Shape ``(lanes,)``, or ``(lanes, vector)`` if there are several words in a row.
    """
    width = bits // 8 * vector
    out = None
    for region, offsets, which in located:
        index = region.place(offsets, width).astype(np.int64) // width
        rows = region.rows(bits, vector).take(index, axis=0)
        if region.shadow and not strong:
            mine = lanes if which is None else lanes[which]
            region.shadow.read(w, index, width, mine)
        if which is None:
            return rows
        if out is None:
            out = np.empty((lanes.size, *rows.shape[1:]), rows.dtype)
        out[which] = rows
    return out


def scatter(
    w: Warp, located: Located, values: np.ndarray, lanes: np.ndarray, *, strong: bool = False
) -> None:
    """Write one row of words for each of `lanes`; `values` has the shape that `gather` returns."""
    vector = values.shape[1] if values.ndim > 1 else 1
    bits = values.dtype.itemsize * 8
    width = bits // 8 * vector
    for region, offsets, which in located:
        if not region.writable:
            raise MemoryFault(f"a store to {region.name}, which is read-only")
        places = region.place(offsets)
        index = places.astype(np.int64) // width
        mine = values if which is None else values[which]
        rows = region.rows(bits, vector)
        if region.shadow and not strong:
            _note_write(
                w, region, rows, index, mine, width, lanes if which is None else lanes[which]
            )
        rows[index] = mine
        if not strong and (rows.take(index, axis=0) != mine).any():
            raise Race(
                f"lanes of one store write different values to the same bytes of {region.name}"
            )
        region.wrote(places, width)


def _note_write(
    w: Warp,
    region: Region,
    rows: np.ndarray,
    index: np.ndarray,
    values: np.ndarray,
    width: int,
    lanes: np.ndarray,
) -> None:
    """Tell the shadow of a write that is about to happen."""

    def same() -> np.ndarray:
        before = rows.take(index, axis=0).reshape(index.size, -1).view(np.uint8)
        return before == np.ascontiguousarray(values).reshape(index.size, -1).view(np.uint8)

    region.shadow.write(w, index, width, lanes, same)


def _strength(d: Decoder) -> bool:
    """Take memory-order modifiers: True if the access may meet others at the same time."""
    order = d.choice(*STRONG)
    d.flag("weak")
    if order and order != "volatile":
        d.choice(*SCOPES)
    return order is not None


def _vector(d: Decoder) -> int:
    return int((d.choice("v2", "v4") or "v1")[1:])


@operation("ld", "ldu")
def _load(d: Decoder) -> Step:
    space = d.choice("global", *SHARED, "param", "const", "local", "shared::cluster")
    if space == "param":
        return _load_param(d)
    nc = d.flag("nc")
    strong = _strength(d)
    policy = "L2::cache_hint" in d.parts
    d.discard(CACHE)
    vector, kind = _vector(d), d.kind()
    d.expect(3 if policy else 2)
    locate = locator("global" if space == "const" else space)
    address = d.address(1)
    items = d.items(0)
    if len(items) != vector:
        raise d.unknown()
    puts = [d.put(item, kind, widen=True) for item in items]
    width, bits = kind.bits // 8 * vector, kind.bits
    check = _check_constant if nc else None

    def step(w: Warp) -> int | None:
        addresses = address(w)
        if not w.full:
            addresses = addresses[w.lanes]
        located = locate(w, addresses, width)
        if check:
            check(w, located, width)
        rows = gather(w, located, bits, vector, w.lanes, strong=strong)
        if not w.full:
            every = np.zeros((LANES, *rows.shape[1:]), rows.dtype)
            every[w.lanes] = rows
            rows = every
        if vector == 1:
            puts[0](w, rows)
        else:
            for put, column in zip(puts, rows.T.copy(), strict=True):
                put(w, column)
        return YIELDED if strong else None

    return step


def _check_constant(w: Warp, located: Located, width: int) -> None:
    """Refuse ``ld.global.nc`` of bytes that this launch has written."""
    for region, offsets, _ in located:
        if region.shadow:
            places = region.place(offsets).astype(np.int64)
            if (
                region.shadow.written
                and region.shadow.rows(width)[0].take(places // width, axis=0).any()
            ):
                raise Race(f"ld.nc of {region.name} where the same launch has written")


def _load_param(d: Decoder) -> Step:
    vector, kind = _vector(d), d.kind()
    address = d.operands[1]
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise d.unknown()
    puts = [d.put(item, kind, widen=True) for item in d.items(0)]
    name, offset, width = address.base.name, address.offset, kind.bits // 8
    if len(puts) != vector:
        raise d.unknown()

    def step(w: Warp) -> None:
        data, known = w.cta.sim.params_data[name]
        if offset % (width * vector):
            raise Misaligned(f"parameter {name} at byte {offset}")
        for i, put in enumerate(puts):
            at = slice(offset + i * width, offset + (i + 1) * width)
            if known[at] != b"\1" * width:
                raise Unwritten(
                    f"bytes {at.start}..{at.stop - 1} of parameter {name} have no value"
                )
            value = np.frombuffer(bytes(data[at]), UNSIGNED[kind.bits])[0]
            put(w, np.full(LANES, value))

    return step


@operation("st")
def _store(d: Decoder) -> Step:
    space = d.choice("global", *SHARED, "local", "shared::cluster", "param")
    strong = _strength(d)
    policy = "L2::cache_hint" in d.parts
    d.discard(CACHE)
    vector, kind = _vector(d), d.kind()
    d.expect(3 if policy else 2)
    locate, address = locator(space), d.address(0)
    bits = kind.bits
    items = d.items(1)
    if len(items) != vector:
        raise d.unknown()
    values = [d.fetch(item, bits, narrow=True) for item in items]
    width = bits // 8 * vector
    one = values[0]

    def step(w: Warp) -> None:
        addresses = address(w)
        rows = one(w) if vector == 1 else columns(*[value(w) for value in values])
        if not w.full:
            addresses, rows = addresses[w.lanes], rows[w.lanes]
        scatter(w, locate(w, addresses, width), rows, w.lanes, strong=strong)

    return step


def _update(name: str, kind: Kind) -> Callable[[int, list[int]], int]:
    """Make the function from the old value, as Python int of the type, and operands to the new."""
    return {
        "add": lambda old, x: old + x[0],
        "min": lambda old, x: min(old, x[0]),
        "max": lambda old, x: max(old, x[0]),
        "and": lambda old, x: old & x[0],
        "or": lambda old, x: old | x[0],
        "xor": lambda old, x: old ^ x[0],
        "exch": lambda old, x: x[0],
        "cas": lambda old, x: x[1] if old == x[0] else old,
        "inc": lambda old, x: 0 if old >= x[0] else old + 1,
        "dec": lambda old, x: x[0] if old == 0 or old > x[0] else old - 1,
    }[name]


@operation("atom", "red")
def _atomic(d: Decoder) -> Step:
    """Update memory lane by lane, in an order that the schedule's chance decides."""
    space = d.choice("global", *SHARED, "shared::cluster")
    d.choice(*STRONG)
    d.choice(*SCOPES)
    policy = "L2::cache_hint" in d.parts
    d.discard(r"L2::\S+")
    name = d.choice("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    kind = d.kind()
    returns = d.name == "atom"
    count = 2 if name == "cas" else 1
    if name is None or kind.letter == "f" or (name in ("inc", "dec") and kind != Kind("u", 32)):
        raise d.unknown()
    if policy:
        d.operands.pop()
    d.expect(returns + 1 + count)
    locate, address = locator(space), d.address(int(returns))
    values = [d.fetch(int(returns) + 1 + i, kind) for i in range(count)]
    put = d.put(0, kind) if returns else None
    update, bits = _update(name, kind), kind.bits
    dtype, wrap = (SIGNED if kind.signed else UNSIGNED)[bits], (1 << bits) - 1

    def step(w: Warp) -> int:
        lanes = w.lanes
        located = locate(w, address(w)[lanes], bits // 8)
        given = [value(w)[lanes].tolist() for value in values]
        old = np.zeros(LANES, dtype)
        for region, offsets, which in located:
            if not region.writable:
                raise MemoryFault(f"an atomic on {region.name}, which is read-only")
            places = region.place(offsets, bits // 8).astype(np.int64)
            words = region.rows(bits, 1)
            turns = list(range(places.size))
            w.cta.sim.rng.shuffle(turns)
            for turn in turns:
                lane = turn if which is None else int(which[turn])
                word = int(places[turn]) * 8 // bits
                before = words.view(dtype)[word]
                old[lanes[lane]] = before
                new = update(int(before), [column[lane] for column in given])
                words[word] = new & wrap
            region.wrote(places, bits // 8)
        if put:
            put(w, old)
        return YIELDED

    return step
