"""What a kernel can do wrong, one exception each, so that tests can ask for one of them."""

from __future__ import annotations


class PtxError(RuntimeError):
    """The kernel did something that PTX leaves undefined, or that no test wants."""


class MemoryFault(PtxError):
    """An access outside every allocation, across the end of one, or to a read-only one."""


class Misaligned(PtxError):
    """An address that is not a multiple of the size of the access."""


class Unwritten(PtxError):
    """A register, a parameter or (on request) memory that is read before it is written."""


class Race(PtxError):
    """Two accesses to a byte, one of them a write, that nothing orders."""


class Deadlock(PtxError):
    """Every warp waits for another one."""
