"""How many warps a launch takes: what kernels and launches must agree on, without the DSL."""

from __future__ import annotations

from zf_layouts.fragment import TILE

ENCODE_GROUP = 4
"""Blocks that a warp encodes at a time: 32 registers of values.  Spans hold a multiple of four."""

ENCODE_MAX_WARPS = 16
"""Warps of a CTA that encodes, at most."""

FEW_SPANS = 264
"""Spans to encode up to which it matters more how soon one is done: two an SM of an H200."""

FEW_WINDOWS = 512
"""Windows of 16 rows to append, times heads, up to which each row gets a warp of its own: rows of a
decode step then wait for memory side by side and not in turn."""


def encode_warps(blocks: int, spans: int) -> int:
    """Warps of a CTA that encodes one of `spans` spans of `blocks` blocks each.

    Few spans leave SMs idle, and what counts is how soon one is done: every four blocks get a warp.
    Where there are many, a warp that finds nothing to do costs as much as one that does: spans of 4
    blocks ran at 29 % of the copy rate with 4 warps and at 73 % with 1; those of 64 blocks at 89 to
    91 % with 1, 2 or 4, and at 76 to 80 % with 8 (H200).
    """
    if spans <= FEW_SPANS:
        return min(blocks // ENCODE_GROUP, ENCODE_MAX_WARPS)
    return min(max(blocks // (4 * ENCODE_GROUP), 1), 4)


def append_sharers(rows: int, heads: int) -> int:
    """Warps that share the single rows of a window of 16 rows of one head."""
    return TILE if -(-rows // TILE) * heads <= FEW_WINDOWS else 1
