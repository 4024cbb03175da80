"""LayerPages and PageState refuse tensors that cannot be what they are named for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from store.small_store import PAGES, SHAPE

from zf_cute import ArgumentError, LayerPages, PageState, PageStore, UnsupportedError

SPLIT = replace(SHAPE, heads_per_span=1)  # two spans a page


@pytest.fixture
def kv() -> LayerPages:
    return PageStore(SPLIT, PAGES).layer(1)


@pytest.fixture
def state() -> PageState:
    return PageStore(SPLIT, PAGES).state(1)


def _pool(count: int = 1 << 16) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


PLACES = torch.zeros(PAGES, 2, 2, dtype=torch.int32)
LAYER_PAGES = {
    "pool is bytes": ("pool", bytes(4096), "pool is a bytes; a torch tensor is wanted"),
    "pool is int8": ("pool", _pool().view(torch.int8), "pool must be a contiguous uint8 tensor of"),
    "pool has rank 2": ("pool", _pool().view(-1, 128), "pool must be .* of one dimension"),
    "pool has gaps": ("pool", _pool()[::2], "pool must be a contiguous"),
    "pool begins askew": ("pool", _pool()[8:], "pool must start at a multiple of 16 bytes"),
    "places is a list": ("places", PLACES.tolist(), "places is a list; a torch tensor is wanted"),
    "places is int64": ("places", PLACES.long(), r"places must be int32 .*, not torch.int64"),
    "places has rank 2": ("places", PLACES[:, 0], r"\[num_pages, 2, 2\], .* shape \(6, 2\)"),
    "places has one span": ("places", PLACES[:, :1], r"\[num_pages, 2, 2\], .* shape \(6, 1, 2\)"),
    "places has three words": ("places", PLACES.repeat(1, 1, 2)[..., :3], r"shape \(6, 2, 3\)"),
    "places has gaps": ("places", PLACES.repeat(2, 1, 1)[::2], "places must be contiguous"),
    "places is elsewhere": ("places", PLACES.to("meta"), "places is on meta and the pool on cpu"),
}


@pytest.mark.parametrize("case", LAYER_PAGES)
def test_layer_pages(kv: LayerPages, case: str) -> None:
    name, value, message = LAYER_PAGES[case]
    with pytest.raises(ArgumentError, match=message):
        replace(kv, **{name: value})


@pytest.fixture
def on_a_gpu(kv: LayerPages, state: PageState, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every tensor says that it is on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))


def aligned_pool() -> torch.Tensor:
    """A pool that begins at a multiple of 128 bytes, as on a GPU."""
    flat = _pool()
    return flat[-flat.data_ptr() % 128 :]


def askew(x: torch.Tensor) -> torch.Tensor:
    """The same values from 4 bytes past a multiple of 8 on."""
    flat = torch.empty(x.numel() + 3, dtype=x.dtype)
    first = 1 + flat.data_ptr() % 8 // 4
    return flat[first : first + x.numel()].view(x.shape).copy_(x)


def test_places_that_begin_askew(kv: LayerPages, state: PageState, on_a_gpu: None) -> None:
    """Kernels read a place as a whole: 8 bytes at a time."""
    said = "must start at a multiple of 8 bytes; it starts 4 bytes past one"
    with pytest.raises(ArgumentError, match=f"^places {said}$"):
        replace(kv, pool=aligned_pool(), places=askew(PLACES))
    with pytest.raises(ArgumentError, match=f"^homes {said}$"):
        replace(state, homes=askew(HOMES))


def test_places_may_begin_anywhere_on_the_cpu(kv: LayerPages, state: PageState) -> None:
    """The reference reads what torch can."""
    assert replace(kv, places=askew(PLACES)).num_pages == PAGES
    replace(state, homes=askew(HOMES))


@pytest.mark.parametrize("size", [16, 64])
def test_slots_stay_below_2_to_the_31_on_a_gpu(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Whatever their dtype: kernels count slots in 32 bits."""
    layout = replace(SHAPE, page_size=size).layout
    pages = (1 << 31) // size
    places = torch.empty(pages, 1, 2, dtype=torch.int32)  # memory that nobody touches
    pool = aligned_pool()
    LayerPages(pool, places, layout)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    with pytest.raises(UnsupportedError, match=rf"^{pages} pages of {size} tokens: .*2\*\*31"):
        LayerPages(pool, places, layout)
    assert LayerPages(pool, places[:-1], layout).num_pages == pages - 1


