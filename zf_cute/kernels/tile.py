"""Token rows in shared memory: where rows of K or V become MMA fragments, and back.

A warp keeps 16 tokens of one head as rows of ``2 * head_dim`` bytes.  Rows move to and from global
memory 16 bytes a lane; 16x16 tiles move to and from registers as fragments, four 8x8 matrices at a
time, transposed for V, whose tiles have dims as rows.  The 16-byte units of a row are permuted by
the token, so that neither way of access meets a bank twice: eight rows of a matrix lie in eight
different units of 128 bytes, and so do eight units of a row.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32

from zf_cute.kernels import ptx
from zf_layouts import PageLayout, Part
from zf_layouts.fragment import LANES, TILE

ROW_UNIT = 8
"""Values in 16 bytes, and rows and columns of one 8x8 matrix."""


class TokenTile:
    """16 tokens of one head in shared memory, owned by one warp.

    Parameters
    ----------
    head_dim : int
        64, 128 or 256: static.
    rope : str
        Which dim tiles share a K block: static.
    start : Pointer
        First of the tile's ``16 * head_dim`` 16-bit elements; aligned to 128 bytes.
    """

    def __init__(self, head_dim: int, rope: Any, start: cute.Pointer) -> None:
        """Keep the statics and where the tile lies."""
        self.layout = PageLayout(1, head_dim, TILE, rope)
        self.units = head_dim // ROW_UNIT
        self.start = start

    # The DSL carries objects through branches and loops by these two.
    def __extract_mlir_values__(self) -> list[Any]:
        """The run-time part: the pointer."""
        return cutlass.extract_mlir_values(self.start)

    def __new_from_mlir_values__(self, values: list[Any]) -> TokenTile:
        """The same tile at another pointer value."""
        start = cutlass.new_from_mlir_values(self.start, values)
        return TokenTile(self.layout.head_dim, self.layout.rope, start)

    def unit(self, token: Any, unit: Any) -> cute.Pointer:
        """Where the 16-byte unit `unit` of a token's row lies."""
        return self.start + (token * self.units + (unit ^ (token % ROW_UNIT))) * ROW_UNIT

    def _matrix_row(self, part: Part, pair: int, tile: int, lane: Int32) -> cute.Pointer:
        """Address that `lane` gives for the four 8x8 matrices of a tile.

        Register m of a fragment has rows 8 * (m % 2) .. and columns 8 * (m // 2) .. of the tile;
        lane i gives row i % 8 of matrix i // 8 as it lies in memory, where rows are tokens.
        """
        low, high = (lane // ROW_UNIT) % 2, lane // (2 * ROW_UNIT)
        token_half, dim_half = (low, high) if part == "k" else (high, low)
        dim_tile = self.layout.dim_tiles(part, pair)[tile]
        return self.unit(lane % ROW_UNIT + token_half * ROW_UNIT, 2 * dim_tile + dim_half)

    def fragment(self, part: Part, pair: int, tile: int, lane: Int32) -> tuple[Uint32, ...]:
        """The lane's four registers of a tile: rows to fragments."""
        return ptx.ldmatrix_x4(self._matrix_row(part, pair, tile, lane), part == "v")

    def put_fragment(self, part: Part, pair: int, tile: int, lane: Int32, words: Any) -> None:
        """Inverse of `fragment`: fragments to rows."""
        ptx.stmatrix_x4(self._matrix_row(part, pair, tile, lane), words, part == "v")

    # ---- rows ----------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Times that a warp moves 16 bytes a lane to move the whole tile."""
        return TILE * self.units // LANES

    def place(self, step: int, lane: Int32) -> tuple[Int32, Int32]:
        """Token and 16-byte unit that a lane moves in one step: whole rows, a few at a time."""
        token = step * (LANES // self.units) + lane // self.units
        return token, lane % self.units

    def fetch(self, step: int, lane: Int32, row: Int64) -> None:
        """Start copying a lane's 16 bytes of a step from the row at a global address."""
        token, unit = self.place(step, lane)
        ptx.copy_async_16(self.unit(token, unit), row + unit * 16)

    def take(self, step: int, lane: Int32) -> cute.Tensor:
        """A lane's 16 bytes of a step, in registers."""
        token, unit = self.place(step, lane)
        words = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(self._words(self.unit(token, unit)), words)
        return words

    def put_value(self, token: Int32, dim: Int32, value: Any) -> None:
        """Write one value: the slow way, for rows of any strides."""
        at = self.unit(token, dim // ROW_UNIT) + dim % ROW_UNIT
        cute.make_tensor(at, cute.make_layout(1))[0] = Uint16(value)

    @staticmethod
    def _words(pointer: cute.Pointer) -> cute.Tensor:
        """Four words at a pointer that is a multiple of 16 bytes."""
        aligned = cute.make_ptr(Uint32, pointer.toint(), pointer.memspace, assumed_align=16)
        return cute.make_tensor(aligned, cute.make_layout(4))
