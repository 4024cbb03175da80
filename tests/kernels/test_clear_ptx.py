"""The clear kernel's PTX makes pages raw and empty, as the reference backend does."""

from __future__ import annotations

import pytest
import torch
from kernels.ptx import SCHEDULES
from kernels.twins import Twins, distinct_rows


def used(twins: Twins, seed: int = 0) -> Twins:
    """Page 0 sealed elsewhere, 1 sealed in place, 2 full and raw, 3 with one token, 4 empty."""
    layout = twins.layout
    tokens = 3 * layout.page_size
    k, v = distinct_rows(tokens, layout.num_kv_heads, layout.head_dim, seed)
    shape = (3, layout.page_size, layout.num_kv_heads, layout.head_dim)
    twins.fill([0, 1, 2], torch.full_like(k, 1.5).view(shape), v.view(shape))
    twins.encode([1])
    twins.encode([0], twins.expected._raw_places[1, 5:6, :, 0])
    twins.append(k[:1], v[:1], torch.tensor([3 * layout.page_size + 7]))
    return twins


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "heads_per_span"),
    # 1, 3 and 40 units of metadata in a span: less than a warp writes at once, and more.
    [(1, 64, 16, 1), (3, 64, 16, 3), (2, 64, 32, 1), (8, 256, 64, 8)],
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_in_any_state(
    heads: int, head_dim: int, page_size: int, heads_per_span: int, index: torch.dtype
) -> None:
    twins = Twins(heads, head_dim, page_size, heads_per_span=heads_per_span, pages=6)
    if heads < 8:
        used(twins)
    else:  # nothing in so large a page but what clearing is about
        for store in (twins.expected, twins.store):
            store.pool.fill_(0xFF)
            store._sealed.fill_(1)
            store._claimed.fill_(3)
            store._written.fill_(-1)
            store.places[1].fill_(7)
    twins.clear([4, 0, 3], index)
    twins.clear([1], index)
    twins.refuses()


def test_a_cleared_page_takes_tokens_again() -> None:
    twins = used(Twins(2, 64, 16, heads_per_span=1, pages=6))
    twins.clear([0, 1])
    k, v = distinct_rows(32, 2, 64, 3)
    twins.append(k, v, torch.arange(32))
    twins.encode([1])
    twins.decode([0, 1])
    twins.refuses()


@pytest.mark.parametrize(
    ("schedule", "seed"), [*((s, 0) for s in SCHEDULES), ("random", 1), ("random", 2)]
)
def test_ids_given_twice_and_out_of_range(schedule: str, seed: int) -> None:
    twins = used(Twins(2, 64, 16, heads_per_span=1, pages=6, schedule=schedule, seed=seed))
    wrong = [6, -1, 2**32 + 1, -(2**63), 2**31]
    twins.clear([1, *wrong, 1, 0])
    twins.refuses(PAGE_OUTSIDE=len(wrong))


@pytest.mark.parametrize("pool_at", [(1 << 32) - 8 * 4224, (1 << 39) - 12 * 4224])
def test_pools_of_up_to_512_gib(pool_at: int) -> None:
    twins = Twins(1, 64, 16, pages=6, pool_at=pool_at)
    assert twins.layout.page_stride == 4224
    used(twins)
    twins.clear([0, 1, 5])
    twins.refuses()
