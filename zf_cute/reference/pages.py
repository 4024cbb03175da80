"""Encode whole pages to spans, and decode spans back to keys and values.

`encode_pages` makes spans in a buffer of their own; where they go is the caller's business.
`decode_pages` reads spans wherever a place table says, after checking all that FORMAT.md section 7
asks a reader to check: nothing outside a span is ever read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute.errors import FormatError
from zf_cute.pages import LayerPages
from zf_cute.reference import blocks
from zf_cute.reference.tables import device_table
from zf_layouts import BLOCK_VALUES, PARTS, PageLayout, Part
from zf_layouts.page import SPAN_ALIGNMENT, UNIT

BLOCKS_AT_ONCE = 1 << 14
"""Blocks decoded at a time: bounds the working memory to about 150 MB."""

_START_UNITS = SPAN_ALIGNMENT // UNIT
_ROW_UNITS = blocks.ROW_BYTES // UNIT


@device_table
def _order(layout: PageLayout, part: Part, device: torch.device) -> Tensor:
    """``token * head_dim + dim`` of every value of a part, by block and position."""
    return torch.tensor(layout.value_order(part), dtype=torch.int64, device=device)


@device_table
def _inverse_order(layout: PageLayout, part: Part, device: torch.device) -> Tensor:
    return torch.argsort(_order(layout, part, device))


def part_blocks(values: Tensor, layout: PageLayout, part: Part) -> Tensor:
    """Bit patterns of one part in block order.

    Parameters
    ----------
    values : Tensor
        [pages, page_size, heads, head_dim] bfloat16; any number of heads.
    layout : PageLayout
        Format parameters.
    part : {"k", "v"}
        Whose order.

    Returns
    -------
    Tensor
        [pages, heads, blocks_per_part, 512] int32 bit patterns (0 to 65535), by position.
    """
    pages, _, heads, _ = values.shape
    bits = values.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    bits = bits.transpose(1, 2).reshape(pages, heads, layout.page_size * layout.head_dim)
    ordered = bits[:, :, _order(layout, part, bits.device)]
    return ordered.view(pages, heads, layout.blocks_per_part, BLOCK_VALUES)


def part_values(bits: Tensor, layout: PageLayout, part: Part) -> Tensor:
    """Inverse of `part_blocks`: [pages, page_size, heads, head_dim] bfloat16."""
    pages, heads = bits.shape[:2]
    flat = bits.reshape(pages, heads, layout.page_size * layout.head_dim)
    flat = flat[:, :, _inverse_order(layout, part, bits.device)]
    values = flat.view(pages, heads, layout.page_size, layout.head_dim).transpose(1, 2)
    return values.to(torch.int16).contiguous().view(torch.bfloat16)


def _unit_rows(units: Tensor) -> tuple[Tensor, Tensor]:
    """For blocks of `units` 16-byte rows each: the block and the row in it of every row."""
    which = torch.repeat_interleave(torch.arange(len(units), device=units.device), units)
    first = units.cumsum(0) - units
    return which, torch.arange(len(which), device=units.device) - first[which]


def encode_pages(k: Tensor, v: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Encode full pages.

    Parameters
    ----------
    k, v : Tensor
        [pages, page_size, num_kv_heads, head_dim] bfloat16.
    layout : PageLayout
        Format parameters.

    Returns
    -------
    spans : Tensor
        [pages, spans, span_stride] uint8, zero past each span's length.
    lengths : Tensor
        [pages, spans] int64, bytes of each span.

    References
    ----------
    layouts/FORMAT.md, sections 3 to 6.
    """
    pages, device = len(k), k.device
    grid = (pages, layout.spans, layout.heads_per_span, 2, layout.blocks_per_part)
    bits = torch.stack([part_blocks(k, layout, "k"), part_blocks(v, layout, "v")], 2)
    descriptors, rows = blocks.encode_blocks(bits.view(-1, BLOCK_VALUES), layout.max_exceptions)
    units = blocks.block_bytes(descriptors) // UNIT

    in_span = units.view(pages * layout.spans, layout.heads_per_span * 2 * grid[-1])
    before = in_span.cumsum(1) - in_span + layout.metadata_bytes // UNIT
    lengths = (in_span.sum(1) * UNIT + layout.metadata_bytes).view(pages, layout.spans)

    spans = torch.zeros(pages * layout.spans, layout.span_stride, dtype=torch.uint8, device=device)
    first_unit = torch.arange(len(spans), device=device) * (layout.span_stride // UNIT)
    which, row = _unit_rows(units)
    to = (before + first_unit[:, None]).flatten()[which] + row
    spans.view(torch.int64).view(-1, 2)[to] = rows.view(torch.int64).view(-1, 2)[
        which * _ROW_UNITS + row
    ]

    metadata = spans[:, : layout.metadata_bytes].view(*grid[:3], layout.head_metadata_bytes)
    starts = before.view(grid)[..., 0]
    for part_index, part in enumerate(PARTS):
        at = layout.start_byte(0, part)
        start = starts[..., part_index].to(torch.int32).contiguous()
        metadata[..., at : at + 4] = start[..., None].view(torch.uint8)
        at = layout.descriptor_byte(0, part)
        metadata[..., at : at + grid[-1]] = descriptors.view(grid)[:, :, :, part_index]
    return spans.view(pages, layout.spans, layout.span_stride), lengths


def _places(kv: LayerPages, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Checked first unit (16 bytes) and length in bytes of the spans of `pages`, [pages, spans]."""
    layout = kv.layout
    words = kv.places[pages].long() & 0xFFFFFFFF
    first, length = words[..., 0] * _START_UNITS, words[..., 1]
    fine = (length % UNIT == 0) & (length >= layout.metadata_bytes)
    fine &= (length <= layout.raw_span_bytes) & (first * UNIT + length <= kv.pool.numel())
    if not fine.all():
        i, span = torch.nonzero(~fine)[0].tolist()
        raise FormatError(
            f"page {int(pages[i])}, span {span}: {int(length[i, span])} bytes at byte "
            f"{int(first[i, span]) * UNIT} are no span of this layout in a pool of "
            f"{kv.pool.numel()} bytes"
        )
    return first, length


def read_metadata(kv: LayerPages, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Read and check the metadata of pages.

    Parameters
    ----------
    kv : LayerPages
        The layer.
    pages : Tensor
        [n] int64 page ids, in range.

    Returns
    -------
    descriptors : Tensor
        [n, num_kv_heads, 2, blocks_per_part] uint8; axis 2 is K, V.
    first : Tensor
        Same shape, int64: where each block starts in the pool, in units of 16 bytes.

    Raises
    ------
    FormatError
        If a place, a start, a descriptor or the sizes are not those of a well-formed span.
    """
    layout = kv.layout
    first, length = _places(kv, pages)
    rows = torch.arange(layout.metadata_bytes // UNIT, device=first.device)
    metadata = _pool_units(kv)[first[..., None] + rows].view(torch.uint8)
    shape = (len(pages), layout.spans, layout.heads_per_span, layout.head_metadata_bytes)
    metadata = metadata.view(shape)
    starts, descriptors = [], []
    for part in PARTS:
        at = layout.start_byte(0, part)
        word = metadata[..., at : at + 4].contiguous().view(torch.int32)
        starts.append(word.long() & 0xFFFFFFFF)
        at = layout.descriptor_byte(0, part)
        descriptors.append(metadata[..., at : at + layout.blocks_per_part])
    start = torch.cat(starts, -1)  # [n, spans, heads_per_span, 2]
    descriptor = torch.stack(descriptors, 3)
    kinds = blocks.block_kinds(descriptor)
    blocks.check_descriptors(kinds, descriptor, layout.max_exceptions)
    units = blocks.block_bytes(descriptor) // UNIT
    end = start + units.sum(-1)
    fine = (start >= layout.metadata_bytes // UNIT) & (end <= length[..., None, None] // UNIT)
    if not fine.all():
        i, span, head, part_index = torch.nonzero(~fine)[0].tolist()
        raise FormatError(
            f"page {int(pages[i])}, span {span}: the {PARTS[part_index].upper()} blocks of head "
            f"{head} take bytes {int(start[i, span, head, part_index]) * UNIT} to "
            f"{int(end[i, span, head, part_index]) * UNIT}, outside the span's "
            f"{int(length[i, span])} bytes or inside its metadata"
        )
    before = units.cumsum(-1) - units
    where = first[:, :, None, None, None] + start[..., None] + before
    shape = (len(pages), layout.num_kv_heads, 2, layout.blocks_per_part)
    return descriptor.reshape(shape), where.reshape(shape)


def _pool_units(kv: LayerPages) -> Tensor:
    """The pool as [units, 2] int64: rows of 16 bytes.  A tail below 16 bytes holds no span."""
    whole = kv.pool.numel() // UNIT * UNIT
    return kv.pool[:whole].view(torch.int64).view(-1, 2)


def decode_pages(kv: LayerPages, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Decode pages, raw or sealed, to ordinary keys and values.

    Parameters
    ----------
    kv : LayerPages
        The layer.
    pages : Tensor
        [n] int64 page ids, in range; may repeat.

    Returns
    -------
    k, v : Tensor
        [n, page_size, num_kv_heads, head_dim] bfloat16.  Tokens that were never written hold
        whatever the pool held.

    Raises
    ------
    FormatError
        If a page is one that no writer makes.
    """
    layout, shape = kv.layout, (kv.layout.page_size, kv.layout.num_kv_heads, kv.layout.head_dim)
    k = torch.empty(len(pages), *shape, dtype=torch.bfloat16, device=kv.pool.device)
    v = torch.empty_like(k)
    step = max(1, BLOCKS_AT_ONCE // (2 * layout.num_kv_heads * layout.blocks_per_part))
    for at in range(0, len(pages), step):
        some = slice(at, at + step)
        k[some], v[some] = _decode_some(kv, pages[some])
    return k, v


def _decode_some(kv: LayerPages, pages: Tensor) -> tuple[Tensor, Tensor]:
    layout = kv.layout
    descriptors, first = read_metadata(kv, pages)
    units = blocks.block_bytes(descriptors).view(-1, 1) // UNIT
    row = torch.arange(_ROW_UNITS, device=units.device)
    # Rows past a block's own size repeat its first: they are ignored, and never leave the span.
    rows = _pool_units(kv)[first.view(-1, 1) + torch.where(row < units, row, 0)]
    bits = blocks.decode_blocks(
        descriptors.flatten(), rows.view(torch.uint8).flatten(1), layout.max_exceptions
    )
    bits = bits.view(*descriptors.shape, BLOCK_VALUES)
    return part_values(bits[:, :, 0], layout, "k"), part_values(bits[:, :, 1], layout, "v")
