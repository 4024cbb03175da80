"""Constant tensors that the reference backend looks things up in, made once a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps

from torch import Tensor


def device_table(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep what a function of hashable arguments returns.

    Only plain tensors are kept: a fake one, made while torch.compile traces, must not outlive it.
    """
    made: dict[tuple[Hashable, ...], Tensor] = {}

    @wraps(build)
    def table(*args: Hashable) -> Tensor:
        found = made.get(args)
        if found is None:
            found = build(*args)
            if type(found) is Tensor:
                made[args] = found
        return found

    return table
