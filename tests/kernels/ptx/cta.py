"""A CTA: warps, shared memory, barriers and the asynchronous copies that have not landed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .decode import LANES
from .errors import PtxError
from .memory import SHARED_BASE, Region
from .races import Order
from .warp import Warp

if TYPE_CHECKING:
    from .simulator import Simulator


class Barrier:
    """One of the 16 barriers of a CTA."""

    def __init__(self) -> None:
        """Expect nobody yet."""
        self.generation = 0
        self.arrived = 0  # threads
        self.expected: int | None = None  # threads; None: all warps that have not exited
        self.known: np.ndarray | None = None  # what the arrived warps release
        self.last: np.ndarray | None = None  # the same of the generation before


class Cta:
    """The state of a CTA."""

    def __init__(self, sim: Simulator, number: int, place: tuple[int, int, int]) -> None:
        """Start all warps; shared memory is garbage, so that a missing copy or wait shows."""
        self.sim = sim
        self.number = number
        self.place = place
        threads = sim.block[0] * sim.block[1] * sim.block[2]
        self.warp_count = -(-threads // LANES)
        garbage = np.random.default_rng([0x6A2B, sim.seed, number])  # unlike any test's data
        self.shared = Region(
            SHARED_BASE, garbage.integers(0, 256, sim.shared_bytes, np.uint8), "shared memory"
        )
        self.order = Order(number, self.warp_count, lanes=sim.check_lanes)
        if sim.check_races:
            self.shared.watch(shared=True)
        self.barriers: dict[int, Barrier] = {}
        self.mbarriers: dict = {}
        self.pending: list = []  # asynchronous copies that have not landed
        self.warps = [Warp(self, w, threads) for w in range(self.warp_count)]

    @property
    def finished(self) -> bool:
        """Whether all warps have exited and all copies have landed."""
        return not self.pending and all(warp.finished for warp in self.warps)

    def arrive(self, warp: Warp, number: int, threads: int | None) -> Barrier:
        """Let a warp arrive at a barrier, which may complete it."""
        if not 0 <= number < 16:
            raise PtxError(f"barrier {number}: there are 16")
        if threads is not None and (threads <= 0 or threads % LANES):
            raise PtxError(f"a barrier for {threads} threads: must be a multiple of the warp size")
        barrier = self.barriers.setdefault(number, Barrier())
        if barrier.arrived and barrier.expected != threads:
            raise PtxError(f"barrier {number} is for {barrier.expected} and for {threads} threads")
        barrier.expected = threads
        barrier.arrived += LANES
        barrier.known = self.order.release(warp.number, barrier.known)
        self._complete(barrier)
        return barrier

    def _complete(self, barrier: Barrier) -> None:
        expected = barrier.expected
        if expected is None:
            expected = LANES * sum(not warp.finished for warp in self.warps)
        if barrier.arrived > expected:
            raise PtxError(f"{barrier.arrived} threads arrived at a barrier for {expected}")
        if barrier.arrived == expected:
            barrier.generation += 1
            barrier.arrived = 0
            barrier.last, barrier.known = barrier.known, None

    def lanes_exited(self, warp: Warp) -> None:
        """Complete the barriers that waited only for a warp which has now exited."""
        for copy in warp.bulk_copies:
            if not warp.live >> copy.lane & 1 and not copy.has_read:
                raise PtxError(f"lane {copy.lane} exits while its bulk copy reads shared memory")
        if warp.finished:
            for barrier in self.barriers.values():
                if barrier.arrived and barrier.expected is None:
                    self._complete(barrier)

    def land(self, which: int) -> None:
        """Let one pending copy land."""
        self.pending.pop(which).land()
