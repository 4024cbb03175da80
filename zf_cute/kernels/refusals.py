"""What kernels refuse.

A kernel cannot raise: what it meets in device memory is known when the host is far ahead.  It
leaves such a thing alone and counts it, and `PageStore.check` raises for the counts when asked to.
"""

from __future__ import annotations

import enum
from typing import Any


class Refusal(enum.IntEnum):
    """Index of a count in the tensor of refusals."""

    SLOT_OUTSIDE = 0
    SLOT_SEALED = 1
    PAGE_OUTSIDE = 2
    PAGE_NOT_SEALABLE = 3
    SPAN_MALFORMED = 4
    DESTINATION_OUTSIDE = 5


def count(refused: Any, refusal: Any, n: Any) -> None:
    """Add to a count, on the device."""
    import cutlass.cute as cute

    cute.arch.atomic_add(refused.iterator + refusal, n, sem="relaxed", scope="gpu")
