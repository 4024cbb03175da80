"""Kernels compiled once in a run of the tests, whoever asks.

>>> report(CompileKey("append", head_dim=128, rope="half")).ptx
"""

from __future__ import annotations

from zf_cute.compile import KernelReport
from zf_cute.compile_key import CompileKey
from zf_cute.kernels import catalog
from zf_profile.compile import reports

_found: dict[CompileKey, KernelReport | str] = {}


def report(key: CompileKey) -> KernelReport:
    """What a key's kernel takes, its PTX and its cubin."""
    _compile([key], jobs=1)
    found = _found[key]
    assert not isinstance(found, str), found
    return found


def compile_all() -> None:
    """Compile all variants of all kernels, in two processes: 8 s instead of 14."""
    _compile(catalog.variants(), jobs=2)


def _compile(keys, jobs):
    _found.update(reports([key for key in keys if key not in _found], jobs))
