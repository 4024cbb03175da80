"""Pictures of the layout maps: what they show, and the same as plain text (draw_svg.py draws it).

Four pictures: ``k`` and ``v`` (which lane holds which element of a tile), ``block`` (what each byte
of a block is, and whose) and ``page`` (where blocks and metadata lie in a span).  Whatever they
show is asked of the maps in this package, so that a picture cannot disagree with the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zf_layouts.block import (
    BLOCK_VALUES,
    CODE_PLANE,
    COMPRESSED_KIND,
    ENTRY_BYTES,
    EXCEPTIONS_KIND,
    KINDS,
    LOW_PLANE,
    MAX_EXCEPTIONS,
    RAW_KIND,
    TILES,
    code_place,
    pack_entry,
    position,
    raw_byte,
)
from zf_layouts.fragment import FRAGMENT, LANES, TILE, lane_value
from zf_layouts.page import PARTS, SPAN_ALIGNMENT, UNIT, PageLayout, Part

PICTURES = ("k", "v", "block", "page")

Ranges = list[tuple[int, int]]
Fields = list[tuple[int, int, str]]


# ---- what the pictures show --------------------------------------------------------------------
def _ranges(numbers: Iterable[int]) -> Ranges:
    """Inclusive ranges of consecutive numbers."""
    runs: Ranges = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return runs


def range_text(first: int, last: int) -> str:
    """``first..last`` with thousands separated, or the one number."""
    return f"{first:,}..{last:,}" if last > first else f"{first:,}"


def ranges_text(ranges: Ranges) -> str:
    """Ranges joined by ``and``."""
    return " and ".join(range_text(*r) for r in ranges)


def lane_positions(lane: int) -> list[int]:
    """Positions of the 16 values of `lane` in a block, tile 0 first."""
    return [position(tile, lane, v) for tile in range(TILES) for v in range(FRAGMENT)]


def lane_bytes(lane: int) -> dict[str, Ranges]:
    """Inclusive byte ranges of `lane` in a block: ``low``, ``code`` (compressed) and ``raw``."""
    held = lane_positions(lane)
    return {
        "low": _ranges(held),
        "code": _ranges(code_place(at)[0] for at in held),
        "raw": _ranges(raw_byte(at) + i for at in held for i in (0, 1)),
    }


def code_fields() -> Fields:
    """Bit fields ``(last bit, first bit, content)`` of a code byte, highest first."""
    fields = []
    for v, name in ((0, "i"), (FRAGMENT // 2, f"i+{FRAGMENT // 2}")):
        _, sign_bit, shift = code_place(v)
        fields += [(sign_bit, sign_bit, f"sign {name}"), (shift + 2, shift, f"offset {name}")]
    return sorted(fields, reverse=True)


def entry_fields() -> Fields:
    """Bit fields ``(last bit, first bit, content)`` of an exception entry, highest first."""
    zero = pack_entry(0, 0)
    high = pack_entry(0, 0xFF) ^ zero
    place = pack_entry(BLOCK_VALUES - 4, 0) ^ zero
    high_first, place_first = (high & -high).bit_length() - 1, (place & -place).bit_length() - 1
    return [
        (high.bit_length() - 1, high_first, "high byte"),
        (high_first - 1, place.bit_length(), "0"),
        (place.bit_length() - 1, place_first, "position >> 2"),
        (place_first - 1, 0, "selector"),
    ]


def selectors() -> list[str]:
    """Selectors of an exception entry for ``position & 3`` = 0, 1, 2, 3, in hex."""
    return [f"{pack_entry(at, 0):#06x}" for at in range(4)]


def metadata_fields(layout: PageLayout) -> Fields:
    """Inclusive byte ranges ``(first, last, content)`` of the metadata entry of one head."""
    fields: Fields = []
    for part in PARTS:
        start, first = layout.start_byte(0, part), layout.descriptor_byte(0, part)
        fields.append((start, first - 1, f"{part.upper()} start"))
        last = first + layout.descriptor_bytes - 1
        fields.append((first, last, f"{part.upper()} descriptors"))
    end = fields[-1][1] + 1
    if end < layout.head_metadata_bytes:
        fields.append((end, layout.head_metadata_bytes - 1, "padding, 0"))
    return fields


def sizes(layout: PageLayout) -> dict[str, Any]:
    """Parameters of `layout` and the sizes that follow from them."""
    names = (
        "num_kv_heads head_dim page_size rope max_exceptions heads_per_span blocks_per_part pairs "
        "descriptor_bytes head_metadata_bytes metadata_bytes raw_part_bytes raw_head_bytes "
        "raw_span_bytes span_stride spans page_stride page_values"
    )
    return {name: getattr(layout, name) for name in names.split()}


def records(what: str, layout: PageLayout, lane: int | None = None) -> list[dict[str, Any]]:
    """Content of picture `what` as flat records, those of one lane where `lane` is given.

    ``k``, ``v``: the values of block 0; ``block``: whose every byte range of a block is; ``page``:
    the byte ranges of a raw span, with the bytes of `lane` in each block.
    """
    lanes = range(LANES) if lane is None else (lane,)
    rows: list[dict[str, Any]] = []
    if what == "page":
        for head in range(layout.heads_per_span):
            first = layout.start_byte(head, "k")
            last = first + layout.head_metadata_bytes - 1
            rows.append(
                {"content": "metadata", "head": head, "first_byte": first, "last_byte": last}
            )
        for head in range(layout.heads_per_span):
            for part in PARTS:
                for block in range(layout.blocks_per_part):
                    first = layout.raw_start(head, part) + block * RAW_KIND.nbytes
                    last = first + RAW_KIND.nbytes - 1
                    row: dict[str, Any] = {"content": part, "head": head, "block": block}
                    row |= {"first_byte": first, "last_byte": last}
                    if lane is not None:
                        row["lane_bytes"] = lane_in_span(layout, head, part, block, lane)
                    rows.append(row)
        return rows
    for held_by in lanes:
        if what == "block":
            for content, ranges in lane_bytes(held_by).items():
                kind = RAW_KIND.name if content == "raw" else COMPRESSED_KIND.name
                for first, last in ranges:
                    row = {"kind": kind, "content": content, "lane": held_by}
                    rows.append(row | {"first_byte": first, "last_byte": last})
            continue
        for tile in range(TILES):
            for v in range(FRAGMENT):
                token, dim = layout.token_dim(part_of(what), 0, tile, held_by, v)
                at = position(tile, held_by, v)
                byte, sign_bit, shift = code_place(at)
                row = {"block": 0, "tile": tile, "lane": held_by, "v": v, "token": token}
                row |= {"dim": dim, "position": at, "low_byte": at, "code_byte": byte}
                row |= {"sign_bit": sign_bit, "offset_shift": shift, "raw_byte": raw_byte(at)}
                rows.append(row)
    return rows


def part_of(what: str) -> Part:
    """The part that picture ``k`` or ``v`` shows."""
    return "k" if what == "k" else "v"


def lane_in_span(layout: PageLayout, head: int, part: Part, block: int, lane: int) -> Ranges:
    """Bytes of a raw span that `lane` reads for one block."""
    held = [(tile, v) for tile in range(TILES) for v in range(FRAGMENT)]
    places = (layout.token_dim(part, block, tile, lane, v) for tile, v in held)
    starts = [layout.raw_byte(head, part, token, dim) for token, dim in places]
    return _ranges(start + i for start in starts for i in (0, 1))


def tile_name(layout: PageLayout, part: Part, block: int, tile: int) -> str:
    """Dims that a tile of a block covers, as text."""
    first = layout.dim_tiles(part, block % layout.pairs)[tile] * TILE
    return f"dims {range_text(first, first + TILE - 1)}"


def axes(part: Part) -> tuple[str, str]:
    """What the rows and the columns of a tile are."""
    return ("token", "dim") if part == "k" else ("dim", "token")


def why_paired(layout: PageLayout, part: Part) -> str:
    """What the two tiles of a block are to each other."""
    if part == "v":
        return "neighbours"
    return "RoPE partners" if layout.rope == "half" else "neighbours, RoPE interleaved"


# ---- plain text --------------------------------------------------------------------------------
def text(what: str, layout: PageLayout, lane: int | None = None) -> str:
    """Picture `what` (one of PICTURES) as plain text, `lane` marked and listed where given.

    In ``k`` and ``v`` the marked lane's cells stand in square brackets.
    """
    if what == "page":
        lines = _page_text(layout, lane)
    else:
        lines = (
            _block_text(layout, lane)
            if what == "block"
            else _tile_text(layout, part_of(what), lane)
        )
        if lane is not None:
            parts = PARTS if what == "block" else (part_of(what),)
            lines += ["", *_lane_text(layout, parts, lane)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _tile_text(layout: PageLayout, part: Part, lane: int | None) -> list[str]:
    down, across = axes(part)
    name = "K tile" if part == "k" else "V^T tile"
    lines = [f"{name}: {down}s down, {across}s across; a cell is lane:v", ""]
    lines.append(f"{across:>9} " + "".join(f" {column:>4}" for column in range(TILE)))
    for row in range(TILE):
        line, after = f"{down:>6} {row:2} ", " "
        for column in range(TILE):
            holder, v = lane_value(row, column)
            opens = holder == lane and after != "]"
            line += ("[" if opens else " " if holder == lane else after) + f"{holder:2}:{v}"
            after = "]" if holder == lane else " "
        lines.append(line + after)
    count = layout.blocks_per_part
    lines += ["", f"{part.upper()} part of a head: {count} blocks of two tiles (tiles of a block: "]
    lines[-1] += f"{why_paired(layout, part)})"
    for block in range(count):
        first = block // layout.pairs * TILE
        tiles = [f"tile {t} {tile_name(layout, part, block, t):<13}" for t in range(TILES)]
        lines.append(
            f"  block {block:<3} tokens {range_text(first, first + TILE - 1):<8}{'  '.join(tiles)}"
        )
    return lines


def _lane_text(layout: PageLayout, parts: Iterable[Part], lane: int) -> list[str]:
    lines = [f"lane {lane} in block 0, as (token, dim)"]
    lines.append(f"{'v':>11}" + "".join(f"{v:>10}" for v in range(FRAGMENT)))
    for part in parts:
        for tile in range(TILES):
            held = [layout.token_dim(part, 0, tile, lane, v) for v in range(FRAGMENT)]
            cells = "".join(f"{f'({token},{dim})':>10}" for token, dim in held)
            lines.append(f"  {part.upper()} tile {tile} {cells}")
    mine = lane_bytes(lane)
    lines.append(f"  low bytes   {ranges_text(mine['low'])}")
    lines.append(f"  code bytes  {ranges_text(mine['code'])}")
    lines.append(f"  raw bytes   {ranges_text(mine['raw'])}")
    return lines


def kind_title(index: int) -> str:
    """Name, size and descriptors of block kind `index` of KINDS."""
    kind = KINDS[index]
    title = "compressed with exceptions" if kind is EXCEPTIONS_KIND else kind.name
    share = f"{100 * kind.nbytes / RAW_KIND.nbytes:.1f}".rstrip("0").rstrip(".")
    size = f"{kind.nbytes} bytes" + (f" ({share} % of raw)" if kind is not RAW_KIND else "")
    plural = "s" if kind.last > kind.first else ""
    return f"{title}: {size}, descriptor{plural} {range_text(kind.first, kind.last)}"


def entry_bytes() -> tuple[int, int]:
    """First and last byte of the exception entries in a block."""
    return COMPRESSED_KIND.nbytes, EXCEPTIONS_KIND.nbytes - 1


def _block_text(layout: PageLayout, lane: int | None) -> list[str]:
    shown = sorted({0, 1, LANES - 1} | ({lane} if lane is not None else set()))
    owned = {n: lane_bytes(n) for n in shown}
    header = f"    {'bytes':<13}{'content':<13}" + "".join(f"lane {n:<9}" for n in shown)

    def plane(first: int, last: int, content: str, key: str, index: int) -> str:
        mine = "".join(f"{range_text(*owned[n][key][index]):<14}" for n in shown)
        return f"    {range_text(first, last):<13}{content:<13}{mine}"

    codes = (LOW_PLANE, LOW_PLANE + CODE_PLANE - 1)
    lines = [f"A block: {BLOCK_VALUES} values, two tiles, by position = {position_rule()}", ""]
    lines += [kind_title(0), header, plane(0, LOW_PLANE - 1, "low bytes", "low", 0)]
    lines += [plane(*codes, "code bytes", "code", 0), "", kind_title(1)]
    lines.append(f"    {range_text(0, COMPRESSED_KIND.nbytes - 1):<13}as compressed")
    entries = entries_note(layout)
    lines += [f"    {range_text(*entry_bytes()):<13}{entries}", "", kind_title(2), header]
    half = RAW_KIND.nbytes // TILES
    for tile in range(TILES):
        lines.append(plane(half * tile, half * tile + half - 1, f"tile {tile}", "raw", tile))
    for title, fields in (
        (f"code byte i of a fragment, i = 0..{FRAGMENT // 2 - 1}", code_fields()),
        ("exception entry, u32 little endian", entry_fields()),
    ):
        lines += ["", title]
        lines += [
            f"    bit{'s' if last > first else ' '} "
            f"{f'{last}..{first}' if last > first else str(last):<8} {content}"
            for last, first, content in fields
        ]
    listed = ", ".join(f"{at} {selector}" for at, selector in enumerate(selectors()))
    return [*lines, f"    selector by position & 3: {listed}"]


def entries_note(layout: PageLayout) -> str:
    """How many exception entries there are, and how many a writer uses."""
    used = layout.max_exceptions
    rule = f"at most {used} distinct" if used else "never written: max_exceptions is 0"
    return f"{MAX_EXCEPTIONS} entries of {ENTRY_BYTES} bytes, {rule}"


def position_rule() -> str:
    """How a position follows from lane, tile and v."""
    return f"lane * {position(0, 1, 0)} + tile * {position(1, 0, 0)} + v"


def page_title(layout: PageLayout) -> str:
    """Heads, tokens and spans of a page."""

    def count(n: int, noun: str) -> str:
        return f"{n} {noun}{'' if n == 1 else 's'}"

    return (
        f"{count(layout.num_kv_heads, 'KV head')}, {layout.page_size} tokens, "
        f"head_dim {layout.head_dim}: {count(layout.spans, 'span')} of "
        f"{count(layout.heads_per_span, 'head')}"
    )


def span_note(layout: PageLayout) -> str:
    """Where spans start and how much room they take."""
    return (
        f"a span starts at a multiple of {SPAN_ALIGNMENT} bytes; a raw span has "
        f"{layout.raw_span_bytes:,} bytes, {layout.span_stride:,} set aside"
    )


def _page_text(layout: PageLayout, lane: int | None) -> list[str]:
    lines = [f"A page: {page_title(layout)}", span_note(layout), ""]
    lines.append(f"metadata entry of a head, {layout.head_metadata_bytes} bytes")
    for first, last, content in metadata_fields(layout):
        unit = f" (u32, in units of {UNIT} bytes)" if content.endswith("start") else ""
        lines.append(f"    {range_text(first, last):<10}{content}{unit}")
    count = f"{layout.blocks_per_part} x {RAW_KIND.nbytes:,} bytes"
    lines += ["", f"raw span, bytes from its start (K and V blocks: {count})"]
    columns = "".join(f"{name:<21}" for name in ("metadata", "K blocks", "V blocks"))
    lines.append(f"    {'head':<6}{columns}")
    for head in range(layout.heads_per_span):
        entry = layout.start_byte(head, "k")
        cells = [range_text(entry, entry + layout.head_metadata_bytes - 1)]
        for part in PARTS:
            start = layout.raw_start(head, part)
            cells.append(range_text(start, start + layout.raw_part_bytes - 1))
        lines.append(f"    {head:<6}" + "".join(f"{cell:<21}" for cell in cells))
    if lane is not None:
        lines += ["", f"lane {lane} reads of block 0, raw"]
        for head in range(layout.heads_per_span):
            mine = [
                f"{part.upper()} {ranges_text(lane_in_span(layout, head, part, 0, lane)):<34}"
                for part in PARTS
            ]
            lines.append(f"    head {head:<4}{''.join(mine)}")
    return lines
