"""The figures beside FORMAT.md are what the code draws, and show what the maps say."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from zf_layouts import draw, draw_svg
from zf_layouts.block import BLOCK_VALUES, RAW_KIND
from zf_layouts.fragment import FRAGMENT, LANES, TILE, lane_value
from zf_layouts.page import HEAD_DIMS, PAGE_SIZES, ROPES, PageLayout

FOLDER = Path(__file__).parents[2] / "layouts" / "figures"
SVG = "{http://www.w3.org/2000/svg}"
LAYOUT = draw_svg.FIGURE_LAYOUT


@pytest.mark.parametrize("name", draw_svg.FIGURES)
def test_figure_is_up_to_date(name):
    what, lane = draw_svg.FIGURES[name]
    stored = FOLDER / name
    advice = f"{name} is not what zf_layouts draws; run: python tools/render_figures.py"
    assert stored.is_file(), advice
    same = stored.read_bytes() == draw_svg.svg(what, LAYOUT, lane).encode()
    assert same, advice  # not compared in the assert: its diff would be thousands of lines


def test_no_figure_is_left_over():
    assert {path.name for path in FOLDER.iterdir()} == set(draw_svg.FIGURES)


@pytest.mark.parametrize("name", draw_svg.FIGURES)
def test_figure_stands_alone(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert len(text.encode()) < 150_000
    assert root.find(f"{SVG}title").text
    ground = root.find(f"{SVG}rect")
    assert (ground.get("fill"), ground.get("width")) == ("#fff", root.get("width"))
    assert not re.search(r"href|url\(|@import|<image|<script", text)


@pytest.mark.parametrize("what", ["k", "v"])
def test_tile_drawing_has_every_cell_of_the_map(what):
    root = ET.fromstring(draw_svg.svg(what, LAYOUT))
    drawn = [t for t in root.iter(f"{SVG}text") if re.fullmatch(r"\d+:\d", t.text or "")]
    xs = sorted({float(t.get("x")) for t in drawn})
    ys = sorted({float(t.get("y")) for t in drawn})
    assert (len(drawn), len(xs), len(ys)) == (TILE * TILE, TILE, TILE)
    for cell in drawn:
        row, column = ys.index(float(cell.get("y"))), xs.index(float(cell.get("x")))
        assert cell.text == "{}:{}".format(*lane_value(row, column))


@pytest.mark.parametrize("what", ["k", "v"])
def test_text_has_every_cell_of_the_map(what):
    lines = draw.text(what, LAYOUT, lane=5).splitlines()
    grid = [re.findall(r"\d+:\d", line) for line in lines if re.search(r"\d:\d", line)]
    want = [
        ["{}:{}".format(*lane_value(row, column)) for column in range(TILE)] for row in range(TILE)
    ]
    assert grid == want
    marked = " ".join(re.findall(r"\[([ \d:]+)\]", "\n".join(lines))).split()
    assert sorted(marked) == [f"5:{v}" for v in range(FRAGMENT)]


@pytest.mark.parametrize("lane", [None, 0, 31])
@pytest.mark.parametrize("what", draw.PICTURES)
def test_every_shape_can_be_drawn(what, lane):
    for head_dim in HEAD_DIMS:
        for page_size in PAGE_SIZES:
            for rope in ROPES:
                layout = PageLayout(40, head_dim, page_size, rope, max_exceptions=0)
                root = ET.fromstring(draw_svg.svg(what, layout, lane))
                assert not outside(root)
                assert draw.text(what, layout, lane).endswith("\n")


def outside(root):
    """Boxes and starts of words that leave the picture."""
    width, height = float(root.get("width")), float(root.get("height"))
    found = []
    for item in root:
        x, y = float(item.get("x", 0)), float(item.get("y", 0))
        right, bottom = x + float(item.get("width", 0)), y + float(item.get("height", 0))
        if x < 0 or y < 0 or right > width or bottom > height:
            found.append(ET.tostring(item))
    return found


def test_lane_bytes_are_a_partition_of_the_block():
    for key, nbytes in (("low", BLOCK_VALUES), ("raw", RAW_KIND.nbytes)):
        owned = [
            byte
            for lane in range(LANES)
            for first, last in draw.lane_bytes(lane)[key]
            for byte in range(first, last + 1)
        ]
        assert sorted(owned) == list(range(nbytes))


def test_fields_fill_their_words():
    for fields, bits in ((draw.code_fields(), 8), (draw.entry_fields(), 32)):
        covered = [bit for last, first, _ in fields for bit in range(last, first - 1, -1)]
        assert covered == list(range(bits - 1, -1, -1))
    names = [content for _, _, content in draw.code_fields()]
    assert names == ["sign i", "sign i+4", "offset i+4", "offset i"]
    assert [field[:2] for field in draw.entry_fields()] == [(31, 24), (23, 23), (22, 16), (15, 0)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_records_of_a_page_cover_a_raw_span(page_size):
    layout = PageLayout(4, 128, page_size)
    covered = 0
    for record in draw.records("page", layout):
        assert record["first_byte"] == covered
        covered = record["last_byte"] + 1
    assert covered == layout.raw_span_bytes
