"""Barriers of warps and CTAs, fences and mbarriers."""

from __future__ import annotations

from .collective import participants
from .decode import BLOCKED, Decoder, Step, operation
from .warp import Warp


@operation("bar", "barrier")
def _barrier(d: Decoder) -> Step:
    if d.flag("warp"):
        return _warp_barrier(d)
    d.flag("cta")
    d.flag("aligned")
    mode = d.choice("sync", "arrive")
    d.expect(1, 2)
    if mode is None or (mode == "arrive" and len(d.operands) != 2):
        raise d.unknown()
    number = d.uniform(0)
    threads = d.uniform(1) if len(d.operands) == 2 else None

    def step(w: Warp) -> int | None:
        if w.waiting is None:
            if w.mask != w.live:
                # The lanes of a warp meet here; where they may not, they wait forever.
                return BLOCKED
            barrier = w.cta.arrive(w, number(w), threads(w) if threads else None)
            if mode == "arrive":
                return None
            w.waiting = barrier, barrier.generation - (not barrier.arrived)
        barrier, generation = w.waiting
        if barrier.generation == generation:
            return BLOCKED
        w.waiting = None
        w.cta.order.acquire(w.number, barrier.last)
        return None

    return step


def _warp_barrier(d: Decoder) -> Step:
    if not d.flag("sync"):
        raise d.unknown()
    d.expect(1)
    groups = participants(d, 0)

    def step(w: Warp) -> int | None:
        if groups(w) is None:
            return BLOCKED
        w.cta.order.lanes_met(w.number)
        return None

    return step


@operation("membar", "fence")
def _fence(d: Decoder) -> Step:
    """Order nothing that the simulator does not already order: it runs one access at a time."""
    d.parts.clear()
    return lambda w: None
