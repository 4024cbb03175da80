"""Pages and spans: which block holds a (token, dim), and where the bytes of a page lie.

A page is `page_size` tokens of one layer, all KV heads, K and V.  It is stored as spans of
`heads_per_span` consecutive heads; a span is contiguous, so that one bulk copy brings it to shared
memory, and starts at a multiple of 128 bytes.  In a span come the heads' metadata, then for each
head the blocks of its K part and of its V part.  A raw (unsealed) page is the same span with every
block raw, so its places are known beforehand and new tokens can be written straight into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from zf_layouts.block import (
    BLOCK_VALUES,
    MAX_EXCEPTIONS,
    RAW,
    RAW_KIND,
    position,
    raw_byte,
    tile_lane_value,
)
from zf_layouts.fragment import TILE, lane_value, row_column

FORMAT_VERSION = 1
"""Version of FORMAT.md that this package implements."""

Part = Literal["k", "v"]
Rope = Literal["half", "interleaved"]

PARTS: tuple[Part, Part] = ("k", "v")
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
ROPES: tuple[Rope, Rope] = ("half", "interleaved")

UNIT = 16
"""Bytes in which starts inside a span are counted."""

SPAN_ALIGNMENT = 128
"""Spans start at multiples of this: bulk copies from 16-byte starts cost 5 % (H200)."""

SPAN_LIMIT = 68 << 10
"""Most bytes of a raw span chosen by default: three stages of this leave 23 KiB of the 227 KiB of
shared memory (sm_90) for queries and barriers.  One head may exceed it."""


def round_up(n: int, multiple: int) -> int:
    """Least multiple of `multiple` that is not below `n`."""
    return -(-n // multiple) * multiple


def _chosen(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{name}={value!r} is not supported; choose one of {choices}")


@dataclass(frozen=True)
class PageLayout:
    """Where every value of a page lies.

    Parameters
    ----------
    num_kv_heads : int
        KV heads of a layer, on this GPU.
    head_dim : int
        64, 128 or 256.
    page_size : int
        Tokens in a page: 16, 32 or 64.
    rope : {"half", "interleaved"}
        Which dims the model rotates together: dim i with i + head_dim / 2 (Llama, Qwen, Mistral),
        or 2i with 2i + 1.  Decides the two tiles that share a K block.
    max_exceptions : int
        Most values outside the window that a compressed block may have, 0 to 4.
    heads_per_span : int
        Consecutive KV heads in a span; divides `num_kv_heads`.  0 chooses the most whose raw span
        is at most SPAN_LIMIT bytes.

    Raises
    ------
    ValueError
        Names the parameter, its value and what is supported.
    """

    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    rope: Rope = "half"
    max_exceptions: int = MAX_EXCEPTIONS
    heads_per_span: int = 0

    def __post_init__(self) -> None:
        """Refuse what the format cannot hold, and settle heads_per_span."""
        for name in ("num_kv_heads", "head_dim", "page_size", "max_exceptions", "heads_per_span"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r} must be an int")
        if self.num_kv_heads < 1:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must be at least 1")
        _chosen("head_dim", self.head_dim, HEAD_DIMS)
        _chosen("page_size", self.page_size, PAGE_SIZES)
        _chosen("rope", self.rope, ROPES)
        _chosen("max_exceptions", self.max_exceptions, tuple(range(MAX_EXCEPTIONS + 1)))
        divisors = [n for n in range(1, self.num_kv_heads + 1) if self.num_kv_heads % n == 0]
        if self.heads_per_span == 0:
            room = [n for n in divisors if n * self.raw_head_bytes <= SPAN_LIMIT]
            object.__setattr__(self, "heads_per_span", max(room, default=1))
        _chosen("heads_per_span", self.heads_per_span, tuple(divisors))
        if self.raw_span_bytes >> 32:
            raise ValueError(
                f"heads_per_span={self.heads_per_span} makes spans of {self.raw_span_bytes} bytes; "
                "their length must fit 32 bits"
            )

    # ---- sizes ---------------------------------------------------------------------------------
    @cached_property
    def blocks_per_part(self) -> int:
        """Blocks in K (or V) of one head."""
        return self.page_size * self.head_dim // BLOCK_VALUES

    @property
    def pairs(self) -> int:
        """Blocks side by side along the head: pairs of tiles of 16 dims."""
        return self.head_dim // (2 * TILE)

    @property
    def descriptor_bytes(self) -> int:
        """Bytes of one part's descriptors: one a block, at least four."""
        return max(4, self.blocks_per_part)

    @cached_property
    def head_metadata_bytes(self) -> int:
        """Metadata of one head: K start, K descriptors, V start, V descriptors, padding to 16."""
        return round_up(2 * (4 + self.descriptor_bytes), UNIT)

    @property
    def metadata_bytes(self) -> int:
        """Metadata at the head of a span."""
        return self.heads_per_span * self.head_metadata_bytes

    @cached_property
    def raw_part_bytes(self) -> int:
        """Bytes of one part with every block raw."""
        return self.blocks_per_part * RAW_KIND.nbytes

    @property
    def raw_head_bytes(self) -> int:
        """Metadata and raw blocks of one head."""
        return self.head_metadata_bytes + 2 * self.raw_part_bytes

    @property
    def raw_span_bytes(self) -> int:
        """Bytes of a span with every block raw: the most a span ever takes."""
        return self.heads_per_span * self.raw_head_bytes

    @property
    def span_stride(self) -> int:
        """Bytes set aside for a raw span: raw_span_bytes rounded up to SPAN_ALIGNMENT."""
        return round_up(self.raw_span_bytes, SPAN_ALIGNMENT)

    @cached_property
    def spans(self) -> int:
        """Spans in a page."""
        return self.num_kv_heads // self.heads_per_span

    @property
    def page_stride(self) -> int:
        """Bytes set aside for a raw page."""
        return self.spans * self.span_stride

    @property
    def page_values(self) -> int:
        """Values in a page: all heads, K and V."""
        return 2 * self.num_kv_heads * self.page_size * self.head_dim

    # ---- metadata ------------------------------------------------------------------------------
    def start_byte(self, head: int, part: Part) -> int:
        """Byte in the span of the u32 start of a part; its descriptors follow.

        `head` counts from the span's first head.
        """
        entry = 0 if part == "k" else 4 + self.descriptor_bytes
        return head * self.head_metadata_bytes + entry

    def descriptor_byte(self, head: int, part: Part, block: int = 0) -> int:
        """Byte in the span of a block's descriptor; `head` counts from the span's first head."""
        return self.start_byte(head, part) + 4 + block

    def raw_start(self, head: int, part: Part) -> int:
        """Byte in a raw span where a part's blocks start."""
        return self.metadata_bytes + (2 * head + (part == "v")) * self.raw_part_bytes

    def raw_metadata(self) -> bytes:
        """Metadata of a raw span: the same for every raw span of this layout."""
        data = bytearray(self.metadata_bytes)
        for head in range(self.heads_per_span):
            for part in PARTS:
                at = self.start_byte(head, part)
                data[at : at + 4] = (self.raw_start(head, part) // UNIT).to_bytes(4, "little")
                at = self.descriptor_byte(head, part)
                data[at : at + self.blocks_per_part] = bytes([RAW]) * self.blocks_per_part
        return bytes(data)

    # ---- (token, dim) <-> (block, tile, lane, v) -----------------------------------------------
    def dim_tiles(self, part: Part, pair: int) -> tuple[int, int]:
        """The two 16-dim tiles of a block: RoPE partners for K of a "half" model, else neighbours.

        Partners are alike in magnitude, so their block needs fewer exponents: on real keys the
        worst layer goes from 60 % to 89 % compressible blocks.
        """
        if part == "k" and self.rope == "half":
            return pair, pair + self.pairs
        return 2 * pair, 2 * pair + 1

    def locate(self, part: Part, token: int, dim: int) -> tuple[int, int, int, int]:
        """(block, tile, lane, v) that holds a token's dim in a part."""
        dim_tile = dim // TILE
        if part == "k" and self.rope == "half":
            tile, pair = divmod(dim_tile, self.pairs)
        else:
            pair, tile = divmod(dim_tile, 2)
        block = token // TILE * self.pairs + pair
        row, column = token % TILE, dim % TILE
        lane, v = lane_value(row, column) if part == "k" else lane_value(column, row)
        return block, tile, lane, v

    def token_dim(self, part: Part, block: int, tile: int, lane: int, v: int) -> tuple[int, int]:
        """(token, dim) held by value `v` of `lane` in a block's tile: inverse of `locate`."""
        token_tile, pair = divmod(block, self.pairs)
        row, column = row_column(lane, v)
        token, dim = (row, column) if part == "k" else (column, row)
        return token_tile * TILE + token, self.dim_tiles(part, pair)[tile] * TILE + dim

    def raw_byte(self, head: int, part: Part, token: int, dim: int) -> int:
        """Byte in a raw span of a value; `head` counts from the span's first head."""
        block, tile, lane, v = self.locate(part, token, dim)
        inside = raw_byte(position(tile, lane, v))
        return self.raw_start(head, part) + block * RAW_KIND.nbytes + inside

    def value_order(self, part: Part) -> tuple[int, ...]:
        """``token * head_dim + dim`` of every value of a part, block by block, by position."""
        return _value_order(self.head_dim, self.page_size, self.rope, part)


@cache
def _value_order(head_dim: int, page_size: int, rope: Rope, part: Part) -> tuple[int, ...]:
    layout = PageLayout(1, head_dim, page_size, rope)
    order = []
    for block in range(layout.blocks_per_part):
        for at in range(BLOCK_VALUES):
            token, dim = layout.token_dim(part, block, *tile_lane_value(at))
            order.append(token * head_dim + dim)
    return tuple(order)
