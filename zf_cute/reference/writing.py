"""Write pages: append rows, encode in place, clear; each looks at all that could be wrong first.

Contents of tensors (slots, page ids, the state of pages) are checked on the host, so these wait for
the device.  A call that raises one of zf_cute's errors has changed nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute.arguments import check_rows, check_slot_mapping
from zf_cute.checks import check_distinct
from zf_cute.errors import ArgumentError, FormatError, PageStateError
from zf_cute.pages import LayerPages, PageState
from zf_cute.reference.pages import decode_pages, encode_pages
from zf_cute.reference.tables import device_table
from zf_layouts import PARTS, PageLayout
from zf_layouts.page import SPAN_ALIGNMENT

VALUES_AT_ONCE = 1 << 22
"""Values encoded at a time: bounds the working memory to about 200 MB."""


@device_table
def _raw_words(layout: PageLayout, device: torch.device) -> Tensor:
    """[page_size, 2, num_kv_heads, head_dim] int64: a value's 16-bit word in its raw span."""
    word = torch.tensor(
        [
            [
                [layout.raw_byte(0, part, token, dim) // 2 for dim in range(layout.head_dim)]
                for part in PARTS
            ]
            for token in range(layout.page_size)
        ],
        device=device,
    )
    in_span = torch.arange(layout.num_kv_heads, device=device) % layout.heads_per_span
    # K and V of a head are neighbours: two raw parts a head.
    return word[:, :, None] + (in_span * layout.raw_part_bytes).view(1, 1, -1, 1)


@device_table
def raw_metadata(layout: PageLayout, device: torch.device) -> Tensor:
    """[metadata_bytes] uint8: metadata of a raw span."""
    return torch.tensor(list(layout.raw_metadata()), dtype=torch.uint8, device=device)


def _rows_of_128(kv: LayerPages, places: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
    """The pool as rows of 128 bytes, and the rows of the first `nbytes` of some spans.

    The second is [..., ceil(nbytes / 128)] for places [..., 2].
    """
    start = places[..., 0].long() & 0xFFFFFFFF
    count = -(-nbytes // SPAN_ALIGNMENT)
    rows = start[..., None] + torch.arange(count, device=start.device)
    whole = kv.pool.numel() // SPAN_ALIGNMENT * SPAN_ALIGNMENT
    return kv.pool[:whole].view(-1, SPAN_ALIGNMENT), rows


def append(kv: LayerPages, state: PageState, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write new tokens into raw pages.

    Parameters
    ----------
    kv, state : LayerPages, PageState
        The layer.
    k, v : Tensor
        [tokens, num_kv_heads, head_dim] bfloat16, any strides.
    slot_mapping : Tensor
        [tokens] int32 or int64: ``page * page_size + offset``, or -1 for a token to skip.

    Raises
    ------
    UnsupportedError, ArgumentError, PageStateError
        As `PageStore.append` says.
    """
    layout = kv.layout
    check_slot_mapping(kv, slot_mapping, check_rows(kv, k, v)[0])
    slots = slot_mapping.long()
    count = kv.num_pages * layout.page_size
    wrong = (slots < -1) | (slots >= count)
    if wrong.any():
        raise ArgumentError(
            f"slot {int(slots[wrong][0])} is outside 0..{count - 1} "
            f"({kv.num_pages} pages of {layout.page_size}; -1 skips a token)"
        )
    kept = torch.nonzero(slots >= 0).flatten()
    slots = slots[kept]
    check_distinct("slot_mapping", slots)
    if not len(kept):
        return
    pages, offsets = slots // layout.page_size, slots % layout.page_size
    blocked = state.sealed[pages].any(1)
    if blocked.any():
        raise PageStateError(
            f"page {int(pages[blocked][0])} of layer {state.layer} is full and sealed: give new "
            "tokens a new page, or clear(layer, pages) to use its id again"
        )
    span = torch.arange(layout.num_kv_heads, device=slots.device) // layout.heads_per_span
    start = (kv.places[pages, :, 0].long() & 0xFFFFFFFF)[:, span] * (SPAN_ALIGNMENT // 2)
    words = _raw_words(layout, slots.device)[offsets] + start[:, None, :, None]
    rows = torch.stack([k[kept], v[kept]], 1).view(torch.int16)
    distinct, written = _with_written(state, pages, offsets)
    kv.pool.view(torch.int16)[words] = rows
    state.written[distinct] = written


def _with_written(state: PageState, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Pages, each once, and what `written` is for them once these slots are."""
    device = pages.device
    distinct, row = torch.unique(pages, return_inverse=True)
    new = torch.zeros(len(distinct), 64, dtype=torch.int64, device=device)
    new[row, offsets] = 1
    bit = torch.ones(64, dtype=torch.int64, device=device) << torch.arange(64, device=device)
    return distinct, state.written[distinct] | (new * bit).sum(1)


def encode(kv: LayerPages, state: PageState, pages: Tensor) -> Tensor:
    """Encode full raw pages in place.

    Parameters
    ----------
    kv, state : LayerPages, PageState
        The layer.
    pages : Tensor
        [n] int64 page ids in range, each once.

    Returns
    -------
    Tensor
        [n, spans] int32: bytes of each sealed span.

    Raises
    ------
    PageStateError, FormatError, ArgumentError
        As `PageStore.seal` says.
    """
    layout = kv.layout
    check_distinct("pages", pages)
    sealed = state.sealed[pages].any(1)
    if sealed.any():
        first = int(pages[sealed][0])
        raise PageStateError(f"page {first} of layer {state.layer} is sealed already")
    every = (1 << layout.page_size) - 1
    partial = state.written[pages] != (every - (1 << 64) if every >> 63 else every)
    if partial.any():
        first = int(pages[partial][0])
        filled = (int(state.written[first]) & (1 << 64) - 1).bit_count()
        raise PageStateError(
            f"page {first} of layer {state.layer} holds {filled} of {layout.page_size} tokens: "
            "only a full page can be sealed"
        )
    _check_raw(kv, state, pages)
    # Some at a time; each group is encoded whole before any of its bytes change.
    for some in pages.split(max(1, VALUES_AT_ONCE // layout.page_values)):
        spans, lengths = encode_pages(*decode_pages(kv, some), layout)
        pool, rows = _rows_of_128(kv, state.homes[some], layout.span_stride)
        pool[rows] = spans.view(*rows.shape, SPAN_ALIGNMENT)
        kv.places[some, :, 1] = lengths.to(torch.int32)
        state.sealed[some] = 1
    return kv.places[pages, :, 1]


def _check_raw(kv: LayerPages, state: PageState, pages: Tensor) -> None:
    """Raise FormatError unless the pages' metadata and places are those of raw pages.

    A raw page has no descriptors or entries that could fail later, when others are sealed.
    """
    metadata = raw_metadata(kv.layout, pages.device)
    pool, rows = _rows_of_128(kv, state.homes[pages], len(metadata))
    found = pool[rows].flatten(-2)[..., : len(metadata)]
    places = kv.places[pages] == state.homes[pages]
    fine = (found == metadata).all(-1) & places.all(-1)
    if not fine.all():
        damaged = int(pages[~fine.all(1)][0])
        raise FormatError(
            f"page {damaged} of layer {state.layer} has metadata that is not a raw page's: its "
            "bytes were overwritten by something other than append, seal and clear"
        )


def clear(kv: LayerPages, state: PageState, pages: Tensor) -> None:
    """Make pages raw and empty again, at their homes.

    Parameters
    ----------
    kv, state : LayerPages, PageState
        The layer.
    pages : Tensor
        [n] int64 page ids in range.
    """
    metadata = raw_metadata(kv.layout, pages.device)
    pool, rows = _rows_of_128(kv, state.homes[pages], len(metadata))
    padded = pool[rows].flatten(-2)
    padded[..., : len(metadata)] = metadata
    pool[rows] = padded.view(*rows.shape, SPAN_ALIGNMENT)
    kv.places[pages] = state.homes[pages]
    state.written[pages] = 0
    state.sealed[pages] = 0
    state.claimed[pages] = 0
