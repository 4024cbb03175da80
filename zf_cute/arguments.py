"""Checks of what is given for a layer's pages: rows, slots and page ids, contents aside."""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute.checks import INDEX_DTYPES, check_tensor
from zf_cute.errors import ArgumentError, UnsupportedError
from zf_cute.pages import LayerPages, PageState


def check_layer(kv: object, state: object) -> None:
    """Raise ArgumentError unless `kv` and `state` are a layer's."""
    if not isinstance(kv, LayerPages):
        raise ArgumentError(f"kv is a {type(kv).__name__}; LayerPages is wanted: store.layer(i)")
    if not isinstance(state, PageState):
        raise ArgumentError(
            f"state is a {type(state).__name__}; PageState is wanted: store.state(i)"
        )


def check_rows(kv: LayerPages, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Raise unless k and v are rows of tokens for a layer's pages; returns their shape."""
    layout, device = kv.layout, kv.pool.device
    # The usual case first, in a third of the host time that it takes to find out what is wrong.
    both = isinstance(k, Tensor) and isinstance(v, Tensor)
    if both and k.dtype is v.dtype is torch.bfloat16 and k.dim() == 3 and k.shape == v.shape:
        tokens, heads, head_dim = k.shape
        fits = heads == layout.num_kv_heads and head_dim == layout.head_dim
        if fits and k.device == device and v.device == device:
            return tokens, heads, head_dim
    want = (layout.num_kv_heads, layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"{name} is {str(x.dtype).removeprefix('torch.')}: the format is lossless for "
                "bfloat16 alone; a cast would change the cache"
            )
        if x.dim() != 3 or tuple(x.shape[1:]) != want:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}; [tokens, {want[0]}, {want[1]}] is wanted"
            )
        if x.device != device:
            raise ArgumentError(f"{name} is on {x.device} and the store on {device}")
    raise ArgumentError(f"k has {len(k)} tokens and v {len(v)}")


def check_slot_mapping(kv: LayerPages, slot_mapping: Tensor, tokens: int) -> None:
    """Raise unless `slot_mapping` has a slot for each of `tokens`; contents are not looked at."""
    check_tensor("slot_mapping", slot_mapping)
    if slot_mapping.dtype not in INDEX_DTYPES:
        raise ArgumentError(f"slot_mapping is {slot_mapping.dtype}; int32 or int64 is wanted")
    if slot_mapping.shape != (tokens,):
        raise ArgumentError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)}; one slot for each of the "
            f"{tokens} tokens is wanted"
        )
    if slot_mapping.device != kv.pool.device:
        raise ArgumentError(
            f"slot_mapping is on {slot_mapping.device} and the store on {kv.pool.device}"
        )


def check_page_ids(kv: LayerPages, pages: Tensor) -> None:
    """Raise unless `pages` is a list of ids on the store's device; contents are not looked at."""
    check_tensor("pages", pages)
    if pages.dtype not in INDEX_DTYPES:
        raise ArgumentError(f"pages is {pages.dtype}; int32 or int64 is wanted")
    if pages.dim() != 1:
        raise ArgumentError(f"pages has {pages.dim()} dimensions; one is wanted")
    if pages.device != kv.pool.device:
        raise ArgumentError(f"pages is on {pages.device} and the store on {kv.pool.device}")
