"""Bytes that a kernel must read and write: each once, and no byte more.

What a launch needs is counted as FORMAT.md and the launch functions define it; lines fetched twice
or whole sectors around a few bytes are the kernel's loss, not its work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zf_layouts import PageLayout

VALUE_BYTES = 2
SLOT_BYTES = 8
"""A slot of `slot_mapping`, int64."""
PAGE_ID_BYTES = 8
"""A page id, int64."""
PLACE_BYTES = 8
"""Start and length of a span."""
WRITTEN_BYTES = 8
"""Which slots of a page have been written, one bit each."""
SPAN_WORD_BYTES = 4
"""An int32 for each span: whether it is sealed, where to put it, how long it became."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch by what they are.

    Attributes
    ----------
    read, written : dict
        Bytes by name.
    """

    read: dict[str, int]
    written: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes read and bytes written."""
        return sum(self.read.values()) + sum(self.written.values())

    def record(self) -> dict[str, Any]:
        """``bytes`` of a JSON record."""
        return {
            "read": self.read,
            "written": self.written,
            "read_total": sum(self.read.values()),
            "written_total": sum(self.written.values()),
            "total": self.total,
        }


def copy(nbytes: int) -> Traffic:
    """Count a copy of `nbytes` bytes from one buffer to another."""
    return Traffic({"source": nbytes}, {"destination": nbytes})


def append(layout: PageLayout, rows: int, pages: int) -> Traffic:
    """Count an append of `rows` tokens that fall into `pages` different pages."""
    values = rows * 2 * layout.num_kv_heads * layout.head_dim * VALUE_BYTES
    return Traffic(
        {
            "rows": values,
            "slots": rows * SLOT_BYTES,
            "places": pages * layout.spans * PLACE_BYTES,
            "state": pages * (WRITTEN_BYTES + layout.spans * SPAN_WORD_BYTES),
        },
        {"rows": values, "state": pages * WRITTEN_BYTES},
    )


def encode(layout: PageLayout, lengths: Iterable[int], *, in_place: bool) -> Traffic:
    """Count an encode of raw pages.

    Parameters
    ----------
    layout : PageLayout
        Of the pages.
    lengths : iterable of int
        Bytes of every span once sealed, metadata included; `layout.spans` of them a page.
    in_place : bool
        Over the raw bytes: a span that stays raw throughout is not written again.
    """
    each = list(lengths)
    spans, pages = len(each), len(each) // layout.spans
    blocks = 2 * layout.num_kv_heads * layout.raw_part_bytes
    whole = layout.raw_span_bytes
    read = {
        # A raw page's metadata is the same for all of them and need not be read.
        "blocks": pages * blocks,
        "page_ids": pages * PAGE_ID_BYTES,
        "places": spans * PLACE_BYTES,
        "state": pages * WRITTEN_BYTES + spans * SPAN_WORD_BYTES,
    }
    if not in_place:
        read["destinations"] = spans * SPAN_WORD_BYTES
    return Traffic(
        read,
        {
            "spans": sum(n for n in each if not (in_place and n == whole)),
            "places": spans * PLACE_BYTES,
            "state": spans * SPAN_WORD_BYTES,
            "lengths": spans * SPAN_WORD_BYTES,
        },
    )


def decode_pages(layout: PageLayout, lengths: Iterable[int]) -> Traffic:
    """Count a decode of pages whose spans are of these lengths; `layout.spans` of them a page."""
    each = list(lengths)
    pages = len(each) // layout.spans
    return Traffic(
        {
            "spans": sum(each),
            "page_ids": pages * PAGE_ID_BYTES,
            "places": len(each) * PLACE_BYTES,
        },
        {"values": pages * layout.page_values * VALUE_BYTES},
    )
