"""The simulator: memory, launches and the schedules that interleave warps and CTAs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from . import (
    asynchronous,
    barriers,
    bits,
    collective,
    control,
    floats,
    integers,
    loads,
    matrices,
)
from .cta import Cta
from .decode import Layout, Step, decode
from .errors import Deadlock, PtxError
from .memory import SHARED_BASE, GlobalMemory
from .params import Value, param_bytes
from .parser import Param, Program, parse
from .warp import Warp

# Importing them fills the table of instructions.
INSTRUCTIONS = (
    asynchronous,
    barriers,
    bits,
    collective,
    control,
    floats,
    integers,
    loads,
    matrices,
)

SCHEDULES = ("random", "lowest", "highest", "round")
LONG_TURN = 100_000  # instructions of a warp that runs "as far as it can"


class Simulator:
    """Runs one entry of a PTX module on the CPU.

    Parameters
    ----------
    ptx : str
        As ``cute.compile(...).__ptx__`` gives it.
    entry : str, optional
        Name of the entry; may be left out where there is only one.
    seed : int
        Of the schedule, of garbage and of the delays of asynchronous copies.
    schedule : {"random", "lowest", "highest", "round"}
        Which warp runs next.  "random": any, for a random time.  "lowest" and "highest": the first
        or last one that can, as far as it can; copies land as late, or as early, as they may.
        "round": one instruction of each in turn.
    in_flight : int
        How many CTAs run at the same time.
    check_races : bool
        Raise `Race` for accesses that nothing orders, see `races`.
    check_lanes : bool
        Also between lanes of one warp, which only ``bar.warp.sync`` and wider barriers order.
    max_steps : int
        Instructions of one launch, summed over warps; more of them raise `Deadlock`.

    Attributes
    ----------
    steps_run : int
        Instructions run so far, summed over warps and launches.
    """

    def __init__(
        self,
        ptx: str,
        entry: str | None = None,
        seed: int = 0,
        *,
        schedule: str = "random",
        in_flight: int = 4,
        check_races: bool = True,
        check_lanes: bool = True,
        max_steps: int = 10_000_000,
    ) -> None:
        """Parse and decode; an instruction that is not modelled raises NotImplementedError."""
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
        self.program, self.steps, self.static_bytes = _decoded(ptx, entry)
        self.seed = seed
        self.rng = random.Random(seed)
        self.schedule = schedule
        self.in_flight = in_flight
        self.check_races = check_races
        self.check_lanes = check_lanes
        self.max_steps = max_steps
        self.steps_run = 0
        self.memory = GlobalMemory()
        _map_variables(self.program, self.memory)
        self.block = self.grid = (1, 1, 1)
        self.shared_bytes = 0
        self.params_data: dict[str, tuple[bytearray, bytearray]] = {}

    # Memory.

    @property
    def params(self) -> list[Param]:
        """The parameters of the entry: name, size, and where the kernel reads each."""
        return self.program.params

    def alloc(self, array: np.ndarray, name: str | None = None) -> int:
        """Map a contiguous array as global memory; the kernel's stores change it in place.

        Parameters
        ----------
        array : ndarray
            Stores to it raise if it is read-only.
        name : str, optional
            For errors.

        Returns
        -------
        int
            Its address, aligned to 4 KiB.
        """
        return self.memory.add(array, name).base

    def alloc_sparse(self, nbytes: int, name: str | None = None, *, strict: bool = False) -> int:
        """Map `nbytes` of which only the pages that are touched take memory.

        `strict`: reading bytes that nobody wrote raises `Unwritten`; otherwise they are NaNs.
        """
        return self.memory.add_sparse(nbytes, name, strict=strict).base

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Return a copy of `nbytes` of global memory as uint8."""
        return self.memory.read(address, nbytes)

    def write(self, address: int, data: np.ndarray) -> None:
        """Store an array's bytes to global memory, from the host."""
        self.memory.write(address, data)

    # Launching.

    def launch(
        self,
        params: Sequence[Value],
        grid: int | Sequence[int],
        block: int | Sequence[int] | None = None,
        smem: int = 0,
    ) -> None:
        """Run the kernel to its end.

        Parameters
        ----------
        params : sequence
            One value for each of `Simulator.params`: an int, bytes, or for a struct
            ``{byte offset: int}``.  `tensor` makes the one of a dynamic tensor.
        grid, block : int or sequence of up to three ints
            `block` may be left out if the kernel was compiled for one size.
        smem : int
            Bytes of dynamic shared memory.
        """
        self.grid = _three(grid)
        required = self.program.block
        if block is None and required is None:
            raise ValueError("the kernel does not name its block size")
        self.block = _three(required if block is None else block)
        if required and self.block != required:
            raise ValueError(f"the kernel is compiled for a block of {required}, not {self.block}")
        self.shared_bytes = self.static_bytes + smem
        self._pass(params)
        for region in self.memory.regions:
            region.shadow = None
            if self.check_races and region.writable:
                region.watch(shared=False)
        self._schedule()

    def _pass(self, params: Sequence[Value]) -> None:
        if len(params) != len(self.params):
            raise ValueError(f"{len(self.params)} parameters, not {len(params)}: {self.params}")
        self.params_data = {
            param.name: param_bytes(param, value)
            for param, value in zip(self.params, params, strict=True)
        }

    def _ctas(self) -> Iterator[Cta]:
        nx, ny, nz = self.grid
        places = list(itertools.product(range(nz), range(ny), range(nx)))
        numbers = list(range(len(places)))
        if self.schedule == "random":
            self.rng.shuffle(numbers)
        elif self.schedule == "highest":
            numbers.reverse()
        for number in numbers:
            yield Cta(self, number, places[number][::-1])

    def _schedule(self) -> None:
        waiting, running = self._ctas(), []
        blocked: set[Warp] = set()
        spinning: set[Warp] = set()
        turn, end = 0, self.steps_run + self.max_steps
        while True:
            while len(running) < self.in_flight:
                cta = next(waiting, None)
                if cta is None:
                    break
                running.append(cta)
            if not running:
                return
            if self._land_some(running):
                blocked.clear()
            warps = [w for cta in running for w in cta.warps if not w.finished and w not in blocked]
            if warps:
                if spinning.issuperset(warps):
                    spinning.clear()
                warps = [w for w in warps if w not in spinning]
                warp, budget = self._choose(warps, turn)
                turn += 1
                # A warp whose lanes have only met again runs nothing the first time.
                ran = warp.run(budget) or warp.run(budget)
                self.steps_run += ran
                if warp.spinning:
                    spinning.add(warp)
                elif ran:
                    spinning.clear()
                if ran:
                    blocked.clear()
                else:
                    blocked.add(warp)
                if self.steps_run > end:
                    raise Deadlock(f"no end after {self.max_steps} instructions: {_where(running)}")
            elif any(cta.pending for cta in running):
                self._land_one(running)
                blocked.clear()
            elif not any(cta.finished for cta in running):
                raise Deadlock(_where(running))
            running = [cta for cta in running if not cta.finished]

    def _choose(self, warps: list[Warp], turn: int) -> tuple[Warp, int]:
        if self.schedule == "random":
            return self.rng.choice(warps), self.rng.choice((1, 5, 20, 60, 200))
        if self.schedule == "round":
            return warps[turn % len(warps)], 1
        return warps[0 if self.schedule == "lowest" else -1], LONG_TURN

    def _land_some(self, running: list[Cta]) -> bool:
        """Let copies land in between: as chance will have it, all at once, or none."""
        landed = False
        if self.schedule != "lowest":
            for cta in running:
                while cta.pending and (self.schedule == "highest" or self.rng.random() < 0.3):
                    cta.land(self.rng.randrange(len(cta.pending)))
                    landed = True
        return landed

    def _land_one(self, running: list[Cta]) -> None:
        cta = self.rng.choice([cta for cta in running if cta.pending])
        cta.land(self.rng.randrange(len(cta.pending)))


