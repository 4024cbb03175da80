"""The format of a losslessly compressed KV page, in plain integer Python (see FORMAT.md).

Maps (token, dim) to (block, tile, lane, v) to bytes and back, for K and V.  Nothing here imports
torch or cutlass: the reference backend, the kernels, the tests and the figures all read this one
definition.
"""

from zf_layouts.block import BLOCK_VALUES, KINDS, BlockKind, decode_block, encode_block, kind_of
from zf_layouts.page import (
    FORMAT_VERSION,
    HEAD_DIMS,
    PAGE_SIZES,
    PARTS,
    ROPES,
    PageLayout,
    Part,
    Rope,
)

__all__ = [
    "BLOCK_VALUES",
    "FORMAT_VERSION",
    "HEAD_DIMS",
    "KINDS",
    "PAGE_SIZES",
    "PARTS",
    "ROPES",
    "BlockKind",
    "PageLayout",
    "Part",
    "Rope",
    "decode_block",
    "encode_block",
    "kind_of",
]
