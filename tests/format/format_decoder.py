"""A decoder of zf_cute pages, format version 1.

Written from layouts/FORMAT.md alone, without seeing the project's code. It must stay independent
of that code: it may import nothing of the project, so that agreement between the two is evidence
that the document is complete. Section numbers in comments are those of FORMAT.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BLOCK_VALUES = 512
RAW_BYTES = 1024
COMPRESSED_BYTES = 768
EXCEPTION_BYTES = 16
SPAN_ALIGNMENT = 128  # a place counts span starts in this unit
START_UNIT = 16  # a metadata entry counts part starts in this unit

RAW = 255
LAST_WITH_EXCEPTIONS = 248
FIRST_WITH_EXCEPTIONS = 128

# Selector of an exception entry -> the two lowest bits of its position (section 5).
SELECTORS = {0x3217: 0, 0x3270: 1, 0x3710: 2, 0x7210: 3}


@dataclass(frozen=True)
class Format:
    """The parameters of section 2, which a page does not store, and what follows from them."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    rope: str
    max_exceptions: int
    heads_per_span: int

    def __post_init__(self) -> None:
        """Raise ValueError for a parameter outside the table of section 2."""
        if self.num_kv_heads < 1:
            raise ValueError(f"num_kv_heads must be 1 or more, not {self.num_kv_heads}")
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"head_dim must be 64, 128 or 256, not {self.head_dim}")
        if self.page_size not in (16, 32, 64):
            raise ValueError(f"page_size must be 16, 32 or 64, not {self.page_size}")
        if self.rope not in ("half", "interleaved"):
            raise ValueError(f"rope must be 'half' or 'interleaved', not {self.rope!r}")
        if not 0 <= self.max_exceptions <= 4:
            raise ValueError(f"max_exceptions must be in 0..4, not {self.max_exceptions}")
        if self.heads_per_span < 1 or self.num_kv_heads % self.heads_per_span:
            raise ValueError(
                f"heads_per_span {self.heads_per_span} does not divide {self.num_kv_heads} heads"
            )

    @property
    def blocks_per_part(self) -> int:
        """Return the number of blocks in the K, or in the V, of one head."""
        return self.page_size * self.head_dim // BLOCK_VALUES

    @property
    def descriptor_bytes(self) -> int:
        """Return the bytes that a metadata entry reserves for the descriptors of one part."""
        return max(4, self.blocks_per_part)

    @property
    def head_metadata_bytes(self) -> int:
        """Return the length of the metadata entry of one head."""
        return -(-2 * (4 + self.descriptor_bytes) // 16) * 16

    @property
    def metadata_bytes(self) -> int:
        """Return the length of the metadata of one span."""
        return self.heads_per_span * self.head_metadata_bytes

    @property
    def raw_span_bytes(self) -> int:
        """Return the length of a span with every block raw, the greatest there is."""
        return self.metadata_bytes + self.heads_per_span * 2 * self.blocks_per_part * RAW_BYTES

    @property
    def spans(self) -> int:
        """Return the number of spans in a page."""
        return self.num_kv_heads // self.heads_per_span


def decode_page(
    pool: bytes,
    places: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    rope: str,
    max_exceptions: int,
    heads_per_span: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V of one page as uint16 BF16 patterns, each (page_size, num_kv_heads, head_dim).

    `places` has, for each span of the page, its start in units of 128 bytes from the first byte of
    `pool` and its length in bytes. ValueError is raised for everything that section 7 has a reader
    check, and for parameters that section 2 does not allow. No byte outside a span is read.
    """
    fmt = Format(num_kv_heads, head_dim, page_size, rope, max_exceptions, heads_per_span)
    if len(places) != fmt.spans:
        raise ValueError(f"a page has {fmt.spans} spans, but {len(places)} places are given")
    k = np.empty((page_size, num_kv_heads, head_dim), np.uint16)
    v = np.empty_like(k)
    for index, (start, length) in enumerate(places):
        span = _cut_span(pool, int(start), int(length), fmt)
        for head_in_span in range(heads_per_span):
            head = index * heads_per_span + head_in_span
            entry = head_in_span * fmt.head_metadata_bytes
            k[:, head] = _decode_part(span, entry, "K", fmt)
            v[:, head] = _decode_part(span, entry + 4 + fmt.descriptor_bytes, "V", fmt)
    return k, v


def _cut_span(pool: bytes, start: int, length: int, fmt: Format) -> memoryview:
    """Return the bytes of one span after checking its place; nothing else is read from there on."""
    first = start * SPAN_ALIGNMENT
    view = memoryview(pool).cast("B")
    if start < 0 or length < 0 or first + length > len(view):
        raise ValueError(f"span at byte {first} of {length} bytes is not inside the pool")
    if length % 16:
        raise ValueError(f"span length {length} is not a multiple of 16")
    if not fmt.metadata_bytes <= length <= fmt.raw_span_bytes:
        raise ValueError(
            f"span length {length} is not in {fmt.metadata_bytes}..{fmt.raw_span_bytes}"
        )
    return view[first : first + length]


def _decode_part(span: memoryview, entry: int, part: str, fmt: Format) -> np.ndarray:
    """Return a part as (page_size, head_dim); `entry` is where its start and descriptors lie."""
    begin = int.from_bytes(span[entry : entry + 4], "little") * START_UNIT
    descriptors = span[entry + 4 : entry + 4 + fmt.blocks_per_part]
    sizes = [_block_bytes(descriptor, fmt.max_exceptions) for descriptor in descriptors]
    if begin < fmt.metadata_bytes:
        raise ValueError(f"{part} start {begin} lies inside the metadata")
    if begin + sum(sizes) > len(span):
        raise ValueError(f"{part} blocks at {begin} pass the span's length {len(span)}")

    values = np.empty((fmt.blocks_per_part, 2, 32, 8), np.uint16)
    for n, (descriptor, size) in enumerate(zip(descriptors, sizes, strict=True)):
        values[n] = _decode_block(span[begin : begin + size], descriptor, fmt.max_exceptions)
        begin += size

    tokens, dims = _coordinates(part, fmt)
    result = np.empty((fmt.page_size, fmt.head_dim), np.uint16)
    result[tokens, dims] = values
    return result


def _block_bytes(descriptor: int, max_exceptions: int) -> int:
    """Return the size of a block; raise ValueError if no block may have this descriptor."""
    if descriptor == RAW:
        return RAW_BYTES
    if descriptor > LAST_WITH_EXCEPTIONS:
        raise ValueError(f"descriptor {descriptor} has no meaning")
    if descriptor < FIRST_WITH_EXCEPTIONS:
        return COMPRESSED_BYTES
    if max_exceptions == 0:
        raise ValueError(f"descriptor {descriptor} has exceptions, but max_exceptions is 0")
    return COMPRESSED_BYTES + EXCEPTION_BYTES


def _decode_block(block: memoryview, descriptor: int, max_exceptions: int) -> np.ndarray:
    """Return the values of one block as (tile, lane, v)."""
    if descriptor == RAW:
        return np.frombuffer(block, "<u2").reshape(2, 32, 8)

    has_exceptions = descriptor >= FIRST_WITH_EXCEPTIONS
    half_base = descriptor - FIRST_WITH_EXCEPTIONS if has_exceptions else descriptor

    # One row per fragment, one column per v: flattened, the index is the position.
    low = np.frombuffer(block[:512], np.uint8).reshape(64, 8).astype(np.uint16)
    codes = np.frombuffer(block[512:768], np.uint8).reshape(64, 4).astype(np.uint16)
    sign = np.concatenate([codes >> 7, codes >> 6 & 1], axis=1)
    offset = np.concatenate([codes & 7, codes >> 3 & 7], axis=1)
    values = sign << 15 | (offset + half_base) << 8 | low

    if has_exceptions:
        flat = values.reshape(BLOCK_VALUES)
        for position, high in _exceptions(block[COMPRESSED_BYTES:], max_exceptions):
            flat[position] = high << 8 | block[position]
    return values.reshape(32, 2, 8).transpose(1, 0, 2)


def _exceptions(data: memoryview, max_exceptions: int) -> list[tuple[int, int]]:
    """Return (position, high byte) of each used entry, after checking the form and the order."""
    entries = [int.from_bytes(data[i : i + 4], "little") for i in range(0, EXCEPTION_BYTES, 4)]
    # Unused entries repeat the last used one: those past its first occurrence are unused.
    used = entries[: entries.index(entries[-1]) + 1]
    if any(entry != used[-1] for entry in entries[len(used) :]):
        raise ValueError("unused exception entries do not repeat the last used one")
    if len(used) > max_exceptions:
        raise ValueError(f"{len(used)} exceptions, but max_exceptions is {max_exceptions}")

    result: list[tuple[int, int]] = []
    for entry in used:
        selector = entry & 0xFFFF
        if selector not in SELECTORS or entry >> 23 & 1:
            raise ValueError(f"exception entry {entry:#010x} is malformed")
        position = (entry >> 16 & 127) << 2 | SELECTORS[selector]
        if result and position <= result[-1][0]:
            raise ValueError("the positions of the exception entries do not ascend")
        result.append((position, entry >> 24))
    return result


@lru_cache(maxsize=64)
def _coordinates(part: str, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Return the token and the dim of each value of a part, both as (block, tile, lane, v)."""
    n, tile, lane, v = np.ogrid[: fmt.blocks_per_part, :2, :32, :8]
    pairs = fmt.head_dim // 32
    token_tile = n // pairs
    j = n % pairs
    partners_share_block = part == "K" and fmt.rope == "half"
    dim_tile = j + tile * pairs if partners_share_block else 2 * j + tile

    row = lane // 4 + (v >> 1 & 1) * 8
    column = lane % 4 * 2 + (v & 1) + (v >> 2) * 8
    token_in_tile, dim_in_tile = (row, column) if part == "K" else (column, row)

    shape = (fmt.blocks_per_part, 2, 32, 8)
    tokens = np.broadcast_to(16 * token_tile + token_in_tile, shape)
    dims = np.broadcast_to(16 * dim_tile + dim_in_tile, shape)
    return tokens, dims
