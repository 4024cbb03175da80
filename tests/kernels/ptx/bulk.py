"""Bulk copies: into shared memory with an mbarrier, out of it in groups of the lane.

Like other asynchronous copies they land at a random time.  Until the mbarrier's phase is seen to be
complete, or the group has been waited for, source and destination count as in use.
"""

from __future__ import annotations

import numpy as np

from .decode import Decoder, Step
from .errors import Misaligned, PtxError
from .loads import Locate, locator
from .mbarriers import Mbarrier, find
from .memory import Region
from .parser import Immediate
from .races import IN_FLIGHT, STAMP_SHIFT
from .warp import Warp

UNIT = 16  # bulk copies move multiples of this many bytes, between addresses that are multiples


class BulkLoad:
    """One ``cp.async.bulk`` from global to shared memory."""

    def __init__(
        self, w: Warp, source: tuple[Region, int], place: int, size: int, barrier: Mbarrier
    ) -> None:
        """Leave it to land."""
        self.warp, self.source, self.place, self.size = w, source, place, size
        self.barrier = barrier

    def land(self) -> None:
        """Copy, and complete the bytes on the mbarrier."""
        cta = self.warp.cta
        copy_bytes(*self.source, cta.shared, self.place, self.size)
        if cta.shared.shadow:
            mark = cta.order.engine()
            cta.shared.shadow.settle(_units(self.place, self.size), UNIT, mark)
        known = np.zeros_like(cta.order.seen[0])
        known[-1] = cta.order.now
        self.barrier.learn(known)
        self.barrier.bytes -= self.size
        self.barrier.flip()


