"""What the kernels promise, on CPU tensors: stands in for `zf_cute.launch` where no GPU is.

The same arguments, the same results and the same counts of refusals as docstrings of
`zf_cute.launch` say, from the reference backend and loops over pages.  The GPU tests run against
this too, so that they are known to be right before a GPU is paid for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute import reference
from zf_cute.arguments import check_page_ids, check_rows, check_slot_mapping
from zf_cute.kernels.refusals import Refusal
from zf_cute.pages import LayerPages, PageState
from zf_cute.reference import writing
from zf_layouts import PARTS, PageLayout
from zf_layouts.page import SPAN_ALIGNMENT

OPERATIONS = ("append", "encode", "decode_pages", "clear")
"""Functions of `zf_cute.launch` that this module has too."""


def append(kv: LayerPages, state: PageState, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Rows with fine slots are written; of a slot given twice the last row stays."""
    check_rows(kv, k, v)
    check_slot_mapping(kv, slot_mapping, len(k))
    size, kept = kv.layout.page_size, {}
    for row, slot in enumerate(slot_mapping.tolist()):
        if not -1 <= slot < kv.num_pages * size:
            state.refused[Refusal.SLOT_OUTSIDE] += 1
        elif slot >= 0 and state.sealed[slot // size, 0]:
            state.refused[Refusal.SLOT_SEALED] += 1
        elif slot >= 0:
            kept[slot] = row
    rows = torch.tensor(list(kept.values()), dtype=torch.int64)
    writing.append(kv, state, k[rows], v[rows], torch.tensor(list(kept), dtype=torch.int64))


def encode(
    kv: LayerPages,
    state: PageState,
    pages: Tensor,
    *,
    destinations: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Full raw pages are sealed, each whole and once, to where they are told to go.

    Of two items with one id the first seals.  What is refused counts once an item.
    """
    check_page_ids(kv, pages)
    layout = kv.layout
    if lengths is None:
        lengths = torch.empty(len(pages), layout.spans, dtype=torch.int32)
    lengths.zero_()
    every = (1 << layout.page_size) - 1
    for item, page in enumerate(pages.tolist()):
        if not 0 <= page < kv.num_pages:
            state.refused[Refusal.PAGE_OUTSIDE] += 1
            continue
        full = int(state.written[page]) & every == every
        if not full or state.sealed[page].any():
            state.refused[Refusal.PAGE_NOT_SEALABLE] += 1
            continue
        to = kv.places[page, :, 0].clone() if destinations is None else destinations[item]
        ends = (to.long() & 0xFFFFFFFF) * SPAN_ALIGNMENT + layout.raw_span_bytes
        if destinations is not None and (ends > kv.pool.numel()).any():
            state.refused[Refusal.DESTINATION_OUTSIDE] += 1
            continue
        state.claimed[page] = item + 1
        page_kv = reference.decode_pages(kv, torch.tensor([page]))
        spans, nbytes = reference.encode_pages(*page_kv, layout)
        for span in range(layout.spans):
            at, count = (int(to[span]) & 0xFFFFFFFF) * 128, int(nbytes[0, span])
            kv.pool[at : at + count] = spans[0, span, :count]
            lengths[item, span] = count
        kv.places[page, :, 0], kv.places[page, :, 1] = to, lengths[item]
        state.sealed[page] = 1
    return lengths


def decode_pages(
    kv: LayerPages,
    state: PageState,
    pages: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Zeros for pages that there are not and for parts that no writer makes."""
    check_page_ids(kv, pages)
    layout = kv.layout
    shape = (len(pages), layout.page_size, layout.num_kv_heads, layout.head_dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16) if x is None else x for x in (k, v))
    for item, page in enumerate(pages.tolist()):
        if not 0 <= page < kv.num_pages:
            state.refused[Refusal.PAGE_OUTSIDE] += 1
            k[item], v[item] = 0, 0
            continue
        mended, bad = _mended(kv, page)
        got = reference.decode_pages(mended, torch.tensor([0]))
        k[item], v[item] = got[0][0], got[1][0]
        for head, part in bad:
            state.refused[Refusal.SPAN_MALFORMED] += 1
            (k, v)[PARTS.index(part)][item, :, head] = 0
    return k, v


def clear(kv: LayerPages, state: PageState, pages: Tensor) -> None:
    """Pages that there are become raw and empty."""
    check_page_ids(kv, pages)
    ids = pages.long()
    inside = (ids >= 0) & (ids < kv.num_pages)
    state.refused[Refusal.PAGE_OUTSIDE] += int((~inside).sum())
    writing.clear(kv, state, ids[inside])


def _mended(kv: LayerPages, page: int) -> tuple[LayerPages, list[tuple[int, str]]]:
    """A page alone in a pool of its own, without its malformed parts, and which these were."""
    layout = kv.layout
    pool = torch.zeros(layout.page_stride, dtype=torch.uint8)
    places = torch.zeros(1, layout.spans, 2, dtype=torch.int32)
    bad = []
    for span, (start, length) in enumerate(kv.places[page].tolist()):
        start, length = (start & 0xFFFFFFFF) * 128, length & 0xFFFFFFFF
        fits = length % 16 == 0 and length <= layout.raw_span_bytes
        if not fits or start + length > kv.pool.numel():
            length = 0
        at = span * layout.span_stride
        pool[at : at + length] = kv.pool[start : start + length]
        places[0, span] = torch.tensor([at // 128, layout.raw_span_bytes])
        for in_span in range(layout.heads_per_span):
            for part in PARTS:
                if not _is_well_formed(pool[at : at + length], layout, in_span, part):
                    bad.append((span * layout.heads_per_span + in_span, part))
                    head = layout.raw_metadata()
                    entry = layout.start_byte(in_span, part)
                    some = slice(entry, entry + 4 + layout.descriptor_bytes)
                    pool[at : at + layout.span_stride][some] = torch.tensor(list(head[some]))
    return LayerPages(pool, places, layout), bad


def _is_well_formed(span: Tensor, layout: PageLayout, head: int, part: str) -> bool:
    """FORMAT.md section 7 without exception entries, as the decode kernel looks at a part."""
    if len(span) < layout.metadata_bytes:
        return False
    at = layout.start_byte(head, part)
    start = int.from_bytes(bytes(span[at : at + 4].tolist()), "little") * 16
    descriptors = span[at + 4 : at + 4 + layout.blocks_per_part].tolist()
    last = 248 if layout.max_exceptions else 127
    if any(last < d < 255 for d in descriptors):
        return False
    sizes = sum(1024 if d == 255 else 784 if d >= 128 else 768 for d in descriptors)
    return layout.metadata_bytes <= start and start + sizes <= len(span)
