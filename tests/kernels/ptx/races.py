"""Which access is ordered before which, and a shadow of memory that remembers the last ones.

The model.  Every CTA counts synchronisations; an access carries the count at its time as a stamp.
`Order` keeps for each pair of warps the newest stamp of the one that is ordered before the other:
barriers raise it for their participants, an mbarrier hands it from those that arrive to those that
wait, and ``bar.warp.sync`` raises it between the lanes of a warp.  Two accesses to a byte, one of
them a write, must be ordered.  Nothing orders two CTAs of a launch.

Limits   Atomics, volatile, relaxed, acquire and release accesses are neither checked nor do they
         order anything.  A release by one lane counts for its whole warp.  Of several readers of a
         byte the shadow knows the warps and their stamps, but the lane of the last alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import Race

if TYPE_CHECKING:
    from .warp import Warp

# An access in 63 bits: CTA + 1 (21), stamp (31), warp (6), lane (5).  0: there was none.
LANE_BITS, STAMP_SHIFT, CTA_SHIFT = 5, 11, 42
ENGINE = 32  # the "warp" that bulk copies run in
WHO = (1 << STAMP_SHIFT) - 1
IN_FLIGHT = (1 << CTA_SHIFT - STAMP_SHIFT) - 1  # the stamp of a copy that nobody has waited for
MANY_CTAS = ((1 << 21) - 1) << CTA_SHIFT


LONGEST_LOG = 200_000


class Order:
    """What the warps of a CTA know of one another's accesses."""

    def __init__(self, cta: int, warps: int, *, lanes: bool) -> None:
        """Start where nothing is ordered; without `lanes`, a warp's own accesses always are."""
        self.tag = cta + 1 << CTA_SHIFT
        self.now = 1
        self.seen = np.zeros((warps, ENGINE + 1), np.int64)
        if not lanes:
            np.fill_diagonal(self.seen, IN_FLIGHT - 1)
        self.lanes = lanes
        self.warps = warps
        self.bulk = False  # whether there have been bulk copies
        self.floors = [self.tag] * warps  # accesses up to here are ordered before the warp's next
        for warp in range(warps):
            self._refresh(warp)

    def _refresh(self, warp: int) -> None:
        oldest = int(self.seen[warp, : self.warps].min())
        if self.bulk:
            oldest = min(oldest, int(self.seen[warp, ENGINE]))
        self.floors[warp] = self.tag | oldest << STAMP_SHIFT | WHO

    def engine(self) -> int:
        """Return the record of an access by the engine of bulk copies, apart from all others."""
        self.now += 1
        if not self.bulk:
            self.bulk = True
            for warp in range(self.warps):
                self._refresh(warp)
        return self.mark(ENGINE)

    def mark(self, warp: int) -> int:
        """Return the record of an access by lane 0 of a warp now."""
        return self.tag | self.now << STAMP_SHIFT | warp << LANE_BITS

    def _own(self, known: np.ndarray, warp: int) -> None:
        if self.lanes:
            known[warp] = self.now

    def lanes_met(self, warp: int) -> None:
        """Order the past of a warp's lanes before their future: ``bar.warp.sync``."""
        self._own(self.seen[warp], warp)
        self.now += 1
        self._refresh(warp)

    def release(self, warp: int, into: np.ndarray | None) -> np.ndarray:
        """Return what a warp that arrives makes known, joined with what others did before."""
        known = self.seen[warp].copy()
        known[warp] = self.now
        self.now += 1
        return known if into is None else np.maximum(into, known)

    def acquire(self, warp: int, known: np.ndarray) -> None:
        """Order what `release` returned before the warp's future."""
        own = self.seen[warp, warp]
        np.maximum(self.seen[warp], known, out=self.seen[warp])
        if not self.lanes:
            self.seen[warp, warp] = own
        self._refresh(warp)


