"""Work: one variant of a kernel on a case, ready to be checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zf_profile.bytes_model import Traffic

Call: TypeAlias = Callable[[Any], Any]
"""A call; its argument holds the functions: `zf_cute.launch`, or the torch operators."""


def _nothing() -> None:
    pass


def _fine() -> str:
    return ""


def _ignore(result: Any) -> None:
    pass


@dataclass
class Work:
    """What to launch, how to make every launch do the same, and how to tell that it is right.

    Attributes
    ----------
    kernel, variant : str
        As in `bench_cases.KERNELS`.
    detail : str
        What one launch does, for people.
    calls : sequence of callable
        Launches alike, into buffers made before; a graph holds one of each, a sample is the first.
    operator : callable
        The first of them through the torch operator, which makes its outputs itself.
    adopt : callable
        Puts what `operator` returned where `wrong` looks for it.
    wrong : callable
        After the first so many calls on poisoned memory: what is wrong with the results, or "".
    traffic : callable
        Bytes of one call, once the calls have been found right.
    prepare : callable
        Makes the next call do the same work as any; never timed.
    poison : callable
        Fills what the calls must write with what they never write.
    settled : callable
        After timing: what is wrong with the last results, or "".  Cheap.
    bandwidth : bool
        Whether bytes bound its time, so that a share of the copy rate means something.
    is_ceiling : bool
        Whether this is a copy that others are measured against: neither host time nor graph.
    """

    kernel: str
    variant: str
    detail: str
    calls: Sequence[Call]
    operator: Call
    wrong: Callable[[int], str]
    traffic: Callable[[], Traffic]
    adopt: Callable[[Any], None] = _ignore
    prepare: Callable[[], None] = _nothing
    poison: Callable[[], None] = _nothing
    settled: Callable[[], str] = _fine
    bandwidth: bool = True
    is_ceiling: bool = False
