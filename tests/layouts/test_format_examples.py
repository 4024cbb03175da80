"""The worked bytes of FORMAT.md section 8, read from the file, against the code."""

import re
from pathlib import Path

import pytest

from zf_layouts.block import (
    BLOCK_VALUES,
    KINDS,
    decode_block,
    encode_block,
    kind_of,
    pack_entry,
    position,
)
from zf_layouts.fragment import row_column
from zf_layouts.page import FORMAT_VERSION, PARTS, SPAN_ALIGNMENT, SPAN_LIMIT, UNIT, PageLayout

FORMAT = (Path(__file__).parents[2] / "layouts" / "FORMAT.md").read_text(encoding="utf-8")


def worked_blocks():
    """(values, descriptor, bytes, {byte: content}) of each worked block in the text."""
    fenced = re.search(r"```example\n(.*?)```", FORMAT, re.DOTALL)
    assert fenced, "FORMAT.md has no example block"
    examples = []
    for paragraph in fenced[1].strip().split("\n\n"):
        first, second = paragraph.splitlines()
        fill, *rest = first.removeprefix("block: ").split(", ")
        values = [int(fill.removeprefix("all "), 16)] * BLOCK_VALUES
        for term in rest:
            place, content = re.fullmatch(r"positions? (\S+) = (\w{4})", term).groups()
            low, _, high = place.partition("..")
            for at in range(int(low), int(high or low) + 1):
                values[at] = int(content, 16)
        head, listed = second.split("; ")
        descriptor, nbytes = map(int, re.fullmatch(r"descriptor (\d+), (\d+) bytes", head).groups())
        contents = {}
        for item in listed.split():
            at, byte = re.fullmatch(r"\[(\d+)\]=([0-9A-F]{2})", item).groups()
            contents[int(at)] = int(byte, 16)
        examples.append((values, descriptor, nbytes, contents))
    return examples


def section(number):
    """Text of a numbered section."""
    return re.search(rf"^## {number}\. .*?(?=^## |\Z)", FORMAT, re.DOTALL | re.MULTILINE)[0]


