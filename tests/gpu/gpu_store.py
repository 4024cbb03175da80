"""Stores on the GPU over NaN, the reference store that the same is done to, and what must agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from store.small_store import NAN, poisoned
from torch import Tensor

from zf_cute import KVShape, PageStore, launch, reference

DEVICE = torch.device("cuda")


def gpu_store(shape: KVShape, num_pages: int) -> PageStore:
    """A store of the kernels, NaN wherever nothing has been written."""
    return poisoned(PageStore(shape, num_pages, device=DEVICE, backend="kernels"))


def nan(*shape: int) -> Tensor:
    """An output that shows what was not written to it."""
    patterns = torch.full(shape, NAN, dtype=torch.int16, device=DEVICE)
    return patterns.view(torch.bfloat16)


def slots_of(ids: Tensor, page_size: int) -> Tensor:
    """Every slot of some pages, page by page, in the dtype of the ids."""
    offsets = torch.arange(page_size, dtype=ids.dtype, device=ids.device)
    return (ids[:, None] * page_size + offsets).flatten()


def decoded(store: PageStore, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`PageStore.read`, into NaN: [n * page_size, heads, head_dim]."""
    layout = store.shape.layout
    shape = (len(ids), layout.page_size, layout.num_kv_heads, layout.head_dim)
    kv, state = store.layer(layer), store.state(layer)
    ids = ids.to(DEVICE)
    k, v = launch.decode_pages(kv, state, ids, k=nan(*shape), v=nan(*shape))
    return k.flatten(0, 1), v.flatten(0, 1)