def _units(place: int, size: int) -> np.ndarray:
    return np.arange(place // UNIT, (place + size) // UNIT)


def copy_bytes(source: Region, start: int, target: Region, to: int, size: int) -> None:
    """Copy between regions, by units of 16 bytes."""
    steps = np.arange(0, size, UNIT, dtype=np.uint64)
    index = source.place(np.uint64(start) + steps, UNIT).astype(np.int64) // UNIT
    rows = source.rows(64, 2).take(index, axis=0)
    places = target.place(np.uint64(to) + steps)
    target.rows(64, 2)[places.astype(np.int64) // UNIT] = rows
    target.wrote(places, UNIT)


def _check_bulk(addresses: tuple[int, int], size: int) -> None:
    if size <= 0 or size % UNIT or any(address % UNIT for address in addresses):
        listed = ", ".join(hex(address) for address in addresses)
        raise Misaligned(f"a bulk copy of {size} bytes between {listed}: multiples of {UNIT} only")


def _one(w: Warp, locate: Locate, address: int, size: int) -> tuple[Region, int]:
    """Locate a range of bytes, both ends of which must lie in the same allocation."""
    ends = np.array([address, address + size - UNIT], np.uint64)
    located = locate(w, ends, UNIT)
    if len(located) != 1:
        raise PtxError(f"a bulk copy of {size} bytes at {address:#x} spans allocations")
    region, offsets, _ = located[0]
    return region, int(offsets[0])


def _note_read(w: Warp, region: Region, start: int, size: int, lane: int) -> np.ndarray:
    """Check and remember the reads of a range; returns its rows."""
    steps = np.arange(0, size, UNIT, dtype=np.uint64)
    index = region.place(np.uint64(start) + steps, UNIT).astype(np.int64) // UNIT
    if region.shadow:
        region.shadow.read(w, index, UNIT, np.full(index.size, lane))
    return index


def bulk_load(d: Decoder) -> Step:
    """Make the step of ``cp.async.bulk.shared::cluster.global.mbarrier``."""
    if not (d.flag("mbarrier::complete_tx::bytes") and d.flag("global")):
        raise d.unknown()
    policy = d.flag("L2::cache_hint")
    d.expect(5 if policy else 4)
    to, source, size, bar = d.address(0), d.address(1), d.fetch(2, 32), d.address(3)
    in_shared, in_global = locator("shared"), locator("global")

    def step(w: Warp) -> None:
        for lane in w.lanes.tolist():
            count, target = int(size(w)[lane]), int(to(w)[lane])
            origin = int(source(w)[lane])
            _check_bulk((target, origin), count)
            shared, place = _one(w, in_shared, target, count)
            region, start = _one(w, in_global, origin, count)
            _note_read(w, region, start, count, lane)
            if shared.shadow:
                rows = _units(place, count)
                lanes = np.full(rows.size, lane)
                shared.shadow.write(w, rows, UNIT, lanes, None, IN_FLIGHT)
            barrier = find(w, int(bar(w)[lane]))
            w.cta.pending.append(BulkLoad(w, (region, start), place, count, barrier))

    return step


class BulkStore:
    """One ``cp.async.bulk`` from shared to global memory, in the group of one lane."""

    def __init__(self, w: Warp, lane: int, shared: tuple[Region, int], to: tuple[Region, int]):
        """Leave it to land."""
        self.warp, self.lane, self.shared, self.to = w, lane, shared, to
        self.group = int(w.bulk_commits[lane])
        self.landed = False
        self.has_read = False  # and the lane knows it
        self.rows: list[tuple[bool, Region, np.ndarray]] = []  # what the waits settle
        self.size = 0

    def land(self) -> None:
        """Copy."""
        copy_bytes(*self.shared, *self.to, self.size)
        self.landed = True

    def wait(self, *, reading: bool) -> None:
        """Let the lane reuse the source, and unless `reading` see the result."""
        cta = self.warp.cta
        if not self.landed:
            self.land()
            cta.pending.remove(self)
        self.has_read = True
        mark = cta.order.mark(self.warp.number) + self.lane
        for written, region, index in self.rows:
            if region.shadow and not written:
                region.shadow.settle_reads(index, UNIT, mark)
            elif region.shadow and not reading:
                region.shadow.settle(index, UNIT, mark)


def bulk_store(d: Decoder) -> Step:
    """Make the step of ``cp.async.bulk.global.shared::cta.bulk_group``."""
    if not (d.flag("shared::cta") and d.flag("bulk_group")):
        raise d.unknown()
    policy = d.flag("L2::cache_hint")
    d.expect(4 if policy else 3)
    to, source, size = d.address(0), d.address(1), d.fetch(2, 32)
    in_shared, in_global = locator("shared"), locator("global")

    def step(w: Warp) -> None:
        for lane in w.lanes.tolist():
            count, target = int(size(w)[lane]), int(to(w)[lane])
            origin = int(source(w)[lane])
            _check_bulk((target, origin), count)
            shared, place = _one(w, in_shared, origin, count)
            region, start = _one(w, in_global, target, count)
            if not region.writable:
                raise PtxError(f"a bulk copy to {region.name}, which is read-only")
            copy = BulkStore(w, lane, (shared, place), (region, start))
            copy.size = count
            rows = _note_read(w, shared, place, count, lane)
            if shared.shadow:
                mark = w.cta.order.mark(w.number) + lane | IN_FLIGHT << STAMP_SHIFT
                shared.shadow.settle_reads(rows, UNIT, mark)
            copy.rows.append((False, shared, rows))
            steps = np.arange(0, count, UNIT, dtype=np.uint64)
            placed = region.place(np.uint64(start) + steps).astype(np.int64) // UNIT
            if region.shadow:
                lanes = np.full(placed.size, lane)
                region.shadow.write(w, placed, UNIT, lanes, None, IN_FLIGHT)
            copy.rows.append((True, region, placed))
            w.bulk_copies.append(copy)
            w.cta.pending.append(copy)

    return step


def bulk_commit(w: Warp) -> None:
    """Close the group of bulk copies of each active lane."""
    w.bulk_commits = w.bulk_commits + w.active


def bulk_wait(d: Decoder) -> Step:
    """Make the step of ``cp.async.bulk.wait_group``."""
    reading = d.flag("read")
    d.expect(1)
    keep = d.operands[0]
    if not isinstance(keep, Immediate):
        raise d.unknown()

    def step(w: Warp) -> None:
        left = []
        for copy in w.bulk_copies:
            done = w.bulk_commits[copy.lane] - keep.value
            if w.active[copy.lane] and copy.group < done:
                copy.wait(reading=reading)
                if not reading:
                    continue
            left.append(copy)
        w.bulk_copies = left

    return step
