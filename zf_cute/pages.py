"""A layer's pages as attention sees them: a byte pool and the places of its spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zf_layouts import PageLayout

if TYPE_CHECKING:
    from torch import Tensor


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
    """

    pool: Tensor
    places: Tensor
    layout: PageLayout

    @property
    def num_pages(self) -> int:
        """Page ids run from 0 to num_pages - 1."""
        return self.places.shape[0]
