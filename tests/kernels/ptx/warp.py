"""A warp: 32 lanes with a program counter each, run in groups of equal counter.

The group with the lowest counter runs until it reaches the counter of another one and merges with
it.  A group that waits, or looks for a change again and again, lets the other groups of its warp go
on, as hardware does since SM70.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .decode import ALL, BLOCKED, DIVERGED, LANES, UNSIGNED, YIELDED, Step, unwritten
from .errors import PtxError, Unwritten
from .parser import Register

if TYPE_CHECKING:
    from .cta import Cta

DONE = 1 << 40  # the program counter of a lane that has exited
BLANK = {bits: np.zeros(LANES, dtype) for bits, dtype in UNSIGNED.items()}
NO_LANES = np.zeros(LANES, bool)
LANE = np.arange(LANES, dtype=np.uint32)
PATIENCE = 8  # how often a group may look for a change before another of its warp has its turn
SPINS = 100  # how often a warp may, before another warp has its turn
SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
SPECIAL |= {f"%lanemask_{which}" for which in ("lt", "le", "eq", "ge", "gt")}
SPECIAL |= {"%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid"}
SPECIAL |= {"%cluster_ctarank", "%cluster_nctarank"}  # each CTA is a cluster


def bits_of(lanes: np.ndarray) -> int:
    """Return a vector of truth values as a mask, lane 0 lowest."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Warp:
    """The state of a warp.

    Attributes
    ----------
    cta : Cta
    number : int
        In its CTA.
    registers : list of ndarray
    unset : list of int
        For each register, the mask of lanes that have not written it.
    active : ndarray of bool
        The lanes that the current instruction runs in; `mask` has them as bits, `count` is their
        number and `full` says that it is all 32.
    """

    def __init__(self, cta: Cta, number: int, threads: int) -> None:
        """Start all lanes that are `threads` of the CTA at the first instruction."""
        self.cta = cta
        self.number = number
        self.code: list[Step] = cta.sim.steps
        bits = cta.sim.program.register_bits
        self.registers = [BLANK[width] for width in bits]
        self.unset = [ALL] * len(bits)
        thread = np.arange(number * LANES, (number + 1) * LANES, dtype=np.uint32)
        self.pcs = np.where(thread < threads, 0, DONE)
        self.stalled = NO_LANES.copy()
        self.live = bits_of(self.pcs < DONE)
        self.special = self._special(thread)
        self.waiting: object = None  # what a barrier keeps here while the warp waits
        self.copies: list = []  # asynchronous copies that some lane has not waited for
        self.commits = np.zeros(LANES, np.int64)  # how many groups of them each lane has closed
        self.bulk_copies: list = []
        self.bulk_commits = np.zeros(LANES, np.int64)
        self.pc, self.limit, self.streak = 0, 0, 0
        self.grouped = False
        self.spinning = False  # whether the last run ended because it looked for a change too often
        self._lanes: np.ndarray | None = None
        self._set(self.pcs < DONE)

    def _special(self, thread: np.ndarray) -> dict[str, np.ndarray]:
        cta = self.cta
        nx, ny, _ = cta.sim.block
        one = np.uint32(1)
        below = (one << LANE) - one
        values = {
            "%laneid": LANE,
            "%warpid": self.number,
            "%nwarpid": cta.warp_count,
            "%smid": cta.number % 132,
            "%nsmid": 132,
            "%cluster_ctarank": 0,
            "%cluster_nctarank": 1,
            "%tid.x": thread % nx,
            "%tid.y": thread // nx % ny,
            "%tid.z": thread // (nx * ny),
            "%lanemask_lt": below,
            "%lanemask_eq": one << LANE,
            "%lanemask_le": below | one << LANE,
            "%lanemask_gt": ~(below | one << LANE),
            "%lanemask_ge": ~below,
        }
        for axis, size, block, grid in zip(
            "xyz", cta.sim.block, cta.place, cta.sim.grid, strict=True
        ):
            values |= {f"%ntid.{axis}": size, f"%ctaid.{axis}": block, f"%nctaid.{axis}": grid}
        return {
            name: value.astype(np.uint32)
            if isinstance(value, np.ndarray)
            else np.full(LANES, value, np.uint32)
            for name, value in values.items()
        }

    # Which lanes run.

    def _set(self, active: np.ndarray) -> None:
        self.active = active
        self.mask = bits_of(active)
        self.count = self.mask.bit_count()
        self.full = self.mask == ALL
        self._lanes = None

    @property
    def lanes(self) -> np.ndarray:
        """The numbers of the active lanes."""
        if self._lanes is None:
            self._lanes = np.flatnonzero(self.active)
        return self._lanes

    def narrow(self, taken: np.ndarray) -> tuple:
        """Go on in some of the active lanes; returns what `restore` needs."""
        before = self.active, self.mask, self.count, self.full, self._lanes
        self._set(taken)
        return before

    def restore(self, before: tuple) -> None:
        """Go back to the lanes before `narrow`."""
        self.active, self.mask, self.count, self.full, self._lanes = before

    @property
    def finished(self) -> bool:
        """Whether every lane has exited."""
        return not self.live

    # Running.

    def run(self, budget: int) -> int:
        """Run up to `budget` instructions.

        Returns
        -------
        int
            How many were run; 0 if the warp waits.
        """
        code, ran, looks = self.code, 0, 0
        self.spinning = False
        while ran < budget and not self.spinning:
            if not self.grouped and not self._regroup():
                self.stalled = NO_LANES.copy()
                break
            pc, limit = self.pc, self.limit
            result = None
            try:
                while ran < budget:
                    result = code[pc](self)
                    if result is None:
                        pc += 1
                    elif result >= 0:
                        pc = result
                    else:
                        break
                    ran += 1
                    if pc >= limit:
                        break
            except (PtxError, NotImplementedError) as error:
                raise type(error)(f"{error} [{self._at(pc)}]") from None
            if result == YIELDED:
                pc += 1
                ran += 1
                looks += 1
                self.streak += limit < DONE
                self.spinning = looks > SPINS
            self.pc = pc
            if result == DIVERGED:
                ran += 1
                self.grouped = False
                self._note_exits()
            elif result == BLOCKED:
                self._leave(pc)
                self.stalled |= self.active
            elif pc >= limit or self.streak > PATIENCE:
                self._leave(pc)
        return ran

    def _at(self, pc: int) -> str:
        code = self.cta.sim.program.instructions
        at = str(code[pc]) if pc < len(code) else "the end"
        return f"CTA {self.cta.place} warp {self.number} at {at}"

    def _leave(self, pc: int) -> None:
        self.pcs[self.active] = pc
        self.grouped = False
        if pc >= DONE:
            self._note_exits()

    def _note_exits(self) -> None:
        live = bits_of(self.pcs < DONE)
        if live != self.live:
            self.live = live
            self.cta.lanes_exited(self)

    def _regroup(self) -> bool:
        pcs = self.pcs
        runnable = pcs[(pcs < DONE) & ~self.stalled]
        if not runnable.size:
            return False
        pc = runnable.min()
        if self.streak > PATIENCE:
            pc = self.cta.sim.rng.choice(np.unique(runnable).tolist())
            self.streak = 0
        active = pcs == pc
        later = pcs[pcs > pc]
        self.bulk_copies: list = []
        self.bulk_commits = np.zeros(LANES, np.int64)
        self.pc, self.limit = int(pc), int(later.min()) if later.size else DONE
        self.stalled &= ~active
        self.grouped = True
        self._set(active)
        return True

    def split(self, taken: np.ndarray, target: int, pc: int) -> int:
        """Send the active lanes of `taken` to `target` and the others on from `pc`."""
        self.pcs[self.active] = pc + 1
        self.pcs[taken] = target
        return DIVERGED

    def unwritten(self, register: Register) -> Unwritten:
        """Make the error for a register that an active lane has not written."""
        return unwritten(register, self.unset[register.index] & self.mask)

    def where(self) -> str:
        """Say what the warp is doing, for a deadlock's message."""
        if self.finished:
            return f"warp {self.number}: done"
        if self.grouped:
            self.pcs[self.active] = self.pc
        at = []
        for pc in np.unique(self.pcs[self.pcs < DONE]).tolist():
            lanes = bits_of(self.pcs == pc)
            at.append(f"lanes {lanes:#010x} at {self.cta.sim.program.instructions[pc]}")
        return f"warp {self.number}: " + "; ".join(at)
