"""``cp.async``: copies that land late, and the commits and waits of each lane.

A copy lands at a random time, at the latest when its lane waits for it.  Until the lane has waited,
the destination counts as being written: whoever touches it raises `Race`, and with the race check
off a read gives what was there before, if the copy has not landed.
"""

from __future__ import annotations

import numpy as np

from .bulk import bulk_commit, bulk_load, bulk_store, bulk_wait
from .decode import LANES, Decoder, Step, operation
from .errors import Misaligned
from .loads import Locate, locator
from .memory import Located, Region
from .parser import Immediate, Negated, Register
from .races import IN_FLIGHT
from .warp import Warp


class Copy:
    """What one ``cp.async`` copies: up to 16 bytes for each of its lanes."""

    def __init__(self, w: Warp, size: int, places: np.ndarray, lanes: np.ndarray) -> None:
        """Have no source yet: zeros, which is what bytes past the source's size become."""
        self.warp = w
        self.size = size
        self.index = places.astype(np.int64) // size  # rows of shared memory
        self.lanes = lanes
        self.group = w.commits[lanes].copy()  # the number of the commit that will close it
        self.landed = np.zeros(lanes.size, bool)
        self.waited = np.zeros(lanes.size, bool)
        self.sources: list[tuple[Region, np.ndarray, np.ndarray, int]] = []

    def read_from(self, located: Located, rows: np.ndarray, size: int) -> None:
        """Take `size` bytes for each of `rows`, at the time of landing."""
        for region, offsets, which in located:
            chosen = rows if which is None else rows[which]
            self.sources.append((region, offsets, chosen, size))

    def land(self, rows: np.ndarray | None = None) -> None:
        """Copy, for some rows or all, what has not landed."""
        now = ~self.landed if rows is None else rows & ~self.landed
        data = np.zeros((self.lanes.size, self.size), np.uint8)
        for region, offsets, chosen, size in self.sources:
            places = region.place(offsets, size).astype(np.int64)
            data[chosen, :size] = region.data[places[:, None] + np.arange(size)]
        shared = self.warp.cta.shared.data.reshape(-1)
        target = self.index[now, None] * self.size + np.arange(self.size)
        shared[target] = data[now]
        self.landed |= now

    def wait(self, rows: np.ndarray) -> None:
        """Let the lanes of some rows see their copies."""
        cta = self.warp.cta
        rows = rows & ~self.waited
        if not rows.any():
            return
        self.land(rows)
        if self.landed.all() and self in cta.pending:
            cta.pending.remove(self)
        if cta.shared.shadow:
            marks = cta.order.mark(self.warp.number) + self.lanes[rows]
            cta.shared.shadow.settle(self.index[rows], self.size, marks[:, None])
        self.waited |= rows


@operation("cp")
def _cp(d: Decoder) -> Step:
    if not d.flag("async"):
        raise d.unknown()
    if d.flag("bulk"):
        return _bulk(d)
    if d.flag("commit_group"):
        d.expect(0)
        return _commit
    if d.flag("wait_all"):
        d.expect(0)
        return lambda w: _wait(w, None)
    if d.flag("wait_group"):
        d.expect(1)
        keep = d.operands[0]
        if not isinstance(keep, Immediate):
            raise d.unknown()
        return lambda w: _wait(w, keep.value)
    return _copy(d)


def _bulk(d: Decoder) -> Step:
    if d.flag("commit_group"):
        d.expect(0)
        return bulk_commit
    if d.flag("wait_group"):
        return bulk_wait(d)
    into = d.choice("shared::cluster", "shared::cta", "global")
    return bulk_store(d) if into == "global" else bulk_load(d)


def _commit(w: Warp) -> None:
    w.commits = w.commits + w.active


def _wait(w: Warp, keep: int | None) -> None:
    for copy in w.copies:
        rows = w.active[copy.lanes]
        if keep is not None:
            rows = rows & (copy.group < w.commits[copy.lanes] - keep)
        copy.wait(rows)
    w.copies = [copy for copy in w.copies if not copy.waited.all()]


def _copy(d: Decoder) -> Step:
    if d.choice("ca", "cg") is None or not (d.choice("shared", "shared::cta") and d.flag("global")):
        raise d.unknown()
    if "L2::cache_hint" in d.parts:
        d.operands.pop()
    d.discard(r"L2::\S+")
    d.expect(3, 4)
    whole = d.operands[2]
    if not isinstance(whole, Immediate) or whole.value not in (4, 8, 16):
        raise d.unknown()
    size = whole.value
    to, source = d.address(0), d.address(1)
    in_shared, in_global = locator("shared"), locator("global")
    sizes, ignore = None, None
    if len(d.operands) == 4:
        last = d.operands[3]
        if isinstance(last, Negated) or (isinstance(last, Register) and last.bits == 1):
            ignore = d.fetch(3, 1)
        else:
            sizes = d.fetch(3, 32)

    def step(w: Warp) -> None:
        lanes = w.lanes
        given = np.full(LANES, size) if sizes is None else sizes(w).astype(np.int64)
        if ignore:
            given = np.where(ignore(w), 0, given)
        given = given[lanes]
        ((shared, places, _),) = in_shared(w, to(w)[lanes], size)
        copy = Copy(w, size, places, lanes)
        addresses = source(w)[lanes]
        for length in np.unique(given).tolist():
            if length > size:
                raise Misaligned(f"cp.async of {length} bytes into {size}")
            if length == 0:
                continue
            rows = np.flatnonzero(given == length)
            # Lengths of a power of two are checked as one access, others by both ends.
            if length & length - 1 or (addresses[rows] & np.uint64(size - 1)).any():
                _check_each(addresses[rows], size)
                located = _bytes(w, in_global, addresses[rows], length)
            else:
                located = in_global(w, addresses[rows], length)
                for region, offsets, which in located:
                    if region.shadow:
                        at = region.place(offsets, length).astype(np.int64) // length
                        mine = lanes[rows] if which is None else lanes[rows][which]
                        region.shadow.read(w, at, length, mine)
            copy.read_from(located, rows, length)
        if shared.shadow:
            shared.shadow.write(w, copy.index, size, lanes, None, IN_FLIGHT)
        w.copies.append(copy)
        w.cta.pending.append(copy)

    return step


def _check_each(addresses: np.ndarray, size: int) -> None:
    wrong = addresses & np.uint64(size - 1) != 0
    if wrong.any():
        raise Misaligned(f"address {int(addresses[wrong][0]):#x} of a cp.async of {size} bytes")


def _bytes(w: Warp, in_global: Locate, addresses: np.ndarray, length: int) -> Located:
    """Check that both ends of odd lengths are mapped, and locate their first byte."""
    in_global(w, addresses + np.uint64(length - 1), 1)
    return in_global(w, addresses, 1)
