"""Which lane holds which element of a 16x16 tile: the A operand of ``mma.m16n8k16``.

A *tile* is one A operand, 16 rows by 16 columns.  A *fragment* is the eight values of one lane, in
the order of its four 32-bit registers; `v` (0..7) is the value index CuTe calls V in a TV layout.
CuTe writes the map as ``((4,8),(2,2,2)):((32,1),(16,8,128))`` with index ``row + 16 * column``.
``wgmma`` with A in registers uses the same fragment, 16 rows a warp.

A K tile has tokens as rows and dims as columns (S = K Q^T); a V tile has dims as rows and tokens as
columns (O = V^T P^T), so both operands come out of storage ready for the tensor core.
"""

from __future__ import annotations

TILE = 16
"""Rows, and columns, of a tile."""

LANES = 32

FRAGMENT = 8
"""Values of a tile that one lane holds."""


def lane_value(row: int, column: int) -> tuple[int, int]:
    """(lane, v) that holds element (row, column) of a tile."""
    lane = row % 8 * 4 + column % 8 // 2
    v = column % 2 + row // 8 * 2 + column // 8 * 4
    return lane, v


def row_column(lane: int, v: int) -> tuple[int, int]:
    """(row, column) of the tile element that `lane` holds as value `v`: inverse of lane_value."""
    row = lane // 4 + (v >> 1 & 1) * 8
    column = lane % 4 * 2 + (v & 1) + (v >> 2) * 8
    return row, column
