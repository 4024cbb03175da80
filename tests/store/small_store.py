"""A small store over NaN, and what the store tests do to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from bits import (
    mixed_values,
    same_bits,
)

from zf_cute import (
    KVShape,
    PageStore,
)

LAYERS, PAGES, HEADS, DIM, PAGE = 2, 6, 2, 64, 16
SHAPE = KVShape(LAYERS, 4, HEADS, DIM)
NAN = 0x7FC0


def poisoned(store: PageStore) -> PageStore:
    """Fill all of the pool that is no metadata with NaN: what was never written is no zero."""
    layout = store.shape.layout
    homes = store.pool.view(-1, layout.span_stride)[:, layout.metadata_bytes :]
    homes.view(torch.int16).fill_(NAN)
    return store


def tokens(count: int, seed: int, heads: int = HEADS, dim: int = DIM) -> tuple[torch.Tensor, ...]:
    """K and V of some tokens; in whole pages they make blocks of all kinds."""
    padded = -(-count // 16) * 16
    return tuple(mixed_values((padded, heads, dim), seed + i)[:count] for i in range(2))


def fill(store: PageStore, layer: int, pages: Iterable[int], seed: int) -> tuple[torch.Tensor, ...]:
    """Append whole pages; returns their K and V."""
    size = store.shape.page_size
    slots = torch.cat([page * size + torch.arange(size) for page in pages])
    k, v = tokens(len(slots), seed, store.shape.num_kv_heads, store.shape.head_dim)
    store.append(layer, k, v, slots)
    return k, v


def assert_holds(
    store: PageStore, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """The given slots read back as the given tokens."""
    got_k, got_v = store.read(layer, torch.arange(store.num_pages))
    assert same_bits(got_k[slots.long()], k)
    assert same_bits(got_v[slots.long()], v)


def snapshot(store: PageStore) -> dict[str, torch.Tensor]:
    """Every tensor that the store holds: bytes, places and states."""
    return {n: x.clone() for n, x in vars(store).items() if isinstance(x, torch.Tensor)}


def assert_unchanged(store: PageStore, before: dict[str, torch.Tensor]) -> None:
    """No tensor of the store differs from the snapshot in any bit."""
    assert {"pool", "places"} <= set(before)
    for name, x in before.items():
        assert torch.equal(vars(store)[name], x), f"{name} changed"
