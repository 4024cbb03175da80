"""A layer's pages: the byte pool and the places of spans, and what is known of each page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zf_cute.checks import check_aligned, check_like, check_tensor, described
from zf_cute.errors import ArgumentError, UnsupportedError
from zf_cute.kernels.refusals import Refusal
from zf_layouts import PageLayout
from zf_layouts.page import SPAN_ALIGNMENT, UNIT

PLACE_BYTES = 8
"""A place is read and written as a whole."""

KERNEL_SPAN_LIMIT = 512 << 20
"""Bytes that a raw span stays below on a GPU: kernels count 16-byte units inside a span in 32 bits,
with room for 32 sizes that say "malformed"."""


@dataclass(frozen=True, eq=False)
class LayerPages:
    """View of one layer's pages; holds no bytes of its own.

    Attributes
    ----------
    pool : Tensor
        [bytes] uint8, contiguous: where the spans of this layer (and of others) lie.
    places : Tensor
        [num_pages, spans, 2] int32, contiguous, to be read as u32: start of each span in units of
        128 bytes from the pool's first byte, and its length in bytes.  Changes as pages are sealed
        or moved.
    layout : PageLayout
        Where every value of a page lies.

    Raises
    ------
    ArgumentError
        If the pool or the places are not such tensors.
    """

    pool: Tensor
    places: Tensor
    layout: PageLayout

    def __post_init__(self) -> None:
        """Refuse tensors that cannot be a pool and its places."""
        pool, places = self.pool, self.places
        if not isinstance(self.layout, PageLayout):
            raise ArgumentError(
                f"layout is a {type(self.layout).__name__}; a PageLayout is wanted: shape.layout"
            )
        check_tensor("pool", pool)
        check_tensor("places", places)
        if pool.dtype != torch.uint8 or pool.dim() != 1 or not pool.is_contiguous():
            raise ArgumentError(
                f"pool must be a contiguous uint8 tensor of one dimension; it is {described(pool)}"
            )
        if pool.storage_offset() % UNIT:
            raise ArgumentError(f"pool must start at a multiple of {UNIT} bytes of its storage")
        want = (self.layout.spans, 2)
        if places.dtype != torch.int32 or places.dim() != 3 or tuple(places.shape[1:]) != want:
            raise ArgumentError(
                f"places must be int32 of shape [num_pages, {want[0]}, 2], not {places.dtype} of "
                f"shape {tuple(places.shape)}"
            )
        if not places.is_contiguous():
            raise ArgumentError(f"places must be contiguous; it is {described(places)}")
        if pool.is_cuda and pool.data_ptr() % SPAN_ALIGNMENT:
            raise ArgumentError(f"pool must start at a multiple of {SPAN_ALIGNMENT} bytes on a GPU")
        if pool.is_cuda and self.layout.raw_span_bytes >= KERNEL_SPAN_LIMIT:
            raise UnsupportedError(
                f"heads_per_span={self.layout.heads_per_span} makes spans of "
                f"{self.layout.raw_span_bytes} bytes; on a GPU they are below {KERNEL_SPAN_LIMIT}"
            )
        if pool.is_cuda:
            check_aligned("places", places, PLACE_BYTES)
            if len(places) * self.layout.page_size >> 31:
                raise UnsupportedError(
                    f"{len(places)} pages of {self.layout.page_size} tokens: on a GPU slots are "
                    "below 2**31"
                )
        if places.device != pool.device:
            raise ArgumentError(f"places is on {places.device} and the pool on {pool.device}")

    @property
    def num_pages(self) -> int:
        """Page ids run from 0 to num_pages - 1."""
        return self.places.shape[0]


@dataclass(frozen=True, eq=False)
class PageState:
    """What writers know of one layer's pages; views, like `LayerPages`.

    Attributes
    ----------
    written : Tensor
        [num_pages] int64: bit t of a page is set once its slot t has been written.
    sealed : Tensor
        [num_pages, spans] int32: 1 once a span is sealed.
    claimed : Tensor
        [num_pages] int32: 1 + the item of the call that seals a page, 0 before.
    homes : Tensor
        [num_pages, spans, 2] int32, to be read as u32: the place that a span has when it is raw.
    refused : Tensor
        [len(Refusal)] int32: what kernels refused, counted (zf_cute.kernels.refusals).
    layer : int
        Number of the layer, for messages.

    Raises
    ------
    ArgumentError
        If a tensor is not of that shape and dtype, is not contiguous, or on another device than the
        others.
    """

    written: Tensor
    sealed: Tensor
    claimed: Tensor
    homes: Tensor
    refused: Tensor
    layer: int = 0

    def __post_init__(self) -> None:
        """Refuse tensors that are no state."""
        check_tensor("sealed", self.sealed)
        if self.sealed.dim() != 2:
            raise ArgumentError(
                "sealed must be contiguous torch.int32 of shape [num_pages, spans]; it is "
                f"{described(self.sealed)}"
            )
        pages, spans = self.sealed.shape
        for name, dtype, shape in (
            ("sealed", torch.int32, (pages, spans)),
            ("written", torch.int64, (pages,)),
            ("claimed", torch.int32, (pages,)),
            ("homes", torch.int32, (pages, spans, 2)),
            ("refused", torch.int32, (len(Refusal),)),
        ):
            check_like(name, getattr(self, name), dtype, shape, self.sealed.device)
        if self.sealed.is_cuda:
            check_aligned("homes", self.homes, PLACE_BYTES)
