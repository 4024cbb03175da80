"""The ceiling of a run: what torch's own copies reach on the same device, among the same samples.

Bytes read and bytes written both count, as they do for the kernels.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from zf_profile import bytes_model
from zf_profile.bed import Bed
from zf_profile.work import Work

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 0.02
"""How far a median may lie above the ceiling's: noise of two medians.  More is an error of the
bytes model or of the timing, not a result."""
LARGE_BYTES = 1 << 30
"""Least size of the larger copies; rates still rise from 268 MB to 2 GB (H200)."""
MOST_BYTES = 4 << 30

NO_READ_CEILING = (
    "torch has no kernel that reads at the device's rate and writes nothing: its reductions stay "
    "below it"
)


def copy_works(bed: Bed, variants: Collection[str]) -> list[Work]:
    """Copies of as many bytes as the case's K and V, and of more.

    The smaller size shares what a launch of that size gains from an L2 that still holds its last
    writes when the clock stops.
    """
    import torch

    small = min(bed.case.kv_bytes, MOST_BYTES)
    large = min(max(2 * small, LARGE_BYTES), MOST_BYTES)
    generator = torch.Generator(device=bed.backend.device).manual_seed(0)
    source = torch.empty(large // 4, dtype=torch.int32, device=bed.backend.device)
    source.random_(-(1 << 31), 1 << 31, generator=generator)
    destination = torch.empty_like(source)
    works = []
    for variant in variants:
        way, _, size = variant.partition("-")
        words = (large if size else small) // 4
        works.append(_copy_work(variant, way == "memcpy", source[:words], destination[:words]))
    return works


def _copy_work(variant: str, plain: bool, source: Tensor, destination: Tensor) -> Work:
    import torch

    nbytes = source.numel() * source.element_size()

    def call(ops: Any) -> None:
        if plain:
            destination.copy_(source)
        else:
            torch.bitwise_not(source, out=destination)

    def poison() -> None:
        destination.zero_()

    def wrong(done: int) -> str:
        want = source if plain else ~source
        return "" if torch.equal(destination, want) else "the copy differs"

    return Work(
        "copy",
        variant,
        f"{nbytes / 1e6:.0f} MB",
        [call],
        operator=call,
        wrong=wrong,
        traffic=lambda: bytes_model.copy(nbytes),
        poison=poison,
        is_ceiling=True,
    )


def gbps(nbytes: int, microseconds: float) -> float:
    """Rate in 10^9 bytes a second."""
    return nbytes / microseconds / 1e3


def over(rate: float, ceiling: float) -> str:
    """Say that a rate cannot be, if it lies above the ceiling by more than noise; else ""."""
    if rate <= ceiling * (1 + TOLERANCE):
        return ""
    return (
        f"{rate / ceiling:.1%} of the measured ceiling: an error of the bytes model or of the "
        "timing, not a result"
    )
