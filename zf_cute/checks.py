"""Checks of arguments that several objects share."""

from __future__ import annotations

import torch

from zf_cute.errors import ArgumentError, UnsupportedError


def check_tensor(name: str, x: object) -> None:
    """Raise ArgumentError unless `x` is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(x).__name__}; a torch tensor is wanted")


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
