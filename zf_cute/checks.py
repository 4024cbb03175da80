"""Checks of arguments that several objects share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zf_cute.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from zf_cute.pages import LayerPages

INDEX_DTYPES = {torch.int32: "int32", torch.int64: "int64"}
"""Dtypes of slots and page ids, and their names in a `CompileKey`."""


def check_tensor(name: str, x: object) -> None:
    """Raise ArgumentError unless `x` is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(x).__name__}; a torch tensor is wanted")


def described(x: Tensor) -> str:
    """What a message says of a tensor that does not fit."""
    said = f"{x.dtype} of shape {list(x.shape)} on {x.device}"
    return said if x.is_contiguous() else f"{said} with strides {list(x.stride())}"


def check_like(
    name: str, x: object, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise ArgumentError unless `x` is a contiguous tensor of a dtype and shape on a device."""
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    fits = x.dtype == dtype and tuple(x.shape) == shape and x.is_contiguous()
    if not fits or x.device != device:
        raise ArgumentError(
            f"{name} must be contiguous {dtype} of shape {list(shape)} on {device}; it is "
            f"{described(x)}"
        )


def check_aligned(name: str, x: Tensor, nbytes: int) -> None:
    """Raise ArgumentError unless `x` starts at a multiple of `nbytes`."""
    if x.data_ptr() % nbytes:
        raise ArgumentError(
            f"{name} must start at a multiple of {nbytes} bytes; it starts "
            f"{x.data_ptr() % nbytes} bytes past one"
        )


def check_device(device: str | torch.device) -> torch.device:
    """Device as tensors on it report it ("cuda" is "cuda:0"); UnsupportedError if unusable."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(
            f"device={device!r} cannot be used here ({reason}); choose 'cpu', or 'cuda' with a GPU "
            "and a torch built for it"
        ) from None


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


def check_distinct(name: str, ids: Tensor) -> None:
    """Raise ArgumentError if an id is there twice; waits for the device."""
    values, counts = torch.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ArgumentError(f"{name} holds {int(values[counts > 1][0])} more than once")
