"""What zf_cute raises: each message says what was wrong, what is supported and what to do."""

from __future__ import annotations


class ZfError(Exception):
    """Base of every error that zf_cute raises on purpose."""


class UnsupportedError(ZfError, ValueError):
    """A shape, dtype, device or option that nothing here implements."""


class ArgumentError(ZfError, ValueError):
    """An argument that does not fit the others: a wrong shape, an id out of range."""


class PageStateError(ZfError, RuntimeError):
    """An operation that the state of a page forbids, such as sealing a partly filled page."""


class FormatError(ZfError, ValueError):
    """Bytes that no writer of the page format makes."""


class CompileError(ZfError, RuntimeError):
    """A kernel that does not compile; the message holds what the compiler said."""


class LaunchError(ZfError, RuntimeError):
    """A kernel that did not start."""
