"""Whole pages: lossless, as FORMAT.md says byte for byte, and safe to read when damaged."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from bits import (
    entry,
    entry_bytes,
    format_parameters,
    from_patterns,
    mixed_values,
    places_of,
    same_bits,
    stored_bytes,
    to_patterns,
)
from format.format_decoder import decode_page
from hypothesis import given, settings

import zf_layouts
from zf_cute import reference
from zf_cute.errors import FormatError
from zf_cute.pages import LayerPages
from zf_layouts import PageLayout

# One head, two in one span and apart, three (no power of two), eight in one, four and eight spans.
HEADS = ((1, 0), (2, 2), (2, 1), (3, 0), (3, 1), (8, 8), (8, 2), (8, 1))


def sealed(
    layout: PageLayout, pages: int = 2, seed: int = 0, *, gap: int = 0
) -> tuple[torch.Tensor, torch.Tensor, LayerPages]:
    """K, V and the encoded pages, spans `gap` times 128 bytes apart and in reverse page order."""
    shape = (pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
    k, v = mixed_values(shape, seed), mixed_values(shape, seed + 1)
    spans, lengths = reference.encode_pages(k, v, layout)
    stride = layout.span_stride + 128 * gap
    pool = torch.full((pages * layout.spans * stride,), 0xFF, dtype=torch.uint8)
    # Page order reversed: a reader that ignores the place table reads another page.
    start = torch.arange(pages * layout.spans).view(pages, -1).flip(0) * (stride // 128)
    for page, span in product(range(pages), range(layout.spans)):
        begin, length = int(start[page, span]) * 128, int(lengths[page, span])
        pool[begin : begin + length] = spans[page, span, :length]
    return k, v, LayerPages(pool, torch.stack([start, lengths], 2).to(torch.int32), layout)


def decode(kv: LayerPages, page: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One page, decoded by the code under test."""
    k, v = reference.decode_pages(kv, torch.tensor([page]))
    return k[0], v[0]