def rows(text):
    """Cells of the table rows in a text, backquotes removed."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    ]


def test_every_kind_of_block_is_worked():
    examples = worked_blocks()
    assert len(examples) >= 6
    assert {kind_of(descriptor).name for _, descriptor, _, _ in examples} == {
        kind.name for kind in KINDS
    }


@pytest.mark.parametrize("example", range(len(worked_blocks())))
def test_worked_block(example):
    values, descriptor, nbytes, contents = worked_blocks()[example]
    found, data = encode_block(values)
    assert (found, len(data)) == (descriptor, nbytes)
    assert {at: data[at] for at in contents} == contents
    assert decode_block(found, data) == values


def worked_page(text):
    """Layout and (K, V) values by token and dim of the worked page in the text."""
    shape = re.search(
        r"num_kv_heads (\d+), head_dim (\d+), page_size (\d+), `rope` (\w+)\.", text
    ).groups()
    layout = PageLayout(*map(int, shape[:3]), rope=shape[3])
    (k_fill, k_changes), (v_fill, v_changes) = re.findall(
        r"Every [KV]\s+value\s+is (\w+), but (.*?)\.\s", text, re.DOTALL
    )
    fills = [
        [[int(fill, 0)] * layout.head_dim for _ in range(layout.page_size)]
        for fill in (k_fill, v_fill)
    ]
    keys, values = fills
    changes = re.findall(r"token (\d+), dim (\d+) is (\w+)", k_changes)
    assert changes
    for token, dim, content in changes:
        keys[int(token)][int(dim)] = int(content, 16)
    token, content, first, last = re.fullmatch(
        r"token (\d+) has (\w+) in dims (\d+) to (\d+)", v_changes
    ).groups()
    for dim in range(int(first), int(last) + 1):
        values[int(token)][dim] = int(content, 16)
    return layout, {"k": keys, "v": values}


def assemble(layout, parts):
    """Bytes of a one-head sealed span, and (first, last) byte of each of its blocks."""
    span, places = bytearray(layout.metadata_bytes), []
    for part in PARTS:
        assert len(span) % UNIT == 0
        at = layout.start_byte(0, part)
        span[at : at + 4] = (len(span) // UNIT).to_bytes(4, "little")
        flat = [
            parts[part][n // layout.head_dim][n % layout.head_dim] for n in layout.value_order(part)
        ]
        for block in range(layout.blocks_per_part):
            values = flat[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
            descriptor, data = encode_block(values, layout.max_exceptions)
            span[layout.descriptor_byte(0, part, block)] = descriptor
            places.append((len(span), len(span) + len(data) - 1))
            span += data
    return bytes(span), places


def test_worked_page():
    text = FORMAT[FORMAT.index("**A page.**") :]
    layout, parts = worked_page(text)
    span, places = assemble(layout, parts)
    table = {cells[0]: cells[1] for cells in rows(text)[1:]}
    keys, raw, compressed = (places[0][0], places[1][1]), places[2], places[3]
    ranges = {"0..15", *("{}..{}".format(*place) for place in (keys, raw, compressed))}
    assert {place for place in table if ".." in place} == ranges
    assert bytes.fromhex(table["0..15"]) == span[: layout.metadata_bytes]
    assert set(span[compressed[0] :]) == {0}

    # The keys: what the rows of single bytes say, and elsewhere low bytes 80 and codes 00.
    assert "low bytes 80 and codes 00 but for" in table["{}..{}".format(*keys)]
    want = bytearray()
    for first, last in places[:2]:
        want += bytes([0x80]) * BLOCK_VALUES + bytes(last + 1 - first - BLOCK_VALUES)
    for place, content in table.items():
        if ".." not in place:
            want[int(place) - keys[0]] = int(content.partition(":")[0], 16)
    assert span[keys[0] : keys[1] + 1] == bytes(want)

    row, column, tile, lane, v, start, inside, first, second, low, high = re.search(
        r"is row (\d+), column (\d+) of tile (\d): lane (\d+), v (\d), so bytes "
        r"(\d+) \+ (\d+) = (\d+), (\d+) hold (\w\w) (\w\w)",
        table["{}..{}".format(*raw)],
    ).groups()
    assert layout.locate("v", 3, 20) == (0, int(tile), int(lane), int(v))
    assert (int(row), int(column)) == (20 - 16, 3)
    assert int(start) == raw[0]
    assert int(start) + int(inside) == int(first) == int(second) - 1
    assert span[int(first) : int(first) + 2] == bytes.fromhex(low + high)

    k_start, k_byte, v_start, v_byte, length = re.search(
        r"K start is (\d+) \(byte (\d+)\), V start 0x\w+ = (\d+) \(byte (\d+)\); "
        r"the length in the place table is (\d+)",
        text,
    ).groups()
    assert int(k_start) * UNIT == int(k_byte) == keys[0]
    assert int(v_start) * UNIT == int(v_byte) == raw[0]
    assert len(span) == int(length)


def test_worked_places_of_single_keys():
    """The reasons that the table gives for its single bytes."""
    text = FORMAT[FORMAT.index("**A page.**") :]
    layout, _ = worked_page(text)
    found = re.findall(
        r"token (\d+), dim (\d+) .*?block (\d+), tile (\d); row (\d+), column (\d+): "
        r"lane (\d+), v (\d); position .*? = (\d+)",
        text,
    )
    assert len(found) >= 2
    for numbers in found:
        token, dim, block, tile, row, column, lane, v, at = map(int, numbers)
        assert layout.locate("k", token, dim) == (block, tile, lane, v)
        assert row_column(lane, v) == (row, column)
        assert position(tile, lane, v) == at


def test_tables_of_section_5_match_the_code():
    descriptors, *_ = (rows(part) for part in section(5).split("**Raw.**"))
    sizes = {}
    for span, kind, nbytes in descriptors[1:]:
        if not kind.startswith("none"):
            low, _, high = span.partition("..")
            sizes[int(low), int(high or low)] = int(nbytes)
    assert sizes == {(kind.first, kind.last): kind.nbytes for kind in KINDS}
    selectors = dict(
        (int(at), int(selector, 16))
        for at, selector in rows(section(5)[section(5).index("| position & 3") :])[1:]
    )
    assert selectors == {at: pack_entry(at, 0) for at in range(4)}


def test_numbers_in_the_text_match_the_code():
    assert f"at most\n{SPAN_LIMIT:,} bytes" in FORMAT
    assert f"A span begins at a multiple of {SPAN_ALIGNMENT} bytes" in FORMAT
    assert f"in units of {UNIT} bytes from the span's first byte" in FORMAT


def test_the_version_is_that_of_the_document():
    """FORMAT_VERSION is for what keeps pages outside the process."""
    first = FORMAT.splitlines()[0]
    assert first == f"# The zf_cute page format, version {FORMAT_VERSION}"
