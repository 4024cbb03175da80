"""The pictures of draw.py as SVG: self-contained files, on a white ground, the same every time."""

from __future__ import annotations

from zf_layouts import bf16, draw
from zf_layouts.block import (
    BLOCK_VALUES,
    CODE_PLANE,
    COMPRESSED_KIND,
    KINDS,
    LOW_PLANE,
    RAW_KIND,
    TILES,
    code_place,
    position,
    raw_byte,
)
from zf_layouts.canvas import INK, LEFT, PALE, RULE, Canvas, lane_tint, tint
from zf_layouts.draw import range_text, ranges_text
from zf_layouts.fragment import FRAGMENT, LANES, TILE, lane_value, row_column
from zf_layouts.page import PARTS, UNIT, PageLayout, Part

FIGURE_LAYOUT = PageLayout(num_kv_heads=8, head_dim=128, page_size=16)

FIGURES: dict[str, tuple[str, int | None]] = {
    "k_tile.svg": ("k", 5),
    "v_tile.svg": ("v", 5),
    "block.svg": ("block", 5),
    "page.svg": ("page", None),
}
"""File name to (picture, highlighted lane) of the figures beside FORMAT.md."""

SHOWN_HEADS = 16
SHOWN_SPANS = 8


def svg(what: str, layout: PageLayout, lane: int | None = None) -> str:
    """Picture `what` (one of draw.PICTURES) as an SVG document, `lane` highlighted where given."""
    if what == "page":
        return _page(layout, lane)
    return _block(layout, lane) if what == "block" else _tile(layout, draw.part_of(what), lane)


def figures() -> dict[str, str]:
    """File name to SVG text of every figure in FIGURES."""
    return {name: svg(what, FIGURE_LAYOUT, lane) for name, (what, lane) in FIGURES.items()}


