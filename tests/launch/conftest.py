"""Fixtures of the launch tests: kernels, or what stands in for them, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from launch import stand_in
from store.small_store import PAGES, SHAPE, fill, poisoned

from zf_cute import PageStore, launch, operators


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is said to run kernels, until the test ends."""
    monkeypatch.setattr(launch, "unsupported", lambda device: None)
    monkeypatch.setattr(launch, "_kernel", cache(launch._kernel.__wrapped__))


@pytest.fixture
def kernels(runs_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stand_in` instead of `zf_cute.launch`, and behind the operators on CPU tensors too."""
    for name in stand_in.OPERATIONS:
        monkeypatch.setattr(launch, name, getattr(stand_in, name))


@pytest.fixture
def cpu_operators(kernels: None) -> Iterator[None]:
    """The operators take CPU tensors: what is registered for CUDA is registered for the CPU too."""
    with torch.library._scoped_library("zf_cute", "IMPL") as library:
        for name in stand_in.OPERATIONS:
            library.impl(name, getattr(operators, f"_{name}"), "CPU")
        yield


@pytest.fixture
def store(kernels: None) -> PageStore:
    """Two layers of six empty pages over NaN, of the backend "kernels"."""
    return poisoned(PageStore(SHAPE, PAGES, backend="kernels"))


@pytest.fixture
def used(store: PageStore) -> PageStore:
    """Layer 0: pages 0 and 1 sealed, 2 full, the others empty."""
    fill(store, 0, [0, 1, 2], 22)
    store.seal(0, [0, 1])
    return store


@pytest.fixture
def launched(runs_here: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple, tuple]]:
    """Variants that are asked for and what they are called with; nothing runs."""
    calls: list[tuple[tuple, tuple]] = []

    def kernel(
        device: torch.device,
        name: str,
        dtype: torch.dtype,
        head_dim: int = 0,
        rope: str = "",
        vectors: bool = True,
    ) -> Callable[..., None]:
        assert device == torch.device("cpu")
        return lambda *args: calls.append(((name, dtype, head_dim, rope, vectors), args))

    monkeypatch.setattr(launch, "_kernel", kernel)
    return calls
