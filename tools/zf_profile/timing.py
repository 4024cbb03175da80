"""Timing: samples of several launches interleaved, each from a cold L2, and host time per call.

GPU time is between two CUDA events around one launch.  The host runs ahead of the GPU, so that
what the host needs to launch is not timed; a sample that the GPU could have waited in is dropped
and taken again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

FLUSH_BYTES = 512 << 20
"""Read before each sample, to empty the L2 of what a launch will use.  Read, not written: dirty
lines would be written back inside the timed window, which costs kernels 5 to 8 % (H200)."""
WARM_UP = 3
ROUND = 10
"""Samples of each launch between two waits for the GPU."""
ATTEMPTS = 3
"""Samples tried for each one wanted, where the host falls behind the GPU."""
HOST_CALLS = 200
"""Calls whose host time is taken before the GPU is waited for: fewer than a stream can queue."""
LEAD_CYCLES = 2_000_000
"""Clocks (1 ms) that the GPU is kept busy at the start of a round, for the host to get ahead."""


class Stopwatch(Protocol):
    """What timing needs of a device."""

    def flush(self) -> None:
        """Empty the L2 of everything but what this read."""

    def lead(self) -> None:
        """Keep the device busy for a moment."""

    def mark(self) -> Any:
        """Note the moment when the device comes to here."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""

    def microseconds(self, start: Any, end: Any) -> float:
        """Time between two marks, once both have passed."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work in a graph; returns its replay."""


class CudaStopwatch:
    """CUDA events on torch's current stream."""

    def __init__(self) -> None:
        """Allocate the buffer that `flush` reads."""
        import torch

        self._torch = torch
        words = FLUSH_BYTES // 8
        self._buffer = torch.zeros(words, dtype=torch.int64, device="cuda")
        self._sum = torch.zeros((), dtype=torch.int64, device="cuda")

    def flush(self) -> None:
        """Read 512 MB."""
        self._torch.sum(self._buffer, dim=0, out=self._sum)

    def lead(self) -> None:
        """Spin on the GPU for a millisecond."""
        self._torch.cuda._sleep(LEAD_CYCLES)

    def mark(self) -> Any:
        """Record an event."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        """Whether the event has been reached."""
        return bool(mark.query())

    def microseconds(self, start: Any, end: Any) -> float:
        """Time between two events."""
        return float(start.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        """Wait for the GPU."""
        self._torch.cuda.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture a CUDA graph; what it launches has run before, so nothing is compiled in it."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            work()
        return graph.replay


@dataclass
class Timed:
    """One launch, or one replay of a graph, and its samples.

    Attributes
    ----------
    prepare : callable
        Makes every run do the same work; not timed.
    run : callable
        What is timed.
    samples : list of float
        Microseconds.
    late : int
        Samples dropped because the GPU may have waited for the host.
    """

    prepare: Callable[[], None]
    run: Callable[[], None]
    samples: list[float] = field(default_factory=list)
    late: int = 0


def interleave(
    watch: Stopwatch,
    tasks: Sequence[Timed],
    samples: int,
    advance: Callable[[int], None] = lambda n: None,
) -> None:
    """Take samples of all tasks in turn, so that what changes over time changes for all of them.

    A task that the host cannot launch fast enough is left with fewer samples than asked for.

    Parameters
    ----------
    watch : Stopwatch
        The device.
    tasks : sequence of Timed
        What to time; their `samples` are filled.
    samples : int
        How many of each.
    advance : callable
        Told how many of `samples` are done since it was last called.
    """
    for task in tasks:
        for _ in range(WARM_UP):
            task.prepare()
            task.run()
    watch.synchronize()
    done = turn = 0
    while open_tasks := [t for t in tasks if _missing(t, samples)]:
        marks = []
        watch.lead()
        for _ in range(min(ROUND, max(_missing(t, samples) for t in open_tasks))):
            turn += 1
            # Another neighbour each time: none always follows the same one.
            at = turn % len(open_tasks)
            for task in open_tasks[at:] + open_tasks[:at]:
                task.prepare()
                watch.flush()
                start = watch.mark()
                task.run()
                end = watch.mark()
                marks.append((task, start, end, watch.passed(start)))
        watch.synchronize()
        for task, start, end, late in marks:
            if late:
                task.late += 1
            elif len(task.samples) < samples:
                task.samples.append(watch.microseconds(start, end))
        least = samples - max(_missing(t, samples) for t in tasks)
        advance(least - done)
        done = least


def _missing(task: Timed, samples: int) -> int:
    """Samples still to be taken; 0 once too many attempts have failed."""
    if len(task.samples) + task.late >= ATTEMPTS * samples:
        return 0
    return max(0, samples - len(task.samples))


def host_us(watch: Stopwatch, calls: Sequence[Callable[[], None]]) -> float:
    """Median host time of a call, in microseconds, with no wait for the device between calls.

    Parameters
    ----------
    watch : Stopwatch
        The device, waited for before and after.
    calls : sequence of callable
        Called in turn, `HOST_CALLS` times in all.
    """
    for call in calls[:WARM_UP]:
        call()
    watch.synchronize()
    spent = []
    collected = gc.isenabled()
    gc.disable()
    try:
        for i in range(HOST_CALLS):
            call = calls[i % len(calls)]
            start = time.perf_counter_ns()
            call()
            spent.append((time.perf_counter_ns() - start) / 1e3)
    finally:
        if collected:
            gc.enable()
    watch.synchronize()
    return quantile(spent, 0.5)


def quantile(samples: Sequence[float], q: float) -> float:
    """Quantile of some samples, 0 <= q <= 1; between two of them by linear interpolation."""
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(samples: Sequence[float], *, keep: bool = True) -> dict[str, Any] | None:
    """Median, 10th and 90th percentile, in microseconds to three places; None without samples.

    Parameters
    ----------
    samples : sequence of float
        Microseconds.
    keep : bool
        Whether to list the samples too.
    """
    if not samples:
        return None
    found: dict[str, Any] = {
        "median": round(quantile(samples, 0.5), 3),
        "p10": round(quantile(samples, 0.1), 3),
        "p90": round(quantile(samples, 0.9), 3),
        "n": len(samples),
    }
    if keep:
        found["samples"] = [round(x, 3) for x in samples]
    return found