# ---- k and v -----------------------------------------------------------------------------------
def _tile(layout: PageLayout, part: Part, lane: int | None) -> str:
    down, across = draw.axes(part)
    name = "K tile" if part == "k" else "Vᵀ tile"
    canvas = Canvas(
        f"{name}: {down}s are rows, {across}s are columns",
        f"A cell is lane:v, coloured by lane; a lane holds a fragment of {FRAGMENT} values.",
    )
    x0, y0, w, h = LEFT + 66, 124, 42, 32
    canvas.words(x0 + 8 * w, y0 - 28, f"{across} (of 16 in a tile)", "g", 12, "middle")
    canvas.words(LEFT, y0 - 8, down, "g", 12)
    for row in range(TILE):
        canvas.words(x0 - 14, y0 + row * h + 21, str(row), "mg", 12, "end")
        canvas.words(x0 + row * w + w / 2, y0 - 8, str(row), "mg", 12, "middle")
        for column in range(TILE):
            holder, v = lane_value(row, column)
            x, y = x0 + column * w, y0 + row * h
            canvas.cell(x, y, w, h, lane_tint(holder), f"{holder}:{v}")
    canvas.line(x0 + 8 * w, y0, x0 + 8 * w, y0 + 16 * h, dash="5 4")
    canvas.line(x0, y0 + 8 * h, x0 + 16 * w, y0 + 8 * h, dash="5 4")
    right = x0 + 16 * w + 44
    bottom = y0 + 16 * h
    if part == "k":
        bottom = _tile_map(canvas, layout, part, x0, bottom + 66, 16 * w, 38)
    else:
        width = 64 * (layout.page_size // TILE)
        _tile_map(canvas, layout, part, right + 24, y0, width, 16 * h * TILE // layout.head_dim)
        right += max(width, 150) + 64
    _registers(canvas, right, y0)
    if lane is not None:
        for v in range(FRAGMENT):
            row, column = row_column(lane, v)
            x, y = x0 + column * w, y0 + row * h
            canvas.box(x, y, w, h, tint(lane // 4, 100), INK, 2)
            canvas.words(x + w / 2, y + 20, f"{lane}:{v}", "mbw", 12, "middle")
        _lane_panel(canvas, layout, part, lane, right, y0 + 190)
    pairs = ", ".join(
        f"tile {tile} is {draw.tile_name(layout, part, 0, tile)}" for tile in range(TILES)
    )
    use = "S = K Qᵀ" if part == "k" else "O = Vᵀ Pᵀ"
    caption = [
        f"The A operand of mma.m16n8k16 ({use}), in the order of its registers; wgmma with A in "
        "registers uses the same fragment.",
        f"head_dim {layout.head_dim}, page_size {layout.page_size}: in block 0 {pairs} "
        f"({draw.why_paired(layout, part)}).",
    ]
    return canvas.render(right + 300, bottom + 44, caption)


def _tile_map(
    canvas: Canvas, layout: PageLayout, part: Part, x0: float, y0: float, width: int, high: int
) -> int:
    """The tiles of a part, each with its block and place in it; returns the lower edge."""
    dim_tiles, token_tiles = layout.head_dim // TILE, layout.page_size // TILE
    w = width // (dim_tiles if part == "k" else token_tiles)
    title = f"{part.upper()} part of a head"
    canvas.words(x0 if part == "k" else x0 - 24, y0 - 28, title, "b", 13)
    for token_tile in range(token_tiles):
        for dim_tile in range(dim_tiles):
            block, tile, _, _ = layout.locate(part, token_tile * TILE, dim_tile * TILE)
            column, row = (dim_tile, token_tile) if part == "k" else (token_tile, dim_tile)
            x, y = x0 + column * w, y0 + row * high
            label = f"b{block} t{tile}"
            canvas.cell(x, y, w, high, tint(block, 44 if tile == 0 else 22), label, 10)
            if block == 0:
                canvas.box(x + 1, y + 1, w - 2, high - 2, "none", INK, 2)
            start = str(TILE * column)
            if row == 0:
                canvas.words(x + 1, y0 - 7, start, "mg", 10)
            if column == 0:
                canvas.words(x0 - 6, y + 11, str(TILE * row), "mg", 10, "end")
    rows = token_tiles if part == "k" else dim_tiles
    bottom = int(y0 + rows * high)
    note = "b block, t tile in it; outlined: block 0"
    canvas.words(x0 if part == "k" else x0 - 24, bottom + 20, note, "g", 12)
    return bottom + 12


def _registers(canvas: Canvas, x: float, y: float) -> None:
    """Which quadrant of the tile each register of a lane comes from."""
    canvas.words(x, y - 8, "Registers of a lane, by quadrant", "b")
    for v in range(0, FRAGMENT, 2):
        row, column = row_column(0, v)
        at_x, at_y = x + (column // 8) * 126, y + 4 + (row // 8) * 62
        canvas.box(at_x, at_y, 122, 58, PALE, RULE)
        canvas.words(at_x + 61, at_y + 25, f"register {v // 2}", "", 13, "middle")
        canvas.words(at_x + 61, at_y + 44, f"v{v}, v{v + 1}", "mg", 12, "middle")


def _lane_panel(
    canvas: Canvas, layout: PageLayout, part: Part, lane: int, x: float, y: float
) -> None:
    """What one lane holds of block 0."""
    canvas.box(x, y - 18, 20, 20, tint(lane // 4, 100), INK, 2)
    canvas.words(x + 30, y - 3, f"Lane {lane} in block 0", "b")
    canvas.words(x, y + 24, "v", "mg", 12)
    columns = (x + 30, x + 140)
    for tile, at in enumerate(columns):
        canvas.words(at, y + 24, f"tile {tile}", "g", 12)
        for v in range(FRAGMENT):
            token, dim = layout.token_dim(part, 0, tile, lane, v)
            canvas.words(at, y + 45 + 19 * v, f"({token}, {dim})", "m", 12)
    for v in range(FRAGMENT):
        canvas.words(x, y + 45 + 19 * v, str(v), "mg", 12)
    y += 45 + 19 * FRAGMENT
    canvas.words(x, y, "as (token, dim)", "g", 12)
    held = draw.lane_bytes(lane)
    for i, (label, key) in enumerate((("low bytes", "low"), ("codes", "code"), ("raw", "raw"))):
        canvas.words(x, y + 30 + 19 * i, label, "g", 12)
        canvas.words(x + 72, y + 30 + 19 * i, ranges_text(held[key]), "m", 12)


# ---- block -------------------------------------------------------------------------------------
def _block(layout: PageLayout, lane: int | None) -> str:
    shown = 0 if lane is None else lane
    canvas = Canvas(
        f"A block: {BLOCK_VALUES} values of two tiles, stored one of three ways",
        f"Drawn to scale, a pixel a byte. Colour is the lane, as in the tiles; position = "
        f"{draw.position_rule()}.",
    )
    for kind in range(len(KINDS)):
        _block_bar(canvas, layout, kind, 124 + 92 * kind, lane)
    y = 424
    canvas.words(LEFT, y, f"What lane {shown} loads", "b", 16)
    held = draw.lane_bytes(shown)
    low, code, raw = held["low"][0], held["code"][0], held["raw"]
    titles = (f"low bytes {range_text(*low)}", f"code bytes {range_text(*code)}")
    values = draw.lane_positions(shown)
    canvas.words(LEFT, y + 28, titles[0], "g", 12)
    canvas.words(LEFT + 552, y + 28, titles[1], "g", 12)
    places = [code_place(at)[0] for at in values]
    for at in values:
        tile, v = divmod(at - values[0], FRAGMENT)
        fill = tint(shown // 4, 54 if tile == 0 else 26)
        canvas.cell(LEFT + (at - low[0]) * 29.5, y + 36, 29.5, 30, fill, f"v{v}", 11)
    for byte in sorted(set(places)):
        tile = (byte - code[0]) // (FRAGMENT // 2)
        pair = " ".join(
            f"v{(at - values[0]) % FRAGMENT}"
            for at, place in zip(values, places, strict=True)
            if place == byte
        )
        fill = tint(shown // 4, 54 if tile == 0 else 26)
        canvas.cell(LEFT + 552 + (byte - code[0]) * 59, y + 36, 59, 30, fill, pair, 11)
    for tile in range(TILES):
        canvas.words(LEFT + 236 * tile + 118, y + 82, f"tile {tile}", "g", 11, "middle")
        canvas.words(LEFT + 552 + 236 * tile + 118, y + 82, f"tile {tile}", "g", 11, "middle")
        x = LEFT + 552 * tile
        where = range_text(*raw[tile])
        canvas.words(x, y + 112, f"of a raw block: tile {tile}, bytes {where}", "g", 12)
        for v in range(FRAGMENT):
            first = raw_byte(position(tile, shown, v)) - raw[tile][0]
            fill = tint(shown // 4, 54 if tile == 0 else 26)
            canvas.cell(x + first * 29.5, y + 120, 59, 30, fill, f"v{v}", 11)
    y = 620
    canvas.words(LEFT, y, "Bits", "b", 16)
    canvas.words(LEFT, y + 28, "a BF16 value: high byte is coded, low byte is stored", "g", 12)
    value = [(15, 15, "s"), (14, 7, "exponent"), (6, 0, "fraction")]
    canvas.fields(LEFT, y + 56, 29.5, value, (5, 0, 2))
    for label, bits in (("high", bf16.high_byte(0xFFFF)), ("low", bf16.low_byte(0xFFFF))):
        wide = bits.bit_length() * 29.5
        left = LEFT if label == "high" else LEFT + 16 * 29.5 - wide
        canvas.line(left + 4, y + 98, left + wide - 4, y + 98)
        canvas.words(left + wide / 2, y + 114, f"{label} byte", "g", 12, "middle")
    canvas.words(LEFT + 552, y + 28, "code byte i of a fragment: values i and i + 4", "g", 12)
    canvas.fields(LEFT + 552, y + 56, 59, draw.code_fields(), (5, 6, 7, 0))
    canvas.words(LEFT + 552, y + 114, "high byte = sign << 7 | (half_base + offset)", "mg", 12)
    canvas.words(LEFT, y + 150, "exception entry, a little endian u32", "g", 12)
    canvas.fields(LEFT, y + 178, 32, draw.entry_fields(), (3, -1, 4, 1))
    listed = "   ".join(f"{at}: {selector}" for at, selector in enumerate(draw.selectors()))
    canvas.words(LEFT, y + 230, "selector by position & 3", "g", 12)
    canvas.words(LEFT + 160, y + 230, listed, "m", 12)
    caption = [
        "Consecutive lanes own consecutive bytes: a warp's 16-byte loads of low bytes, its 8-byte "
        "loads of codes and its 16-byte raw loads are each contiguous, free of bank conflicts.",
        "Offsets count pairs of exponents from the block's base: exponent = base + 2 * offset + "
        "the least bit, which is in the low byte. The descriptor gives half_base = base / 2.",
    ]
    return canvas.render(LEFT * 2 + RAW_KIND.nbytes, y + 276, caption)


def _block_bar(canvas: Canvas, layout: PageLayout, index: int, y: int, lane: int | None) -> None:
    """One kind of block to scale, striped by lane."""
    kind = KINDS[index]
    canvas.words(LEFT, y - 10, draw.kind_title(index), "b", 14)
    keys = ("raw",) if kind is RAW_KIND else ("low", "code")
    for held_by in sorted(range(LANES), key=lambda n: n == lane):
        for key in keys:
            for first, last in draw.lane_bytes(held_by)[key]:
                x, width, mine = LEFT + first, last - first + 1, held_by == lane
                fill = tint(held_by // 4, 100) if mine else lane_tint(held_by)
                edge = (INK, 2) if mine else ("#fff", 0.5)
                canvas.box(x, y, width, 34, fill, *edge)
                if width >= 16:
                    style = "mbw" if mine else "m"
                    canvas.words(x + width / 2, y + 21, str(held_by), style, 9, "middle")
    middle = "g", 11, "middle"
    canvas.words(LEFT, y + 48, "0", "mg", 11)
    canvas.words(LEFT + kind.nbytes, y + 48, f"{kind.nbytes:,}", "mg", 11, "end")
    if kind is RAW_KIND:
        half = kind.nbytes // TILES
        canvas.words(LEFT + half, y + 48, str(half), "mg", 11, "middle")
        for tile in range(TILES):
            canvas.words(LEFT + half * tile + half / 2, y + 48, f"tile {tile}", *middle)
        return
    low_title = f"low bytes, {LOW_PLANE // LANES} a lane"
    canvas.words(LEFT + LOW_PLANE / 2, y + 48, low_title, *middle)
    canvas.words(LEFT + LOW_PLANE, y + 48, str(LOW_PLANE), "mg", 11, "middle")
    code_title = f"codes, {CODE_PLANE // LANES} a lane"
    canvas.words(LEFT + LOW_PLANE + CODE_PLANE / 2, y + 48, code_title, *middle)
    if kind is not COMPRESSED_KIND:
        first, last = draw.entry_bytes()
        canvas.box(LEFT + first, y, last - first + 1, 34, tint(4, 80), INK)
        for i, words in enumerate(draw.entries_note(layout).split(", ")):
            canvas.words(LEFT + last + 12, y + 14 + 16 * i, words, "g", 12)


# ---- page --------------------------------------------------------------------------------------
def _page(layout: PageLayout, lane: int | None) -> str:
    canvas = Canvas(f"A page: {draw.page_title(layout)}", draw.span_note(layout).capitalize())
    x0, width = LEFT + 70, 1024
    spans = min(layout.spans, SHOWN_SPANS)
    canvas.heading(LEFT, 104, "Spans of the page", f"{layout.page_stride:,} bytes set aside, raw")
    for span in range(spans):
        x, w = LEFT + (width + 70) / spans * span, (width + 70) / spans
        last_shown = span == spans - 1 and layout.spans > spans
        index = layout.spans - 1 if last_shown else span
        heads = index * layout.heads_per_span, (index + 1) * layout.heads_per_span - 1
        label = f"span {index}: head{'s' if heads[1] > heads[0] else ''} {range_text(*heads)}"
        canvas.cell(x, 116, w, 32, tint(0, 24), label, 11)
        start = ("… " if last_shown else "") + f"{index * layout.span_stride:,}"
        canvas.words(x, 162, start, "mg", 11)
    y = 200
    sealed = layout.metadata_bytes + (
        2 * layout.heads_per_span * layout.blocks_per_part * COMPRESSED_KIND.nbytes
    )
    share = 100 * sealed / layout.raw_span_bytes
    note = f"sealed with every block compressed: {share:.1f} % of raw; black: the metadata"
    canvas.heading(LEFT, y, "One span to scale", note)
    for i, (label, size) in enumerate((("raw", layout.raw_span_bytes), ("sealed", sealed))):
        top = y + 12 + 34 * i
        canvas.words(x0 - 10, top + 18, label, "g", 12, "end")
        scale = (width - 110) / layout.raw_span_bytes
        at = x0 + layout.metadata_bytes * scale
        canvas.box(x0, top, layout.metadata_bytes * scale, 26, INK, INK)
        one = (size - layout.metadata_bytes) / (2 * layout.heads_per_span) * scale
        for n in range(2 * layout.heads_per_span):
            fill = tint(n // 2, 50 if n % 2 == 0 else 28)
            if one >= 14:
                canvas.cell(at + n * one, top, one, 26, fill, PARTS[n % 2].upper(), 10)
            else:
                canvas.box(at + n * one, top, one, 26, fill, "#fff", 0.5)
        canvas.words(x0 + size * scale + 8, top + 18, f"{size:,}", "m", 12)
    y = 316
    where = range_text(0, layout.metadata_bytes - 1)
    note = f"{layout.head_metadata_bytes} bytes a head, bytes {where}; the entry of one head:"
    canvas.heading(LEFT, y, "Metadata", note)
    unit = width / layout.head_metadata_bytes
    for first, last, content in draw.metadata_fields(layout):
        fill = PALE if content.startswith("padding") else tint("KV".index(content[0]) * 4, 30)
        canvas.cell(x0 + first * unit, y + 30, (last - first + 1) * unit, 32, fill, content, 11)
        canvas.words(x0 + first * unit, y + 24, str(first), "mg", 10)
    y = 420
    note = f"a cell is a block of {RAW_KIND.nbytes:,} bytes; its first byte, from the span's start"
    canvas.heading(LEFT, y, "Blocks of a raw span", note)
    y = _heads(canvas, layout, lane, x0, y + 40, width)
    caption = [
        f"A start is a u32 in units of {UNIT} bytes from the span's first byte; a descriptor is "
        "one byte a block, and gives the block's size.",
        "A sealed span keeps this order without gaps; a raw span's places are known beforehand, so "
        "new tokens are written straight into them.",
    ]
    return canvas.render(x0 + width + LEFT, y + 24, caption)


def _heads(
    canvas: Canvas, layout: PageLayout, lane: int | None, x0: int, y: int, width: int
) -> int:
    """One row of blocks for each head of a raw span; returns the lower edge."""
    heads = list(range(layout.heads_per_span))
    if len(heads) > SHOWN_HEADS:
        heads = [*heads[: SHOWN_HEADS - 1], heads[-1]]
    w = (width - 32) / 2 / layout.blocks_per_part
    for i, head in enumerate(heads):
        skipped = "… " if i and head != heads[i - 1] + 1 else ""
        canvas.words(x0 - 10, y + 17, f"{skipped}head {head}", "g", 12, "end")
        for part in PARTS:
            left = x0 + (part == "v") * (width / 2 + 16)
            for block in range(layout.blocks_per_part):
                x = left + block * w
                label = f"{part.upper()}{block}" if w > 22 else str(block)
                shade = 44 if part == "k" else 24
                size = 11 if w > 22 else 8
                canvas.cell(x, y, w, 24, tint(head, shade), label, size)
                at = layout.raw_start(head, part) + block * RAW_KIND.nbytes
                if w >= 60 or block == 0:
                    canvas.words(x, y - 4, f"{at:,}", "mg", 10)
                if lane is not None:
                    for first, last in draw.lane_in_span(layout, head, part, block, lane):
                        bits = (first - at) * w / RAW_KIND.nbytes
                        mark = max((last - first + 1) * w / RAW_KIND.nbytes, 1.5)
                        canvas.box(x + bits, y, mark, 24, INK, INK, 0)
        y += 42
    if lane is not None:
        canvas.words(x0, y - 2, f"black: what lane {lane} loads of each block", "g", 12)
        y += 20
    return y
