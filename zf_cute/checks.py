"""Checks of arguments that several objects share."""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute.errors import ArgumentError, UnsupportedError

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


def check_distinct(name: str, ids: Tensor) -> None:
    """Raise ArgumentError if an id is there twice; waits for the device."""
    values, counts = torch.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ArgumentError(f"{name} holds {int(values[counts > 1][0])} more than once")
