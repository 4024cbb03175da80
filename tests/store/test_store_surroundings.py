"""PageStore: inference mode, copies, default devices and other surroundings change nothing."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from bits import (
    mixed_values,
    same_bits,
)
from torch._subclasses import FakeTensorMode

import zf_cute.reference.writing
from zf_cute import (
    ArgumentError,
    KVShape,
    PageStore,
)


# ---- the caller's surroundings -----------------------------------------------------------------
def _round(store: PageStore, seed: int) -> None:
    """Append, seal, read, clear."""
    k, v = mixed_values((16, 2, 64), seed), mixed_values((16, 2, 64), seed + 1)
    store.append(0, k, v, torch.arange(16))
    store.seal(0, 0)
    for read, given in zip(store.read(0, 0), (k, v), strict=True):
        assert same_bits(read, given)
    store.clear(0, 0)


def test_a_store_made_under_inference_mode_is_an_ordinary_one() -> None:
    """Engines allocate under inference_mode, and write wherever they please."""
    with torch.inference_mode():
        store = PageStore(KVShape(1, 2, 2, 64), 2)
        _round(store, 1)
    _round(store, 2)


@pytest.mark.parametrize("through", [pickle.dumps, copy.deepcopy])
def test_a_copied_store_is_whole(through: Callable) -> None:
    """Its tables and its pool must still be of one piece."""
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    _round(store, 3)
    made = through(store)
    _round(pickle.loads(made) if isinstance(made, bytes) else made, 4)


@pytest.mark.parametrize("through", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_what_a_copied_store_does_shows_in_it(through: Callable) -> None:
    """Layers' views are views of the copy's tensors; the first store does not notice."""
    store = PageStore(KVShape(2, 2, 2, 64, heads_per_span=1), 3)
    k, v = mixed_values((32, 2, 64), 8), mixed_values((32, 2, 64), 9)
    store.append(1, k, v, torch.arange(32))
    store.seal(1, [0])
    made = through(store)
    for layer in range(2):
        (kv, state), whole = (made.layer(layer), made.state(layer)), vars(made)
        for view, name in (
            (kv.places, "places"),
            (state.homes, "_raw_places"),
            (state.written, "_written"),
            (state.sealed, "_sealed"),
            (state.claimed, "_claimed"),
        ):
            assert view.data_ptr() == whole[name][layer].data_ptr(), name
        assert kv.pool is made.pool
        assert state.refused is made._refused
        assert state.layer == layer
    sizes = made.seal(1, [1])
    made.append(1, k[:16], v[:16], torch.arange(32, 48))
    made.seal(1, [2])
    assert made.is_sealed(1, range(3)).tolist() == [True] * 3
    assert torch.equal(made.page_bytes(1, 1), sizes)
    assert torch.equal(made.layer(1).places, made.places[1])
    assert same_bits(made.read(1, range(3))[0], torch.cat([k, k[:16]]))
    assert store.is_sealed(1, range(3)).tolist() == [True, False, False]


def test_the_default_device_is_not_asked() -> None:
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    x = mixed_values((16, 2, 64), 5)
    store.append(0, x, x, torch.arange(16))
    with torch.device("meta"):
        store.seal(0, 0)
    assert same_bits(store.read(0, 0)[0], x)


def test_values_that_lie_in_the_pool_are_read_before_it_is_written() -> None:
    """V may be a view of bytes that K is about to overwrite."""
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    k = mixed_values((16, 2, 64), 6)
    v = store.pool.view(torch.bfloat16)[64 : 64 + k.numel()].view(k.shape)
    before = v.clone()
    store.append(0, k, v, torch.arange(16))
    assert same_bits(store.read(0, 0)[1], before)


def test_fake_tensors_leave_nothing_behind() -> None:
    """Tables made while torch.compile traces must not be kept."""
    layout = KVShape(1, 2, 2, 64, page_size=32, rope="interleaved").layout
    with FakeTensorMode():
        x = torch.empty(1, 32, 2, 64, dtype=torch.bfloat16)
        with contextlib.suppress(Exception):
            zf_cute.reference.encode_pages(x, x, layout)
    x = mixed_values((1, 32, 2, 64), 7)
    assert zf_cute.reference.encode_pages(x, x, layout)[1].numel() == 1


def test_numpy_integers_are_page_ids() -> None:
    store = PageStore(KVShape(1, 2, 2, 64), 2)
    assert store.is_sealed(0, np.arange(2)).tolist() == [False, False]
    for pages, message in ((1.5, "must be ints"), ("ab", "must be ints"), ([10**30], str(10**30))):
        with pytest.raises(ArgumentError, match=message):
            store.read(0, pages)
