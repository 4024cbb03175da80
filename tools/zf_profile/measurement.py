"""Measure works: check each for every bit, then time all of them interleaved, then the host.

What is wrong is never timed, and what cannot be measured is left None with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zf_profile import timing
from zf_profile.backend import Backend
from zf_profile.bench_cases import KERNELS
from zf_profile.bytes_model import Traffic
from zf_profile.timing import Stopwatch, Timed
from zf_profile.work import Call, Work


@dataclass
class Measurement:
    """What was found of one work.

    Attributes
    ----------
    work : Work
        What was measured.
    match : bool or None
        Whether every bit was right; None if it could not be run.
    reason : str
        Why this is no valid result, or "".
    failed : bool
        Whether something did not compile, launch or run.
    direct, graph : Timed or None
        One launch; one replay of a graph of every call of the work.
    traffic : Traffic or None
        Bytes of one call; None unless it is right.
    host_us, operator_host_us : float or None
        Host time of a call, through `zf_cute.launch` and through the torch operator.
    graph_reason, operator_reason : str
        Why there is no such time.
    """

    work: Work
    match: bool | None = None
    reason: str = ""
    failed: bool = False
    direct: Timed | None = None
    graph: Timed | None = None
    traffic: Traffic | None = None
    host_us: float | None = None
    operator_host_us: float | None = None
    graph_reason: str = ""
    operator_reason: str = ""

    def reject(self, reason: str) -> None:
        """Mark as no valid result; the first reason stays."""
        self.reason = self.reason or reason


@dataclass
class Plan:
    """How to measure.

    Attributes
    ----------
    backend : Backend
        Whose functions.
    watch : Stopwatch
        Of its device.
    samples : int
        Of each launch.
    host_only : bool
        Leave the GPU's time out.
    advance : callable
        Told how many samples are done.
    """

    backend: Backend
    watch: Stopwatch
    samples: int
    host_only: bool = False
    advance: Callable[[int], None] = field(default=lambda n: None)


def broken(kernel: str, error: Exception) -> list[Measurement]:
    """Measurements of a kernel's variants that could not be set up."""
    found = []
    for variant in KERNELS[kernel]:
        work = Work(
            kernel,
            variant,
            "",
            calls=[],
            operator=lambda ops: None,
            wrong=lambda done: "",
            traffic=lambda: Traffic({}, {}),
        )
        found.append(Measurement(work, failed=True, reason=f"set-up failed: {describe(error)}"))
    return found


def measure(works: Sequence[Work], plan: Plan) -> list[Measurement]:
    """Check and time works, all of one case."""
    found = [Measurement(work) for work in works]
    for one in found:
        _check(one, plan)
    right = [one for one in found if one.match]
    before = plan.backend.compiled()
    try:
        if not plan.host_only:
            _time(right, plan)
        for one in right:
            if not one.work.is_ceiling:
                _time_host(one, plan)
    except Exception as error:  # the device's, which may belong to any launch before it
        for one in right:
            one.failed = True
            one.reject(f"failed while all were timed: {describe(error)}")
    after = plan.backend.compiled()
    if after > before:
        for one in right:
            one.reject(f"{after - before} kernels were compiled by calls like those before them")
    return found


def _check(one: Measurement, plan: Plan) -> None:
    work, launch = one.work, plan.backend.launch
    try:
        wrong = _result(work, lambda: work.calls[0](launch), 1, plan.watch)
        one.traffic = None if wrong else work.traffic()
    except Exception as error:
        one.failed = True
        one.reject(f"failed: {describe(error)}")
        return
    one.match = not wrong
    if wrong:
        one.reject(wrong)
        return
    if work.is_ceiling:
        one.graph_reason = one.operator_reason = "a copy of torch's: timed by events alone"
        return
    _check_graph(one, plan)
    _check_operator(one, plan)


def _result(work: Work, run: Callable[[], None], calls: int, watch: Stopwatch) -> str:
    """What is wrong after `run`, which makes the first so many calls of a work."""
    work.prepare()
    work.poison()
    run()
    watch.synchronize()
    return work.wrong(calls)


def _check_graph(one: Measurement, plan: Plan) -> None:
    work, launch = one.work, plan.backend.launch

    def every_call() -> None:
        for call in work.calls:
            call(launch)

    if plan.host_only:
        one.graph_reason = "only the host's time was asked for"
        return
    try:
        replay = plan.watch.capture(every_call)
        wrong = _result(work, replay, len(work.calls), plan.watch)
    except Exception as error:
        one.graph_reason = f"not captured in a graph: {describe(error)}"
        return
    if wrong:
        one.match = False
        one.reject(f"replayed from a graph: {wrong}")
        return
    one.graph = Timed(work.prepare, replay)


def _check_operator(one: Measurement, plan: Plan) -> None:
    work, operators = one.work, plan.backend.operators
    if operators is None:
        one.operator_reason = "no torch operators here"
        return
    try:
        wrong = _result(work, lambda: work.adopt(work.operator(operators)), 1, plan.watch)
    except Exception as error:
        one.failed = True
        one.operator_reason = f"failed: {describe(error)}"
        one.reject(f"through the torch operator: {one.operator_reason}")
        return
    if wrong:
        one.match = False
        one.operator_reason = wrong
        one.reject(f"through the torch operator: {wrong}")


def _time(right: list[Measurement], plan: Plan) -> None:
    launch = plan.backend.launch
    tasks = []
    for one in right:
        one.direct = Timed(one.work.prepare, _bound(one.work.calls[0], launch))
        tasks += [one.direct] + ([one.graph] if one.graph else [])
    timing.interleave(plan.watch, tasks, plan.samples, plan.advance)
    for one in right:
        wrong = one.work.settled()
        if wrong:
            one.match = False
            one.reject(f"while it was timed: {wrong}")


def _time_host(one: Measurement, plan: Plan) -> None:
    """Host time of calls; those that the device refuses (sealed already) cost the host the same."""
    work = one.work
    work.prepare()
    launch, operators = plan.backend.launch, plan.backend.operators
    one.host_us = timing.host_us(plan.watch, [_bound(call, launch) for call in work.calls])
    if not one.operator_reason:
        work.prepare()
        one.operator_host_us = timing.host_us(plan.watch, [_bound(work.operator, operators)])
    work.prepare()


def _bound(call: Call, functions: object) -> Callable[[], None]:
    return lambda: call(functions)


def describe(error: Exception) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
