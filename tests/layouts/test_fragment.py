"""The tile map is a bijection, both ways, and what FORMAT.md section 4 says."""

import pytest

from zf_layouts.block import BLOCK_VALUES, TILES, position, tile_lane_value
from zf_layouts.fragment import FRAGMENT, LANES, TILE, lane_value, row_column

ELEMENTS = [(row, column) for row in range(TILE) for column in range(TILE)]
HOLDERS = [(lane, v) for lane in range(LANES) for v in range(FRAGMENT)]


def test_every_element_has_its_own_lane_and_value():
    assert sorted(lane_value(*element) for element in ELEMENTS) == HOLDERS


def test_row_column_undoes_lane_value():
    assert [row_column(*lane_value(*element)) for element in ELEMENTS] == ELEMENTS


def test_lane_value_undoes_row_column():
    assert [lane_value(*row_column(*holder)) for holder in HOLDERS] == HOLDERS


@pytest.mark.parametrize(
    ("lane", "elements"),
    [
        (0, [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]),
        (5, [(1, 2), (1, 3), (9, 2), (9, 3), (1, 10), (1, 11), (9, 10), (9, 11)]),
        (31, [(7, 6), (7, 7), (15, 6), (15, 7), (7, 14), (7, 15), (15, 14), (15, 15)]),
    ],
)
def test_lanes_of_the_ptx_manual(lane, elements):
    """Rows groupID and groupID + 8, columns from threadID_in_group * 2 and 8 further."""
    assert [row_column(lane, v) for v in range(FRAGMENT)] == elements


def test_two_values_share_a_register_and_a_row():
    for lane in range(LANES):
        for v in range(0, FRAGMENT, 2):
            row, column = row_column(lane, v)
            assert row_column(lane, v + 1) == (row, column + 1)


def test_position_numbers_the_values_of_a_block():
    places = [(t, lane, v) for t in range(TILES) for lane in range(LANES) for v in range(FRAGMENT)]
    assert sorted(position(*place) for place in places) == list(range(BLOCK_VALUES))
    assert [tile_lane_value(position(*place)) for place in places] == places


def test_tile_lane_value_undoes_position():
    assert [position(*tile_lane_value(at)) for at in range(BLOCK_VALUES)] == list(
        range(BLOCK_VALUES)
    )
