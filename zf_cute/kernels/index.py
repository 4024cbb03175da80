"""Slots and page ids as tensors hold them: int32 or int64."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64

INDEX_TYPES = {"int32": Int32, "int64": Int64}


def index_type(name: str) -> Any:
    """DSL type of an index dtype."""
    return INDEX_TYPES[name]
