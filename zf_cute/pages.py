"""A layer's pages as attention sees them: a byte pool and the places of its spans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zf_cute.errors import ArgumentError
from zf_layouts import PageLayout
from zf_layouts.page import SPAN_ALIGNMENT, UNIT


@dataclass(frozen=True, eq=False)
class LayerPages:
    """View of one layer's pages; holds no bytes of its own.

    Attributes
    ----------
    pool : Tensor
        [bytes] uint8, contiguous: where the spans of this layer (and of others) lie.
    places : Tensor
        [num_pages, spans, 2] int32, to be read as u32: start of each span in units of 128 bytes
        from the pool's first byte, and its length in bytes.  Changes as pages are sealed or moved.
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
        if pool.dtype != torch.uint8 or pool.dim() != 1 or not pool.is_contiguous():
            raise ArgumentError("pool must be a contiguous uint8 tensor of one dimension")
        if pool.storage_offset() % UNIT:
            raise ArgumentError(f"pool must start at a multiple of {UNIT} bytes of its storage")
        want = (self.layout.spans, 2)
        if places.dtype != torch.int32 or places.dim() != 3 or tuple(places.shape[1:]) != want:
            raise ArgumentError(
                f"places must be int32 of shape [num_pages, {want[0]}, 2], not {places.dtype} of "
                f"shape {tuple(places.shape)}"
            )
        if pool.is_cuda and pool.data_ptr() % SPAN_ALIGNMENT:
            raise ArgumentError(f"pool must start at a multiple of {SPAN_ALIGNMENT} bytes on a GPU")
        if places.device != pool.device:
            raise ArgumentError(f"places is on {places.device} and the pool on {pool.device}")

    @property
    def num_pages(self) -> int:
        """Page ids run from 0 to num_pages - 1."""
        return self.places.shape[0]
