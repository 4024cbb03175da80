"""Decode attention over a losslessly compressed BF16 KV cache.

Names load on first use: ``import zf_cute`` imports neither torch nor cutlass and touches no GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zf_cute.attention import BatchAttention
    from zf_cute.config import KVShape
    from zf_cute.errors import (
        ArgumentError,
        CompileError,
        FormatError,
        LaunchError,
        PageStateError,
        UnsupportedError,
        ZfError,
    )
    from zf_cute.merge import merge_state
    from zf_cute.pages import LayerPages, PageState
    from zf_cute.store import PageStore

_HOMES = {
    "ArgumentError": "zf_cute.errors",
    "BatchAttention": "zf_cute.attention",
    "CompileError": "zf_cute.errors",
    "FormatError": "zf_cute.errors",
    "KVShape": "zf_cute.config",
    "LaunchError": "zf_cute.errors",
    "LayerPages": "zf_cute.pages",
    "PageState": "zf_cute.pages",
    "PageStateError": "zf_cute.errors",
    "PageStore": "zf_cute.store",
    "UnsupportedError": "zf_cute.errors",
    "ZfError": "zf_cute.errors",
    "merge_state": "zf_cute.merge",
}

__all__ = [
    "ArgumentError",
    "BatchAttention",
    "CompileError",
    "FormatError",
    "KVShape",
    "LaunchError",
    "LayerPages",
    "PageState",
    "PageStateError",
    "PageStore",
    "UnsupportedError",
    "ZfError",
    "merge_state",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home."""
    if name in ("launch", "operators", "reference"):
        return import_module(f"zf_cute.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("zf_cute")
    if name not in _HOMES:
        raise AttributeError(f"module 'zf_cute' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
