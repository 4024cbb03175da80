"""Fixtures of the tests on a GPU: stores that must have refused nothing when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from gpu.gpu_store import Pair, gpu_store

from zf_cute import KVShape, PageStore


@pytest.fixture
def made() -> Iterator[Callable[[KVShape, int], PageStore]]:
    """`gpu_store`, checked when the test ends; a test that expects refusals checks itself."""
    stores: list[PageStore] = []

    def make(shape: KVShape, num_pages: int) -> PageStore:
        stores.append(gpu_store(shape, num_pages))
        return stores[-1]

    yield make
    for store in stores:
        store.check()
    stores.clear()
    torch.cuda.empty_cache()  # the next test may need most of the device


@pytest.fixture
def paired() -> Iterator[Callable[[KVShape, int], Pair]]:
    """`Pair`, checked when the test ends."""
    pairs: list[Pair] = []

    def make(shape: KVShape, num_pages: int) -> Pair:
        pairs.append(Pair(shape, num_pages))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.gpu.check()
