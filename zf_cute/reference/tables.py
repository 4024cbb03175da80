"""Constant tensors that the reference backend looks things up in, made once a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from torch import Tensor

Key = ParamSpec("Key")


def device_table(build: Callable[Key, Tensor]) -> Callable[Key, Tensor]:
    """Keep what a function of hashable arguments returns.

    Only plain tensors are kept: a fake one, made while torch.compile traces, must not outlive it.
    """
    made: dict[tuple[object, ...], Tensor] = {}

    @wraps(build)
    def table(*args: Key.args, **kwargs: Key.kwargs) -> Tensor:
        key = (*args, *sorted(kwargs.items()))
        found = made.get(key)
        if found is None:
            found = build(*args, **kwargs)
            if type(found) is Tensor:
                made[key] = found
        return found

    return table