def test_layer_pages_that_fit(kv: LayerPages) -> None:
    """A pool need not be a store's, nor as long as all homes; places may be those of any pages."""
    made = LayerPages(_pool(100), PLACES[:3], SPLIT.layout)
    assert made.num_pages == 3
    assert replace(kv, pool=_pool()[16:]).num_pages == PAGES


WRITTEN, SEALED = torch.zeros(PAGES, dtype=torch.int64), torch.zeros(PAGES, 2, dtype=torch.int32)
HOMES, REFUSED = torch.zeros(PAGES, 2, 2, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
CLAIMED = torch.zeros(PAGES, dtype=torch.int32)
PAGE_STATES = {
    "written is a list": ("written", [0], "written is a list; a torch tensor is wanted"),
    "written is int32": ("written", WRITTEN.int(), "torch.int32 of shape [6] on cpu"),
    "written of fewer pages": ("written", WRITTEN[:5], "torch.int64 of shape [5] on cpu"),
    "written has rank 2": ("written", WRITTEN[None], "torch.int64 of shape [1, 6] on cpu"),
    "written has gaps": ("written", WRITTEN.repeat(2)[::2], "shape [6] on cpu with strides [2]"),
    "written is elsewhere": ("written", WRITTEN.to("meta"), "torch.int64 of shape [6] on meta"),
    "sealed is None": ("sealed", None, "sealed is a NoneType; a torch tensor is wanted"),
    "sealed has rank 1": ("sealed", SEALED[:, 0], "torch.int32 of shape [6] on cpu"),
    "sealed is bool": ("sealed", SEALED.bool(), "torch.bool of shape [6, 2] on cpu"),
    "sealed has gaps": ("sealed", SEALED.repeat(1, 2)[:, ::2], "with strides [4, 2]"),
    "claimed is None": ("claimed", None, "claimed is a NoneType; a torch tensor is wanted"),
    "claimed is int64": ("claimed", CLAIMED.long(), "torch.int64 of shape [6] on cpu"),
    "claimed of spans": ("claimed", SEALED, "torch.int32 of shape [6, 2] on cpu"),
    "claimed has gaps": ("claimed", CLAIMED.repeat(2)[::2], "shape [6] on cpu with strides [2]"),
    "homes is int64": ("homes", HOMES.long(), "torch.int64 of shape [6, 2, 2] on cpu"),
    "homes of one span": ("homes", HOMES[:, :1], "torch.int32 of shape [6, 1, 2] on cpu"),
    "homes is elsewhere": ("homes", HOMES.to("meta"), "torch.int32 of shape [6, 2, 2] on meta"),
    "refused is short": ("refused", REFUSED[:5], "torch.int32 of shape [5] on cpu"),
    "refused is int64": ("refused", REFUSED.long(), "torch.int64 of shape [6] on cpu"),
    "refused is elsewhere": ("refused", REFUSED.to("meta"), "torch.int32 of shape [6] on meta"),
}
SHAPES = {
    "written": "torch.int64 of shape [6]",
    "sealed": "torch.int32 of shape [6, 2]",
    "claimed": "torch.int32 of shape [6]",
    "homes": "torch.int32 of shape [6, 2, 2]",
    "refused": "torch.int32 of shape [6]",
}


@pytest.mark.parametrize("case", PAGE_STATES)
def test_page_states(state: PageState, case: str) -> None:
    """Messages name the tensor, what was wanted, and what it was."""
    name, value, said = PAGE_STATES[case]
    with pytest.raises(ArgumentError) as caught:
        replace(state, **{name: value})
    message = str(caught.value)
    assert said in message
    if " is a " not in said:
        wanted = f"{SHAPES[name]} on cpu"
        if "rank 1" in case:
            wanted = "torch.int32 of shape [num_pages, spans]"
        assert message.startswith(f"{name} must be contiguous {wanted}; it is ")


def test_a_state_of_other_pages(state: PageState) -> None:
    """Every tensor must be of the same pages: the first that is not is named."""
    with pytest.raises(
        ArgumentError, match=r"^written must be .* of shape \[3\] on cpu; it is .* \[6\]"
    ):
        replace(state, sealed=SEALED[:3])
    made = PageState(WRITTEN[:3], SEALED[:3], CLAIMED[:3], HOMES[:3], REFUSED)
    assert made.layer == 0