@lru_cache(maxsize=64)
def _decoded(ptx: str, entry: str | None) -> tuple[Program, list[Step], int]:
    """Return an entry, its steps, and how many bytes its static shared arrays take.

    Kept, because tests run the same kernel again and again and decoding takes longer than many a
    launch; steps know nothing of one simulator.
    """
    program = parse(ptx, entry)
    symbols, end = _map_variables(program, GlobalMemory()), 0
    for variable in sorted(program.shared, key=lambda each: each.size is None):
        end = -(-end // variable.align) * variable.align
        symbols[variable.name] = SHARED_BASE + end
        end += variable.size or 0
    layout = Layout(program, symbols)
    steps = [decode(each, layout, pc) for pc, each in enumerate(program.instructions)]
    return program, [*steps, _fell_off], end


def _map_variables(program: Program, memory: GlobalMemory) -> dict[str, int]:
    """Map the module's variables, at the same addresses in every empty memory."""
    addresses = {}
    for variable in program.module:
        data = np.zeros(variable.size, np.uint8)
        if variable.data:
            data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        addresses[variable.name] = memory.add(data, variable.name).base
    return addresses


def _fell_off(w: Warp) -> int | None:
    raise PtxError("the kernel ends without ret")


def _three(size: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    if len(sizes) > 3 or min(x, y, z) < 1:
        raise ValueError(f"{size} is no grid or block")
    return x, y, z


def _where(running: list[Cta]) -> str:
    return "\n".join(f"CTA {cta.place} {w.where()}" for cta in running for w in cta.warps)
