"""Pages: (token, dim) <-> (block, tile, lane, v) <-> byte, for every supported shape."""

import itertools

import pytest

from zf_layouts import page
from zf_layouts.block import BLOCK_VALUES, RAW_KIND, TILES, tile_lane_value
from zf_layouts.fragment import FRAGMENT, LANES, TILE
from zf_layouts.page import HEAD_DIMS, PAGE_SIZES, PARTS, ROPES, SPAN_LIMIT, PageLayout

SIZES = list(itertools.product(HEAD_DIMS, PAGE_SIZES))
SHAPES = list(itertools.product(HEAD_DIMS, PAGE_SIZES, ROPES))


def every_place(layout):
    """All (block, tile, lane, v) of a part, in the order of positions."""
    return [
        (block, tile, lane, v)
        for block in range(layout.blocks_per_part)
        for lane in range(LANES)
        for tile in range(TILES)
        for v in range(FRAGMENT)
    ]


def every_token_dim(layout):
    """All (token, dim) of a part."""
    return list(itertools.product(range(layout.page_size), range(layout.head_dim)))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("head_dim", "page_size", "rope"), SHAPES)
def test_locate_and_token_dim_undo_each_other(head_dim, page_size, rope, part):
    layout = PageLayout(1, head_dim, page_size, rope)
    values, places = every_token_dim(layout), every_place(layout)
    located = [layout.locate(part, *value) for value in values]
    assert sorted(located) == sorted(places)
    assert [layout.token_dim(part, *place) for place in located] == values
    assert [layout.locate(part, *layout.token_dim(part, *place)) for place in places] == places


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("head_dim", "page_size", "rope"), SHAPES)
def test_tiles_of_a_block_are_those_of_the_format(head_dim, page_size, rope, part):
    """FORMAT.md section 4: token tile n // pairs, and the table of dim tiles."""
    layout = PageLayout(1, head_dim, page_size, rope)
    pairs = head_dim // 32
    for block in range(layout.blocks_per_part):
        token_tile, j = block // pairs, block % pairs
        dim_tiles = (j, j + pairs) if (part, rope) == ("k", "half") else (2 * j, 2 * j + 1)
        assert layout.dim_tiles(part, j) == dim_tiles
        for tile, dim_tile in enumerate(dim_tiles):
            held = {
                layout.token_dim(part, block, tile, lane, v)
                for lane in range(LANES)
                for v in range(FRAGMENT)
            }
            tokens = range(16 * token_tile, 16 * token_tile + 16)
            dims = range(16 * dim_tile, 16 * dim_tile + 16)
            assert held == set(itertools.product(tokens, dims))