# ---- equality ----------------------------------------------------------------------------------
def assert_same_bits(got: Tensor, want: Tensor, what: str) -> None:
    """Equal in every bit, compared where `got` lies; the message says how many differ and where."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    if got.dtype == torch.bfloat16:
        got, want = got.contiguous().view(torch.int16), want.contiguous().view(torch.int16)
    want = want.to(got.device)
    if torch.equal(got, want):
        return
    different = torch.nonzero(got != want)
    first = tuple(different[0].tolist())
    mask = (1 << got.element_size() * 8) - 1
    found, wanted = (int(x[first]) & mask for x in (got, want))
    raise AssertionError(
        f"{what}: {len(different)} of {got.numel()} differ; the first, {list(first)}, is "
        f"{found:#x} and should be {wanted:#x}; the last is {different[-1].tolist()}"
    )


def assert_holds(store: PageStore, layer: int, ids: Tensor, k: Tensor, v: Tensor) -> None:
    """Whole pages decode to the given tokens."""
    for name, got, want in zip("kv", decoded(store, layer, ids), (k, v), strict=True):
        assert_same_bits(got, want, f"{name} of layer {layer}")


def used_units(places: Tensor, pool_bytes: int) -> Tensor:
    """[pool_bytes // 16] bool: the units that any place refers to; places are [..., 2]."""
    words = places.reshape(-1, 2).long() & 0xFFFFFFFF
    steps = torch.zeros(pool_bytes // 16 + 1, dtype=torch.int32, device=places.device)
    one = torch.ones(len(words), dtype=torch.int32, device=places.device)
    start, units = words[:, 0] * 8, words[:, 1] // 16
    steps.index_add_(0, start, one)
    steps.index_add_(0, start + units, -one)
    return steps.cumsum(0)[:-1] > 0


def poison_unused(store: PageStore) -> None:
    """NaN over every byte of the pool that no place refers to."""
    unused = ~used_units(store.places, store.pool.numel())
    nans = torch.full((8,), NAN, dtype=torch.int16, device=store.device).view(torch.int64)
    store.pool.view(torch.int64).view(-1, 2)[unused] = nans


def assert_sealed_as_reference(
    store: PageStore, layer: int, ids: Sequence[int] | Tensor, k: Tensor, v: Tensor
) -> None:
    """Some pages have exactly the bytes that the reference encoder makes of their tokens."""
    layout = store.shape.layout
    shape = (-1, layout.page_size, layout.num_kv_heads, layout.head_dim)
    spans, lengths = reference.encode_pages(k.cpu().view(shape), v.cpu().view(shape), layout)
    for item, page in enumerate(ids if isinstance(ids, Sequence) else ids.tolist()):
        assert (store.state(layer).sealed[page] == 1).all(), f"page {page} is not sealed"
        for span, (start, length) in enumerate(store.places[layer, page].tolist()):
            start, length = (start & 0xFFFFFFFF) * 128, length & 0xFFFFFFFF
            what = f"page {page}, span {span} at byte {start}"
            assert length == int(lengths[item, span]), f"{what}: length"
            assert_same_bits(store.pool[start : start + length], spans[item, span, :length], what)


class Pair:
    """A store of the kernels and one of the reference backend, for which the same is done.

    Parameters
    ----------
    shape : KVShape
        Of both.
    num_pages : int
        Of both.
    """

    def __init__(self, shape: KVShape, num_pages: int) -> None:
        """Two empty stores over NaN."""
        self.gpu = gpu_store(shape, num_pages)
        self.cpu = poisoned(PageStore(shape, num_pages, backend="reference"))
        self.shape = shape

    def append(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        *,
        index: torch.dtype = torch.int64,
        views: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Append to both; `views` are the same values on the GPU with other strides."""
        self.cpu.append(layer, k, v, slots)
        gpu_k, gpu_v = (k.to(DEVICE), v.to(DEVICE)) if views is None else views
        self.gpu.append(layer, gpu_k, gpu_v, slots.to(DEVICE, index))

    def seal(self, layer: int, ids: Tensor, *, index: torch.dtype = torch.int64) -> None:
        """Seal in both, to the same sizes."""
        want = self.cpu.seal(layer, ids)
        assert_same_bits(self.gpu.seal(layer, ids.to(DEVICE, index)), want, "sizes that seal says")

    def clear(self, layer: int, ids: Tensor, *, index: torch.dtype = torch.int64) -> None:
        """Clear in both; NaN where the old tokens were, which each backend leaves otherwise."""
        self.cpu.clear(layer, ids)
        self.gpu.clear(layer, ids.to(DEVICE, index))
        for store in (self.cpu, self.gpu):
            homes = store._homes.view(torch.int16)
            homes[layer, ids.to(store.device), :, self.shape.layout.metadata_bytes // 2 :] = NAN

    def assert_same(self, when: str, *, everywhere: bool = False) -> None:
        """The same states and places, and the same bytes in them (or `everywhere` in the pool)."""
        for name in ("places", "_written", "_sealed"):
            assert_same_bits(getattr(self.gpu, name), getattr(self.cpu, name), f"{when}: {name}")
        slack = self.gpu._homes[..., self.shape.layout.raw_span_bytes :].view(torch.int16)
        assert (slack == NAN).all(), f"{when}: something was written between two homes"
        theirs, ours = self.gpu.pool.cpu(), self.cpu.pool
        if not everywhere:
            used = used_units(self.cpu.places, len(ours))
            theirs, ours = (x.view(torch.int64).view(-1, 2) * used[:, None] for x in (theirs, ours))
        if not torch.equal(theirs, ours):
            different = torch.nonzero(
                (theirs.view(torch.uint8) != ours.view(torch.uint8)).flatten()
            )
            stride = self.shape.layout.span_stride
            home, inside = divmod(int(different[0]), stride)
            page, span = divmod(home, self.shape.layout.spans)
            layer, page = divmod(page, self.cpu.num_pages)
            raise AssertionError(
                f"{when}: {len(different)} bytes of the pool differ, from byte {inside} of the "
                f"home of layer {layer}, page {page}, span {span} (the metadata has "
                f"{self.shape.layout.metadata_bytes} bytes, a span at most {stride})"
            )