def decode_independently(kv: LayerPages, page: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One page, decoded by the decoder that was written from FORMAT.md alone."""
    parameters = format_parameters(kv.layout)
    k, v = decode_page(memoryview(kv.pool.numpy()), places_of(kv, page), **parameters)
    return from_patterns(k), from_patterns(v)


# ---- every layout ------------------------------------------------------------------------------
@pytest.mark.parametrize("max_exceptions", [0, 4])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_layout(head_dim: int, page_size: int, rope: str, max_exceptions: int) -> None:
    kinds = np.zeros(256, int)
    for heads, heads_per_span in HEADS:
        layout = PageLayout(heads, head_dim, page_size, rope, max_exceptions, heads_per_span)
        k, v, kv = sealed(layout, seed=heads)
        got = reference.decode_pages(kv, torch.tensor([0, 1]))
        assert same_bits(got[0], k)
        assert same_bits(got[1], v)
        for page in range(2):
            got_k, got_v = decode_independently(kv, page)
            assert same_bits(got_k, k[page])
            assert same_bits(got_v, v[page])
        descriptors, _ = reference.read_metadata(kv, torch.tensor([0, 1]))
        kinds += np.bincount(descriptors.flatten(), minlength=256)
    # The data has what it is meant to test: all kinds, mixed within pages.
    assert kinds[:128].sum()
    assert kinds[255]
    assert bool(kinds[128:249].sum()) == (max_exceptions > 0)


@pytest.mark.parametrize("heads", [(1, 0), (3, 3), (8, 2)])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_metadata_is_that_of_the_format(
    head_dim: int, page_size: int, heads: tuple[int, int]
) -> None:
    layout = PageLayout(heads[0], head_dim, page_size, heads_per_span=heads[1])
    shape = (2, page_size, heads[0], head_dim)
    spans, lengths = reference.encode_pages(mixed_values(shape, 5), mixed_values(shape, 6), layout)
    # FORMAT.md section 3, written again.
    blocks = page_size * head_dim // 512
    reserved = max(4, blocks)
    entry_size = -(-2 * (4 + reserved) // 16) * 16
    per_span = layout.heads_per_span
    assert spans.shape == (2, heads[0] // per_span, layout.span_stride)
    assert layout.span_stride % 128 == 0
    raw_bytes = per_span * (entry_size + 2 * blocks * 1024)
    assert raw_bytes <= layout.span_stride < raw_bytes + 128
    pages = torch.arange(2)
    start = torch.arange(2 * layout.spans).view(2, -1) * (layout.span_stride // 128)
    kv = LayerPages(spans.flatten(), torch.stack([start, lengths], 2).to(torch.int32), layout)
    descriptors, first = reference.read_metadata(kv, pages)
    for page, span in product(range(2), range(layout.spans)):
        data = spans[page, span].numpy().tobytes()
        at = per_span * entry_size
        for head in range(per_span):
            row = data[head * entry_size : (head + 1) * entry_size]
            for part in range(2):
                begin = part * (4 + reserved)
                assert int.from_bytes(row[begin : begin + 4], "little") * 16 == at
                held = row[begin + 4 : begin + 4 + blocks]
                which = (page, span * per_span + head, part)
                assert held == bytes(descriptors[which].tolist())
                assert not any(row[begin + 4 + blocks : begin + 4 + reserved])
                where = [at + sum(map(stored_bytes, held[:i])) for i in range(blocks)]
                base = (page * layout.spans + span) * layout.span_stride
                assert [(base + w) // 16 for w in where] == first[which].tolist()
                at += sum(map(stored_bytes, held))
            assert not any(row[2 * (4 + reserved) :])
        assert at == lengths[page, span]
        assert not any(data[at:])


@pytest.mark.parametrize(
    ("layout", "max_exceptions"),
    [
        ((1, 64, 16, "half"), 4),
        ((1, 64, 16, "interleaved"), 0),
        ((2, 128, 32, "half"), 4),
        ((2, 128, 16, "interleaved"), 4),
    ],
)
def test_pages_are_those_of_plain_python(layout: tuple, max_exceptions: int) -> None:
    # The whole span, from loops over FORMAT.md section 4 and the plain-Python block encoder.
    heads, head_dim, page_size, rope = layout
    layout = PageLayout(heads, head_dim, page_size, rope, max_exceptions, heads)
    shape = (1, page_size, heads, head_dim)
    values = mixed_values(shape, 7), mixed_values(shape, 8)
    spans, lengths = reference.encode_pages(*values, layout)
    pairs, blocks = head_dim // 32, page_size * head_dim // 512
    entry_size = -(-2 * (4 + max(4, blocks)) // 16) * 16
    metadata, data = bytearray(heads * entry_size), bytearray()
    for head, part in product(range(heads), range(2)):
        patterns = to_patterns(values[part])[0, :, head]
        begin = head * entry_size + part * (4 + max(4, blocks))
        start = (len(metadata) + len(data)) // 16
        metadata[begin : begin + 4] = start.to_bytes(4, "little")
        for n in range(blocks):
            block = [0] * 512
            for tile, lane, v in product(range(2), range(32), range(8)):
                j = n % pairs
                neighbours = part == 1 or rope == "interleaved"
                dim_tile = 2 * j + tile if neighbours else j + tile * pairs
                row, column = lane // 4 + (v >> 1 & 1) * 8, lane % 4 * 2 + (v & 1) + (v >> 2) * 8
                token, dim = (row, column) if part == 0 else (column, row)
                token, dim = n // pairs * 16 + token, dim_tile * 16 + dim
                block[lane * 16 + tile * 8 + v] = int(patterns[token, dim])
            descriptor, stored = zf_layouts.encode_block(block, max_exceptions)
            metadata[begin + 4 + n] = descriptor
            data += stored
    want = bytes(metadata + data)
    assert lengths.item() == len(want)
    assert spans[0, 0, : len(want)].numpy().tobytes() == want


def test_pages_decode_in_any_order_and_again() -> None:
    layout = PageLayout(2, 64, 16)
    k, v, kv = sealed(layout, pages=5)
    ids = torch.tensor([4, 0, 0, 3, 4])
    got_k, got_v = reference.decode_pages(kv, ids)
    assert same_bits(got_k, k[ids])
    assert same_bits(got_v, v[ids])


def test_more_pages_than_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of two pages (16 blocks), and a last one of one.
    monkeypatch.setattr(reference.pages, "BLOCKS_AT_ONCE", 16)
    k, v, kv = sealed(PageLayout(2, 64, 16), pages=5)
    got_k, got_v = reference.decode_pages(kv, torch.arange(5))
    assert same_bits(got_k, k)
    assert same_bits(got_v, v)


def test_values_of_any_stride() -> None:
    layout = PageLayout(2, 64, 16)
    k, v, kv = sealed(layout, pages=2)
    for view in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        _padded,
        _reversed_twice,
    ):
        spans, _ = reference.encode_pages(view(k), view(v), layout)
        start, length = places_of(kv, 0)[0]
        assert torch.equal(spans[0, 0, :length], kv.pool[start * 128 : start * 128 + length])


def _padded(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _reversed_twice(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0, 1).contiguous()[:, :].flip(0, 1)


# ---- nothing outside the span ------------------------------------------------------------------
@pytest.mark.parametrize("fill", [0x00, 0xFF, None])
def test_bytes_outside_the_span_do_not_matter(fill: int | None) -> None:
    layout = PageLayout(4, 64, 16, heads_per_span=2)
    k, v, kv = sealed(layout, pages=3, gap=1)
    for page in range(3):
        inside = torch.zeros(len(kv.pool), dtype=torch.bool)
        for start, length in places_of(kv, page):
            inside[start * 128 : start * 128 + length] = True
        other = torch.randint(256, kv.pool.shape) if fill is None else torch.tensor(fill)
        pool = torch.where(inside, kv.pool, other.to(torch.uint8))
        got_k, got_v = decode(LayerPages(pool, kv.places, layout), page)
        assert same_bits(got_k, k[page])
        assert same_bits(got_v, v[page])


def alone(layout: PageLayout, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, LayerPages]:
    """One page of one span that ends with the pool: a reader that leaves the span fails loudly.

    It begins at byte 256, and a copy of it lies before, so that reading early finds wrong bytes.
    """
    assert layout.spans == 1
    k, v, kv = sealed(layout, pages=1, seed=seed)
    (_, length), *_ = places_of(kv, 0)
    pool = torch.cat([kv.pool[:128], kv.pool[:128] ^ 0xFF, kv.pool[:length]])
    return k[0], v[0], LayerPages(pool, torch.tensor([[[2, length]]], dtype=torch.int32), layout)


@pytest.mark.parametrize("tail", [0, 1, 15, 16, 127])
def test_a_span_may_end_with_the_pool(tail: int) -> None:
    # Also with a tail that is no whole number of 16-byte units.
    k, v, kv = alone(PageLayout(2, 64, 16))
    pool = torch.cat([kv.pool, torch.full((tail,), 0xFF, dtype=torch.uint8)])
    got_k, got_v = decode(LayerPages(pool, kv.places, kv.layout))
    assert same_bits(got_k, k)
    assert same_bits(got_v, v)


@pytest.mark.parametrize("compressible", [True, False])
def test_the_last_block_may_end_with_the_pool(compressible: bool) -> None:
    # A compressed last block is 256 bytes shorter than the row that any block fits.
    layout = PageLayout(1, 64, 16)
    k = torch.randn(1, 16, 1, 64).clamp(0.5, 1).bfloat16()
    v = k if compressible else from_patterns(torch.randint(1 << 16, k.shape))
    spans, lengths = reference.encode_pages(k, v, layout)
    length = int(lengths)
    assert length == 16 + 2 * 768 + 2 * (768 if compressible else 1024)
    places = torch.tensor([[[0, length]]], dtype=torch.int32)
    got_k, got_v = decode(LayerPages(spans.flatten()[:length].clone(), places, layout))
    assert same_bits(got_k, k[0])
    assert same_bits(got_v, v[0])


# ---- damaged pages -----------------------------------------------------------------------------
def refuses(kv: LayerPages) -> bool:
    """Whether both readers refuse page 0; they must agree.  Any other error fails the test."""
    try:
        decode(kv)
        refused = False
    except FormatError:
        refused = True
    try:
        decode_independently(kv)
        refused_independently = False
    except ValueError:
        refused_independently = True
    assert refused == refused_independently
    return refused


def with_place(kv: LayerPages, start: int, length: int) -> LayerPages:
    """The page with another place; both words are given as unsigned numbers."""
    words = np.array([[[start, length]]], np.uint64).astype(np.uint32).view(np.int32)
    return LayerPages(kv.pool, torch.from_numpy(words), kv.layout)


def with_bytes(kv: LayerPages, at: int, data: bytes) -> LayerPages:
    """The page with some bytes of its span changed."""
    pool = kv.pool.clone()
    begin = places_of(kv, 0)[0][0] * 128 + at
    pool[begin : begin + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return LayerPages(pool, kv.places, kv.layout)


@pytest.mark.parametrize("layout", [PageLayout(2, 64, 16), PageLayout(1, 256, 64)])
def test_places_that_are_none(layout: PageLayout) -> None:
    _, _, kv = alone(layout)
    (start, length), *_ = places_of(kv, 0)
    assert not refuses(with_place(kv, start, length))
    # The bytes behind the span are as many as are asked for, so that the length alone is wrong.
    room = torch.zeros(2 * layout.span_stride, dtype=torch.uint8)
    roomy = LayerPages(torch.cat([kv.pool, room]), kv.places, layout)
    for wrong in (
        0,
        16,
        layout.metadata_bytes - 16,
        layout.metadata_bytes,  # no room for any block
        length - 16,  # cuts the last block
        length - 1,
        length + 1,
        length + 8,
        layout.raw_span_bytes + 16,
        layout.raw_span_bytes + 128,
        1 << 31,  # the high bit of a u32, and what a signed word would take as negative
        (1 << 31) + length,
        (1 << 32) - 16,
    ):
        assert refuses(with_place(roomy, start, wrong)), wrong
    # A longer span with slack at its end is well formed: sizes are those of the descriptors.
    assert not refuses(with_place(roomy, start, layout.raw_span_bytes))
    assert refuses(with_place(kv, start, length + 16))  # but not past the pool
    for wrong in (
        start + 1,  # the end passes the pool's by 128 bytes
        kv.pool.numel() // 128 + 1,
        1 << 25,  # 4 GiB: 0 in 32-bit bytes
        (1 << 25) + start,
        1 << 28,  # 2^31 units of 16 bytes, 2^32 with the next: wraps in 32-bit units
        (1 << 28) + start,
        1 << 31,
        (1 << 31) + start,
        (1 << 32) - 1,
        (1 << 32) - 2,
    ):
        assert refuses(with_place(kv, wrong, length)), wrong


@pytest.mark.parametrize("left", [0, 16])
def test_a_pool_that_ends_inside_the_metadata(left: int) -> None:
    # The place is inside the pool, but a reader that goes on to the metadata leaves it.
    _, _, kv = alone(PageLayout(2, 64, 16))
    start = places_of(kv, 0)[0][0]
    cut = LayerPages(kv.pool[: start * 128 + left].clone(), kv.places, kv.layout)
    assert refuses(with_place(cut, start, left))


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("head", [0, 1])
def test_starts_that_are_none(head: int, part: str) -> None:
    layout = PageLayout(2, 64, 16)
    _, _, kv = alone(layout, seed=3)
    at = layout.start_byte(head, part)
    (first, length), *_ = places_of(kv, 0)
    span = kv.pool[first * 128 :].numpy().tobytes()
    own = int.from_bytes(span[at : at + 4], "little")
    metadata, end = layout.metadata_bytes // 16, length // 16
    sizes = [stored_bytes(d) // 16 for d in span[at + 4 : at + 4 + layout.blocks_per_part]]
    # In the metadata of its own and of the other head; the first and last that do not fit; and
    # numbers that wrap in 32 bits, alone (2^28 units are 2^32 bytes) or with the sizes added.
    wrong = [0, metadata - 1, end - sum(sizes) + 1, end - sizes[0], end - 1, end, end + 1]
    wrong += [1 << 28, (1 << 28) + own, 1 << 31, (1 << 31) + own, (1 << 32) - 1]
    wrong += [(1 << 32) - sum(sizes), (1 << 32) - sum(sizes) + metadata]
    for start in wrong:
        assert refuses(with_bytes(kv, at, start.to_bytes(4, "little"))), start
    # A reader follows the starts: any that fits is well formed, whatever lies there, unless it is
    # taken for exception entries that no writer makes.
    for start in (metadata, own, end - sum(sizes)):
        moved = with_bytes(kv, at, start.to_bytes(4, "little"))
        if not refuses(moved):
            assert same_bits(decode(moved)[0], decode_independently(moved)[0])


def test_a_start_in_the_metadata_of_another_head() -> None:
    # Head 1's metadata is where the blocks of a one-head span would start.
    layout = PageLayout(2, 64, 16)
    _, _, kv = alone(layout)
    one_head = layout.head_metadata_bytes // 16
    assert refuses(with_bytes(kv, layout.start_byte(0, "k"), one_head.to_bytes(4, "little")))


def test_parts_may_lie_in_any_order_and_share_bytes() -> None:
    # FORMAT.md section 7: order and gaps are no business of a reader.
    layout = PageLayout(1, 64, 16)
    k = torch.randn(1, 16, 1, 64).clamp(0.5, 1).bfloat16()
    spans, lengths = reference.encode_pages(k, k + 1, layout)
    places = torch.tensor([[[0, int(lengths)]]], dtype=torch.int32)
    kv = LayerPages(spans.flatten(), places, layout)
    k_entry, v_entry = (spans[0, 0, at : at + 8].numpy().tobytes() for at in (0, 8))
    swapped = with_bytes(kv, 0, v_entry + k_entry)
    shared = with_bytes(kv, 8, k_entry)
    for damaged in (swapped, shared):
        for ours, theirs in zip(decode(damaged), decode_independently(damaged), strict=True):
            assert same_bits(ours, theirs)
    assert same_bits(decode(shared)[0], k[0])


def test_every_wrong_descriptor() -> None:
    # Each of the 255 other values at each block of a page that ends with the pool: bigger blocks
    # pass its end, others shift what follows.  Both readers refuse, or decode.
    for max_exceptions in (0, 4):
        layout = PageLayout(1, 64, 16, "half", max_exceptions)
        _, _, kv = alone(layout, seed=9)
        for part, block in product(("k", "v"), range(layout.blocks_per_part)):
            at = layout.descriptor_byte(0, part, block)
            own = int(kv.pool[256 + at])
            refused = [
                refuses(with_bytes(kv, at, bytes([value]))) for value in range(256) if value != own
            ]
            assert sum(refused) >= 6 + 121 * (max_exceptions == 0)
            assert not all(refused)


def test_wrong_descriptors_decode_alike() -> None:
    # Where FORMAT.md gives the value (half_base + offset <= 127), readers agree on it too.
    layout = PageLayout(1, 64, 16)
    k = torch.randn(1, 16, 1, 64).clamp(0.5, 1).bfloat16()
    spans, lengths = reference.encode_pages(k, -k, layout)
    places = torch.tensor([[[0, int(lengths)]]], dtype=torch.int32)
    kv = LayerPages(spans.flatten(), places, layout)
    for value, part in product(range(121), ("k", "v")):
        damaged = with_bytes(kv, layout.descriptor_byte(0, part, 1), bytes([value]))
        for ours, theirs in zip(decode(damaged), decode_independently(damaged), strict=True):
            assert same_bits(ours, theirs)


def test_damaged_metadata_is_refused_or_decoded() -> None:
    # 3,000 pages with one wrong metadata byte each.  The independent decoder says which are still
    # well formed: those must decode together, and each of the others must be refused.
    layout = PageLayout(2, 64, 16)
    _, _, kv = alone(layout, seed=21)
    length = places_of(kv, 0)[0][1]
    stride = -(-length // 128) * 128
    count = 3000
    rng = np.random.default_rng(43)
    pool = torch.zeros(count, stride, dtype=torch.uint8)
    pool[:, :length] = kv.pool[256:]
    at = torch.from_numpy(rng.integers(0, layout.metadata_bytes, count))
    flip = torch.from_numpy(rng.integers(1, 256, count)).to(torch.uint8)
    pool[torch.arange(count), at] ^= flip
    start = torch.arange(count) * (stride // 128)
    places = torch.stack([start, torch.full_like(start, length)], 1).to(torch.int32)
    # The last page ends with the pool.
    damaged = LayerPages(pool.flatten()[: length - stride or None], places[:, None], layout)
    fine = []
    for page in range(count):
        try:
            decode_independently(damaged, page)
            fine.append(page)
        except ValueError:
            with pytest.raises(FormatError):
                reference.decode_pages(damaged, torch.tensor([page]))
    assert 0.1 < len(fine) / count < 0.9  # the test sees both
    reference.decode_pages(damaged, torch.tensor(fine))


@settings(max_examples=150)
@given(
    word=st.sampled_from(["start", "length", "k", "v"]),
    value=st.integers(0, 400) | st.integers(0, (1 << 32) - 1),
)
def test_any_word_is_refused_or_followed(word: str, value: int) -> None:
    layout = PageLayout(1, 64, 16)
    _, _, kv = alone(layout, seed=27)
    start, length = places_of(kv, 0)[0]
    if word == "start":
        refuses(with_place(kv, value, length))
    elif word == "length":
        refuses(with_place(kv, start, value * 16 if value <= 400 else value))
    else:
        refuses(with_bytes(kv, layout.start_byte(0, word), value.to_bytes(4, "little")))


def test_damaged_entries_of_a_page() -> None:
    layout = PageLayout(1, 64, 16)
    k = torch.ones(1, 16, 1, 64).bfloat16()
    k[0, 3, 0, 5] = 0
    spans, lengths = reference.encode_pages(k, k, layout)
    places = torch.tensor([[[0, int(lengths)]]], dtype=torch.int32)
    kv = LayerPages(spans.flatten(), places, layout)
    assert spans[0, 0, 4] >= 128
    assert not refuses(with_bytes(kv, 16 + 768, entry_bytes([entry(9, 3)] * 4)))
    assert refuses(with_bytes(kv, 16 + 768, entry_bytes([entry(9, 3) | 1 << 23] * 4)))
    assert refuses(with_bytes(kv, 16 + 768, entry_bytes([entry(9, 3), *[entry(8, 3)] * 3])))


def test_a_fault_is_named_with_its_page_and_span() -> None:
    layout = PageLayout(4, 64, 16, heads_per_span=2)
    _, _, kv = sealed(layout, pages=3)
    places = kv.places.clone()
    places[1, 1, 1] = 8
    with pytest.raises(FormatError, match=r"page 1, span 1: 8 bytes"):
        reference.decode_pages(LayerPages(kv.pool, places, layout), torch.arange(3))
    pool = kv.pool.clone()
    begin = places_of(kv, 2)[1][0] * 128
    pool[begin + layout.start_byte(1, "v") + 3] = 0x80
    with pytest.raises(FormatError, match=r"page 2, span 1: the V blocks of head 1"):
        reference.decode_pages(LayerPages(pool, kv.places, layout), torch.arange(3))


def test_no_pages() -> None:
    _, _, kv = sealed(PageLayout(2, 64, 16))
    none = torch.empty(0, dtype=torch.int64)
    k, v = reference.decode_pages(kv, none)
    assert k.shape == v.shape == (0, 16, 2, 64)
    descriptors, first = reference.read_metadata(kv, none)
    assert descriptors.shape == first.shape == (0, 2, 2, 2)
    spans, lengths = reference.encode_pages(k, v, kv.layout)
    assert spans.shape == (0, kv.layout.spans, kv.layout.span_stride)
    assert lengths.shape == (0, kv.layout.spans)