@pytest.mark.parametrize(("head_dim", "page_size"), SIZES)
def test_rope_partners_share_lane_value_and_block(head_dim, page_size):
    half = PageLayout(1, head_dim, page_size, "half")
    interleaved = PageLayout(1, head_dim, page_size, "interleaved")
    for token, dim in itertools.product(range(page_size), range(head_dim // 2)):
        block, tile, lane, v = half.locate("k", token, dim)
        assert tile == 0
        assert half.locate("k", token, dim + head_dim // 2) == (block, 1, lane, v)
        block, tile, lane, v = interleaved.locate("k", token, 2 * dim)
        assert interleaved.locate("k", token, 2 * dim + 1) == (block, tile, lane, v + 1)


def test_k_tiles_have_tokens_as_rows_and_v_tiles_dims():
    layout = PageLayout(1, 64, 16)
    for a, b in itertools.product(range(TILE), range(TILE)):
        assert layout.locate("k", a, b) == layout.locate("v", b, a)
    assert layout.locate("k", 1, 2) == (0, 0, 5, 0)
    assert layout.locate("v", 2, 1) == (0, 0, 5, 0)
    assert layout.locate("v", 3, 20) == (0, 1, 17, 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("head_dim", "page_size", "rope"), SHAPES)
def test_value_order_lists_positions(head_dim, page_size, rope, part):
    layout = PageLayout(4, head_dim, page_size, rope)
    order = layout.value_order(part)
    assert sorted(order) == list(range(page_size * head_dim))
    for n in range(0, len(order), 97):
        block, at = divmod(n, BLOCK_VALUES)
        token, dim = layout.token_dim(part, block, *tile_lane_value(at))
        assert order[n] == token * head_dim + dim


# ---- bytes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("head_dim", "page_size", "rope"), SHAPES)
def test_raw_bytes_cover_the_blocks_of_a_span(head_dim, page_size, rope, heads):
    layout = PageLayout(heads, head_dim, page_size, rope, heads_per_span=heads)
    starts = sorted(
        layout.raw_byte(head, part, token, dim)
        for head in range(heads)
        for part in PARTS
        for token, dim in every_token_dim(layout)
    )
    assert starts == list(range(layout.metadata_bytes, layout.raw_span_bytes, 2))


@pytest.mark.parametrize(("head_dim", "page_size"), SIZES)
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_metadata_fields_tile_their_entries(head_dim, page_size, heads):
    layout = PageLayout(heads, head_dim, page_size, heads_per_span=heads)
    used = []
    for head in range(heads):
        for part in PARTS:
            start = layout.start_byte(head, part)
            used += range(start, start + 4)
            assert start % 4 == 0
            used += [
                layout.descriptor_byte(head, part, block) for block in range(layout.blocks_per_part)
            ]
        # Descriptor bytes without a block, and padding.
        entry = range(head * layout.head_metadata_bytes, (head + 1) * layout.head_metadata_bytes)
        assert set(used[-2 * (4 + layout.blocks_per_part) :]) <= set(entry)
    assert len(used) == len(set(used))
    assert layout.metadata_bytes == heads * layout.head_metadata_bytes
    assert layout.head_metadata_bytes % 16 == 0


@pytest.mark.parametrize(("head_dim", "page_size"), SIZES)
def test_sizes_are_those_of_the_format(head_dim, page_size):
    """FORMAT.md sections 2 and 3."""
    layout = PageLayout(6, head_dim, page_size, heads_per_span=3)
    blocks = page_size * head_dim // 512
    descriptors = max(4, blocks)
    entry = -(-2 * (4 + descriptors) // 16) * 16
    span = 3 * (entry + 2 * blocks * 1024)
    assert layout.blocks_per_part == blocks
    assert layout.pairs == head_dim // 32
    assert layout.descriptor_bytes == descriptors
    assert layout.head_metadata_bytes == entry
    assert layout.raw_span_bytes == span
    assert layout.span_stride == -(-span // 128) * 128
    assert layout.spans == 2
    assert layout.page_stride == 2 * layout.span_stride
    assert layout.page_values == 2 * 6 * page_size * head_dim
    assert layout.descriptor_byte(2, "k") == 2 * entry + 4
    assert layout.start_byte(2, "v") == 2 * entry + 4 + descriptors


@pytest.mark.parametrize(("head_dim", "page_size"), SIZES)
def test_raw_metadata_says_where_raw_blocks_are(head_dim, page_size):
    layout = PageLayout(2, head_dim, page_size, heads_per_span=2)
    data = layout.raw_metadata()
    assert len(data) == layout.metadata_bytes
    rebuilt = bytearray(len(data))
    start = layout.metadata_bytes
    for head, part in itertools.product(range(2), PARTS):
        at = layout.start_byte(head, part)
        rebuilt[at : at + 4] = (start // 16).to_bytes(4, "little")
        for block in range(layout.blocks_per_part):
            rebuilt[layout.descriptor_byte(head, part, block)] = 255
        assert layout.raw_start(head, part) == start
        start += layout.blocks_per_part * RAW_KIND.nbytes
    assert data == bytes(rebuilt)
    assert start == layout.raw_span_bytes


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 12, 32])
@pytest.mark.parametrize(("head_dim", "page_size"), SIZES)
def test_default_heads_per_span_is_the_most_that_fit(head_dim, page_size, heads):
    layout = PageLayout(heads, head_dim, page_size)
    assert heads % layout.heads_per_span == 0
    assert layout.raw_span_bytes <= SPAN_LIMIT or layout.heads_per_span == 1
    for more in range(layout.heads_per_span + 1, heads + 1):
        if heads % more == 0:
            assert more * layout.raw_head_bytes > SPAN_LIMIT


def test_span_limit_is_the_number_in_the_format():
    assert SPAN_LIMIT == 69_632
    assert page.SPAN_ALIGNMENT == 128
    assert PageLayout(8, 128, 16).heads_per_span == 8


# ---- refusals ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim=96 is not supported; choose one of 64, 128, 256"),
        ({"head_dim": 128.0}, "head_dim=128.0 must be an int"),
        ({"page_size": 8}, "page_size=8 is not supported"),
        ({"page_size": True}, "page_size=True must be an int"),
        ({"rope": "none"}, "rope='none' is not supported"),
        ({"max_exceptions": 5}, "max_exceptions=5 is not supported"),
        ({"max_exceptions": -1}, "max_exceptions=-1 is not supported"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be at least 1"),
        ({"heads_per_span": 3}, "heads_per_span=3 is not supported; choose one of 1, 2, 4, 8"),
        ({"heads_per_span": -1}, "heads_per_span=-1 is not supported"),
    ],
)
def test_shapes_the_format_cannot_hold_are_refused(change, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        PageLayout(**{"num_kv_heads": 8, "head_dim": 128} | change)
