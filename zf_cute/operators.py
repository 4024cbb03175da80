"""The page kernels as torch operators, with fake implementations: for torch.compile and export.

``torch.ops.zf_cute.append``, ``encode``, ``decode_pages`` and ``clear`` take tensors and plain
numbers; the functions here take what those of `zf_cute.launch` take, and go through torch's
dispatcher.
A direct launch costs less host time; `PageStore` uses operators only while torch.compile traces.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from zf_cute import launch
from zf_cute.arguments import check_layer
from zf_cute.pages import LayerPages, PageState
from zf_layouts import PageLayout

_LAYOUT = (
    "int num_kv_heads, int head_dim, int page_size, str rope, int max_exceptions, "
    "int heads_per_span"
)
# What each changes: (a!) to (g!).  Written is the append's, sealed and claimed the encode's.
_library = torch.library.Library("zf_cute", "DEF")
_library.define(
    "append(Tensor(a!) pool, Tensor places, Tensor(b!) written, Tensor sealed, Tensor claimed, "
    "Tensor homes, Tensor(c!) refused, Tensor k, Tensor v, Tensor slot_mapping, "
    f"{_LAYOUT}) -> ()"
)
_library.define(
    "encode(Tensor(a!) pool, Tensor(b!) places, Tensor written, Tensor(c!) sealed, "
    "Tensor(d!) claimed, Tensor homes, Tensor(e!) refused, Tensor pages, Tensor? destinations, "
    f"{_LAYOUT}) -> Tensor"
)
_library.define(
    "decode_pages(Tensor pool, Tensor places, Tensor written, Tensor sealed, Tensor claimed, "
    f"Tensor homes, Tensor(a!) refused, Tensor pages, {_LAYOUT}) -> (Tensor, Tensor)"
)
_library.define(
    "clear(Tensor(a!) pool, Tensor(b!) places, Tensor(c!) written, Tensor(d!) sealed, "
    f"Tensor(e!) claimed, Tensor homes, Tensor(f!) refused, Tensor pages, {_LAYOUT}) -> ()"
)


@cache
def _layout(*args: Any) -> PageLayout:
    return PageLayout(*args)


def _layout_args(layout: PageLayout) -> tuple[Any, ...]:
    """What follows the tensors in a call, in the order of `PageLayout`."""
    return (
        layout.num_kv_heads,
        layout.head_dim,
        layout.page_size,
        layout.rope,
        layout.max_exceptions,
        layout.heads_per_span,
    )


@torch.library.impl(_library, "append", "CUDA")
def _append(
    pool: Tensor,
    places: Tensor,
    written: Tensor,
    sealed: Tensor,
    claimed: Tensor,
    homes: Tensor,
    refused: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *layout: Any,
) -> None:
    kv = LayerPages(pool, places, _layout(*layout))
    state = PageState(written, sealed, claimed, homes, refused)
    launch.append(kv, state, k, v, slot_mapping)


@torch.library.impl(_library, "encode", "CUDA")
def _encode(
    pool: Tensor,
    places: Tensor,
    written: Tensor,
    sealed: Tensor,
    claimed: Tensor,
    homes: Tensor,
    refused: Tensor,
    pages: Tensor,
    destinations: Tensor | None,
    *layout: Any,
) -> Tensor:
    kv = LayerPages(pool, places, _layout(*layout))
    state = PageState(written, sealed, claimed, homes, refused)
    return launch.encode(kv, state, pages, destinations=destinations)


@torch.library.impl(_library, "decode_pages", "CUDA")
def _decode_pages(
    pool: Tensor,
    places: Tensor,
    written: Tensor,
    sealed: Tensor,
    claimed: Tensor,
    homes: Tensor,
    refused: Tensor,
    pages: Tensor,
    *layout: Any,
) -> tuple[Tensor, Tensor]:
    kv = LayerPages(pool, places, _layout(*layout))
    state = PageState(written, sealed, claimed, homes, refused)
    return launch.decode_pages(kv, state, pages)


@torch.library.impl(_library, "clear", "CUDA")
def _clear(
    pool: Tensor,
    places: Tensor,
    written: Tensor,
    sealed: Tensor,
    claimed: Tensor,
    homes: Tensor,
    refused: Tensor,
    pages: Tensor,
    *layout: Any,
) -> None:
    kv = LayerPages(pool, places, _layout(*layout))
    state = PageState(written, sealed, claimed, homes, refused)
    launch.clear(kv, state, pages)


@torch.library.register_fake("zf_cute::append", lib=_library)
def _(*args: Any) -> None:
    return None


@torch.library.register_fake("zf_cute::clear", lib=_library)
def _(*args: Any) -> None:
    return None


@torch.library.register_fake("zf_cute::encode", lib=_library)
def _(
    pool: Tensor,
    places: Tensor,
    written: Tensor,
    sealed: Tensor,
    claimed: Tensor,
    homes: Tensor,
    refused: Tensor,
    pages: Tensor,
    destinations: Tensor | None,
    *layout: Any,
) -> Tensor:
    return pages.new_empty((pages.shape[0], places.shape[1]), dtype=torch.int32)


@torch.library.register_fake("zf_cute::decode_pages", lib=_library)
def _(
    pool: Tensor,
    places: Tensor,
    written: Tensor,
    sealed: Tensor,
    claimed: Tensor,
    homes: Tensor,
    refused: Tensor,
    pages: Tensor,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    shape = (pages.shape[0], page_size, num_kv_heads, head_dim)
    k = pages.new_empty(shape, dtype=torch.bfloat16)
    return k, torch.empty_like(k)


def _state(state: PageState) -> tuple[Tensor, ...]:
    return state.written, state.sealed, state.claimed, state.homes, state.refused


def append(kv: LayerPages, state: PageState, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """`zf_cute.launch.append` as a torch operator."""
    check_layer(kv, state)
    args = (kv.pool, kv.places, *_state(state), k, v, slot_mapping)
    torch.ops.zf_cute.append(*args, *_layout_args(kv.layout))


def encode(
    kv: LayerPages, state: PageState, pages: Tensor, *, destinations: Tensor | None = None
) -> Tensor:
    """`zf_cute.launch.encode` as a torch operator; `lengths` is always new."""
    check_layer(kv, state)
    args = (kv.pool, kv.places, *_state(state), pages, destinations)
    return torch.ops.zf_cute.encode(*args, *_layout_args(kv.layout))


def decode_pages(kv: LayerPages, state: PageState, pages: Tensor) -> tuple[Tensor, Tensor]:
    """`zf_cute.launch.decode_pages` as a torch operator; `k` and `v` are always new."""
    check_layer(kv, state)
    args = (kv.pool, kv.places, *_state(state), pages)
    return torch.ops.zf_cute.decode_pages(*args, *_layout_args(kv.layout))


def clear(kv: LayerPages, state: PageState, pages: Tensor) -> None:
    """`zf_cute.launch.clear` as a torch operator."""
    check_layer(kv, state)
    args = (kv.pool, kv.places, *_state(state), pages)
    torch.ops.zf_cute.clear(*args, *_layout_args(kv.layout))
