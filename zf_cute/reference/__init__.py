"""The reference backend: the same bytes and the same API in torch, on any device.

Written to be read and believed, not to be fast; the kernels are held against it bit for bit.
"""

from zf_cute.reference.blocks import (
    block_bytes,
    block_kinds,
    decode_blocks,
    encode_blocks,
    outlier_counts,
)
from zf_cute.reference.paged_attention import attention
from zf_cute.reference.pages import decode_pages, encode_pages, part_blocks, read_metadata

__all__ = [
    "attention",
    "block_bytes",
    "block_kinds",
    "decode_blocks",
    "decode_pages",
    "encode_blocks",
    "encode_pages",
    "outlier_counts",
    "part_blocks",
    "read_metadata",
]