class Shadow:
    """The last accesses to each part of an allocation in this launch.

    A part is as long as the shortest access so far, so that kernels which never touch single bytes
    pay for no byte-wise bookkeeping.
    """

    def __init__(self, size: int, describe: Callable[[int], str], *, shared: bool) -> None:
        """Remember nothing yet; `describe` names a byte in errors."""
        self.grain = 16
        parts = -(-size // 16)
        self.writer = np.zeros(parts, np.int64)
        self.reader = np.zeros(parts, np.int64)
        self.readers = np.zeros(parts, np.uint32)
        self.stamps: dict[int, np.ndarray] = {}  # of the last read by each warp
        self.describe = describe
        self.shared = shared
        self.written = shared  # whether anybody may have written
        self.log: list[tuple] = []  # reads before that, not yet entered
        self._rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def _replace(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self.writer, self.reader = change(self.writer), change(self.reader)
        self.readers = change(self.readers)
        self.stamps = {warp: change(stamps) for warp, stamps in self.stamps.items()}
        self._rows.clear()

    def grow(self, size: int) -> None:
        """Follow a sparse allocation that backs more pages."""
        parts = -(-size // 16) * 16 // self.grain
        self._replace(lambda old: np.concatenate([old, np.zeros(parts - old.size, old.dtype)]))

    def rows(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return writers, readers and reading warps of parts, `width` bytes a row."""
        if width < self.grain:
            factor = self.grain // width
            self.grain = width
            self._replace(lambda old: old.repeat(factor))
        if width not in self._rows:
            parts = width // self.grain
            self._rows[width] = tuple(
                array.reshape(-1, parts) for array in (self.writer, self.reader, self.readers)
            )
        return self._rows[width]

    def stamps_of(self, warp: int, width: int) -> np.ndarray:
        """Return the stamps of a warp's last reads, `width` bytes a row."""
        if warp not in self.stamps:
            self.stamps[warp] = np.zeros(self.reader.size, np.int64)
        return self.stamps[warp].reshape(-1, width // self.grain)

    def lanes(self, lanes: np.ndarray) -> np.ndarray:
        """Return lanes as one column; where each byte of a row has its own, as those of parts."""
        return lanes[:, None] if lanes.ndim == 1 else lanes[:, :: self.grain]

    def read(self, w: Warp, index: np.ndarray, width: int, lanes: np.ndarray) -> None:
        """Check and remember reads of rows of `width` bytes, one by each of `lanes`."""
        order, warp = w.cta.order, w.number
        if not self.written and len(self.log) < LONGEST_LOG:
            self.log.append(
                (order, order.mark(warp), warp, order.floors[warp], index, width, lanes)
            )
            return
        written = self.rows(width)[0].take(index, axis=0)
        if int(written.max()) > order.floors[warp] if self.shared else written.any():
            bad = self._open(w, written, lanes)
            self._refuse(w, "reads", "was written", written, index, lanes, bad)
        self._enter(order, order.mark(warp), warp, order.floors[warp], index, width, lanes)

    def _enter(self, order, mark, warp, floor, index, width, lanes) -> None:
        """Remember a read."""
        _, reader, readers = self.rows(width)
        last = reader.take(index, axis=0)
        mine = self.lanes(lanes) + mark
        bit = np.uint32(1 << warp)
        if self.shared and int(last.max()) <= floor:
            readers[index] = bit
        else:
            readers[index] = np.where(last > floor, readers.take(index, axis=0), 0) | bit
            if not self.shared:
                others = (last != 0) & (last >> CTA_SHIFT != order.tag >> CTA_SHIFT)
                mine = np.where(others, MANY_CTAS, mine)
        reader[index] = mine
        self.stamps_of(warp, width)[index] = mark >> STAMP_SHIFT & IN_FLIGHT

    def enter_log(self) -> None:
        """Enter the reads of an allocation that is about to be written."""
        for entry in self.log:
            self._enter(*entry)
        self.log.clear()
        self.written = True

    def write(
        self,
        w: Warp,
        index: np.ndarray,
        width: int,
        lanes: np.ndarray,
        same: Callable[[], np.ndarray] | None,
        stamp: int | None = None,
    ) -> None:
        """Check and remember writes of rows of `width` bytes, one by each of `lanes`.

        `same` says which bytes keep their value, row by row: two CTAs, or two lanes of a warp, may
        write the same.  `stamp` is `IN_FLIGHT` for the destination of an asynchronous copy.
        """
        order, warp = w.cta.order, w.number
        floor = order.floors[warp]
        if not self.written:
            self.enter_log()
        writer, reader, readers = self.rows(width)
        written, read = writer.take(index, axis=0), reader.take(index, axis=0)
        if max(int(written.max()), int(read.max())) > (floor if self.shared else 0):
            bad = self._open(w, written, lanes)
            if bad.any() and same is not None:
                mine = (written >> CTA_SHIFT == order.tag >> CTA_SHIFT) & (
                    written >> LANE_BITS & 63 != warp
                )
                bad &= mine | ~same().reshape(*bad.shape, self.grain).all(axis=2)
            self._refuse(w, "writes", "was written", written, index, lanes, bad)
            bad = self._open(w, read, lanes)
            bad |= self._readers_open(w, index, width, readers.take(index, axis=0))
            self._refuse(w, "writes", "was read", read, index, lanes, bad)
        mine = self.lanes(lanes) + order.mark(warp)
        if stamp is not None:
            mine |= stamp << STAMP_SHIFT
        writer[index] = mine
        reader[index] = 0
        readers[index] = 0

    def settle(self, index: np.ndarray, width: int, marks: np.ndarray | int) -> None:
        """Let asynchronous writes of rows count as ordinary ones, with these records."""
        self.rows(width)[0][index] = marks

    def settle_reads(self, index: np.ndarray, width: int, marks: np.ndarray | int) -> None:
        """Let asynchronous reads of rows count as ordinary ones."""
        self.rows(width)[1][index] = marks

    def _open(self, w: Warp, marks: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Return where an earlier access is not ordered before one by the warp now."""
        order = w.cta.order
        stamp = marks >> STAMP_SHIFT & IN_FLIGHT
        here = marks >> CTA_SHIFT == order.tag >> CTA_SHIFT
        warp = np.where(here, marks >> LANE_BITS & 63, 0)
        late = stamp > order.seen[w.number].take(warp)
        own = (warp == w.number) & (stamp != IN_FLIGHT) & (marks & 31 == self.lanes(lanes))
        return (marks != 0) & np.where(here, late & ~own, True)

    def _readers_open(
        self, w: Warp, index: np.ndarray, width: int, warps: np.ndarray
    ) -> np.ndarray:
        """The same for all the other warps that read a byte, each by the stamp of its last read."""
        bad = np.zeros(warps.shape, bool)
        for other in self.stamps:
            if other != w.number:
                stamp = self.stamps_of(other, width).take(index, axis=0)
                late = stamp > w.cta.order.seen[w.number, other]
                bad |= late & (warps >> np.uint32(other) & 1 != 0)
        return bad

    def _refuse(self, w, does, was, marks, index, lanes, bad) -> None:
        if not bad.any():
            return
        row, column = (int(i) for i in np.argwhere(bad)[0])
        mark = int(marks[row, column])
        byte = self.describe((int(index[row]) * marks.shape[1] + column) * self.grain)
        if mark >= MANY_CTAS:
            who = "several CTAs"
        else:
            warp = mark >> LANE_BITS & 63
            who = f"CTA {(mark >> CTA_SHIFT) - 1} "
            who += "a bulk copy" if warp == ENGINE else f"warp {warp} lane {mark & 31}"
        if mark >> STAMP_SHIFT & IN_FLIGHT == IN_FLIGHT and mark < MANY_CTAS:
            was = "is being written, asynchronously,"
        lane = np.broadcast_to(self.lanes(lanes), marks.shape)[row, column]
        raise Race(f"lane {lane} {does} {byte}, which {was} by {who}, and nothing orders the two")
