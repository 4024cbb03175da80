"""Mbarriers: arrivals, expected bytes and waits for a phase."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import BLOCKED, LANES, YIELDED, Decoder, Step, operation
from .errors import PtxError
from .loads import SCOPES, SHARED, locator
from .parser import Address
from .warp import Warp

WORD = 8  # bytes of an mbarrier


class Mbarrier:
    """The state of one: it flips its phase when all have arrived and all bytes have."""

    def __init__(self, count: int) -> None:
        """Expect `count` arrivals in each phase."""
        if not 0 < count < 1 << 20:
            raise PtxError(f"mbarrier.init with a count of {count}")
        self.count = count
        self.pending = count
        self.bytes = 0
        self.phase = 0
        self.known: np.ndarray | None = None  # what arrivals of this phase release
        self.last: np.ndarray | None = None  # the same of all phases before

    def arrive(self, count: int, known: np.ndarray) -> None:
        """Count arrivals, and what they make known to those who wait."""
        if not 0 < count <= self.pending:
            raise PtxError(f"{count} arrive at an mbarrier that expects {self.pending} more")
        self.pending -= count
        self.learn(known)
        self.flip()

    def learn(self, known: np.ndarray) -> None:
        """Add to what those who wait will know."""
        self.known = known if self.known is None else np.maximum(self.known, known)

    def flip(self) -> None:
        """Complete the phase if nothing is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            known = self.known
            if known is not None:
                self.last = known if self.last is None else np.maximum(self.last, known)
            self.known = None


def find(w: Warp, address: int) -> Mbarrier:
    """Return the mbarrier at a shared address."""
    if address not in w.cta.mbarriers:
        raise PtxError(f"no mbarrier is initialised at shared address {address:#x}")
    return w.cta.mbarriers[address]


def _each_lane(
    d: Decoder, which: int, act: Callable[[Warp, int, int], None], *, initialising: bool = False
) -> Step:
    """Make the step that does something for each active lane and the mbarrier it names."""
    locate, address = locator("shared"), d.address(which)

    def step(w: Warp) -> None:
        lanes = w.lanes
        addresses = address(w)[lanes]
        ((region, offsets, _),) = locate(w, addresses, WORD)
        if region.shadow:
            # Using a barrier reads its word, so that an initialisation nobody waited for shows.
            index = offsets.astype(np.int64) // WORD
            if initialising:
                region.shadow.write(w, index, WORD, lanes, None)
            else:
                region.shadow.read(w, index, WORD, lanes)
        for lane, at in zip(lanes.tolist(), addresses.tolist(), strict=True):
            act(w, lane, at)

    return step


@operation("mbarrier")
def _mbarrier(d: Decoder) -> Step:
    what = d.choice("init", "inval", "arrive", "expect_tx", "complete_tx", "try_wait", "test_wait")
    d.choice("release", "acquire", "relaxed")
    d.choice(*SCOPES)
    d.choice(*SHARED, "shared::cluster")
    if not d.flag("b64"):
        raise d.unknown()
    makers = {"init": _init, "inval": _inval, "arrive": _arrive, "expect_tx": _expect}
    if what in ("try_wait", "test_wait"):
        return _test(d, blocks=what == "try_wait")
    if what not in makers:
        raise d.unknown()
    return makers[what](d)


def _init(d: Decoder) -> Step:
    d.expect(2)
    count = d.fetch(1, 32)

    def act(w: Warp, lane: int, at: int) -> None:
        w.cta.mbarriers[at] = Mbarrier(int(count(w)[lane]))

    return _each_lane(d, 0, act, initialising=True)


def _inval(d: Decoder) -> Step:
    d.expect(1)

    def act(w: Warp, lane: int, at: int) -> None:
        find(w, at)
        del w.cta.mbarriers[at]

    return _each_lane(d, 0, act, initialising=True)


def _expect(d: Decoder) -> Step:
    d.expect(2)
    size = d.fetch(1, 32)

    def act(w: Warp, lane: int, at: int) -> None:
        find(w, at).bytes += int(size(w)[lane])

    return _each_lane(d, 0, act)


def _arrive(d: Decoder) -> Step:
    expects = d.flag("expect_tx")
    which = 0 if isinstance(d.operands[0], Address) else 1
    d.expect(which + 1, which + 2)
    given = d.fetch(which + 1, 32) if len(d.operands) == which + 2 else None
    put = d.put(0, 64) if which else None
    if expects and given is None:
        raise d.unknown()

    def act(w: Warp, lane: int, at: int) -> None:
        barrier = find(w, at)
        number = 1 if given is None else int(given(w)[lane])
        if expects:
            barrier.bytes += number
            number = 1
        tokens[lane] = barrier.phase
        barrier.arrive(number, w.cta.order.release(w.number, None))

    tokens = np.zeros(LANES, np.uint64)
    each = _each_lane(d, which, act)

    def step(w: Warp) -> None:
        each(w)
        if put:
            put(w, tokens.copy())

    return step


def _test(d: Decoder, *, blocks: bool) -> Step:
    """Ask whether a phase is complete; ``try_wait`` sleeps until one lane's is."""
    parity = d.flag("parity")
    d.expect(3, 4)
    locate, address = locator("shared"), d.address(1)
    phase, put = d.fetch(2, 32 if parity else 64), d.put(0, 1)

    def step(w: Warp) -> int | None:
        lanes = w.lanes
        addresses = address(w)[lanes]
        phases = phase(w)[lanes]
        ((region, offsets, _),) = locate(w, addresses, WORD)
        answers: dict[tuple[int, int], bool] = {}
        known = []
        asked = list(zip(addresses.tolist(), phases.tolist(), strict=True))
        for at, number in set(asked):
            barrier = find(w, at)
            done = barrier.phase & 1 != number & 1 if parity else barrier.phase > number
            answers[at, number] = done
            if done and barrier.last is not None:
                known.append(barrier.last)
        if blocks and not any(answers.values()):
            return BLOCKED
        if region.shadow:
            region.shadow.read(w, offsets.astype(np.int64) // WORD, WORD, lanes)
        for each in known:
            w.cta.order.acquire(w.number, each)
        result = np.zeros(LANES, bool)
        result[lanes] = [answers[one] for one in asked]
        put(w, result)
        return None if blocks else YIELDED

    return step


@operation("mapa")
def _mapa(d: Decoder) -> Step:
    """Map a shared address to a CTA of the cluster; there is only this one."""
    if not d.flag("shared::cluster"):
        raise d.unknown()
    kind = d.kind()
    d.expect(3)
    a, rank, put = d.fetch(1, kind), d.fetch(2, 32), d.put(0, kind)

    def step(w: Warp) -> None:
        if rank(w)[w.active].any():
            raise NotImplementedError(str(d.instruction))
        put(w, a(w))

    return step
