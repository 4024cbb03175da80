"""Matrix loads, stores and transposition, and ``mma.sync``: whole warps only."""

from __future__ import annotations

import numpy as np

from .decode import BLOCKED, LANES, Decoder, Step, operation
from .errors import PtxError
from .loads import SHARED, gather, locator, scatter
from .warp import LANE, Warp

ROW = LANE.astype(np.int64) // 4  # the row of an 8x8 matrix of which a lane holds two elements
COLUMN = LANE.astype(np.int64) % 4  # which two
# The lane that holds each byte of the rows of up to four matrices.
OWNER = np.tile(np.arange(LANES).reshape(8, 4).repeat(4, axis=1), (4, 1))


def whole_warp(w: Warp) -> bool:
    """Whether all lanes are here; where one has exited they never will be."""
    if not w.full and w.live != 0xFFFFFFFF:
        raise PtxError("an instruction for whole warps, and lanes have exited")
    return w.full


def _shape(d: Decoder) -> tuple[int, bool]:
    """Take what ldmatrix and stmatrix share: the number of matrices, and ``.trans``."""
    if not (d.flag("sync") and d.flag("aligned") and d.flag("m8n8") and d.flag("b16")):
        raise d.unknown()
    if d.choice(*SHARED) is None:
        raise d.unknown()
    count = d.choice("x1", "x2", "x4")
    if count is None:
        raise d.unknown()
    d.expect(2)
    return int(count[1:]), d.flag("trans")


def to_fragments(matrices: np.ndarray, *, transposed: bool) -> np.ndarray:
    """Return what each lane holds of 8x8 matrices of 16 bits.

    Parameters
    ----------
    matrices : ndarray
        uint16, shape ``(count, 8, 8)``.
    transposed : bool
        Whether to take columns for rows.

    Returns
    -------
    ndarray
        uint32, shape ``(count, 32)``.
    """
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, LANES)


def to_matrices(fragments: np.ndarray, *, transposed: bool) -> np.ndarray:
    """Return the 8x8 matrices of which lanes hold `fragments`; the inverse of `to_fragments`."""
    matrices = np.ascontiguousarray(fragments).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrices.swapaxes(1, 2)) if transposed else matrices


@operation("ldmatrix")
def _ldmatrix(d: Decoder) -> Step:
    count, transposed = _shape(d)
    items = d.items(0)
    if len(items) != count:
        raise d.unknown()
    puts = [d.put(item, 32) for item in items]
    locate, address = locator("shared"), d.address(1)
    owner = OWNER[: 8 * count]

    def step(w: Warp) -> int | None:
        if not whole_warp(w):
            return BLOCKED
        located = locate(w, address(w)[: 8 * count], 16)
        rows = gather(w, located, 32, 4, owner)
        fragments = to_fragments(rows.view(np.uint16).reshape(count, 8, 8), transposed=transposed)
        for put, fragment in zip(puts, fragments, strict=True):
            put(w, fragment)
        return None

    return step


@operation("stmatrix")
def _stmatrix(d: Decoder) -> Step:
    count, transposed = _shape(d)
    items = d.items(1)
    if len(items) != count:
        raise d.unknown()
    values = [d.fetch(item, 32) for item in items]
    locate, address = locator("shared"), d.address(0)
    owner = OWNER[: 8 * count]

    def step(w: Warp) -> int | None:
        if not whole_warp(w):
            return BLOCKED
        fragments = np.stack([value(w) for value in values])
        rows = to_matrices(fragments, transposed=transposed).view(np.uint32).reshape(-1, 4)
        scatter(w, locate(w, address(w)[: 8 * count], 16), rows, owner)
        return None

    return step


@operation("movmatrix")
def _movmatrix(d: Decoder) -> Step:
    if not all(d.flag(part) for part in ("sync", "aligned", "m8n8", "trans", "b16")):
        raise d.unknown()
    a, put = d.fetch(1, 32), d.put(0, 32)

    def step(w: Warp) -> int | None:
        if not whole_warp(w):
            return BLOCKED
        put(w, to_fragments(to_matrices(a(w), transposed=False), transposed=True)[0])
        return None

    return step


# Where the two elements that each register of each lane holds lie in A (16x16), B (16x8) and in
# the sums (16x8), as flat indices of shape (registers, 32, 2).
_Q, _H = np.arange(4)[:, None, None], np.arange(2)
_R, _C = ROW[:, None], COLUMN[:, None]
INDEX_A = (_R + 8 * (_Q & 1)) * 16 + 2 * _C + _H + 8 * (_Q >> 1)
INDEX_B = (2 * _C + _H + 8 * _Q[:2]) * 8 + _R
INDEX_SUM = (ROW + 8 * (np.arange(4)[:, None] >> 1)) * 8 + 2 * COLUMN + (np.arange(4)[:, None] & 1)


def _matrix(registers: list[np.ndarray], index: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the BF16 matrix that registers hold, in float64."""
    halves = np.array(registers).view(np.uint16).astype(np.uint32) << np.uint32(16)
    matrix = np.empty(shape)
    matrix.reshape(-1)[index.reshape(-1)] = halves.view(np.float32).reshape(-1)
    return matrix


@operation("mma")
def _mma(d: Decoder) -> Step:
    """Multiply a 16x16 by a 16x8 BF16 matrix; the sum is exact up to float64, then FP32."""
    parts = ("sync", "aligned", "m16n8k16", "row", "col", "bf16", "bf16", "f32", "f32")
    if not all(d.flag(part) for part in parts):
        raise d.unknown()
    a, b, c = ([d.fetch(item, 32) for item in d.items(i)] for i in (1, 2, 3))
    puts = [d.put(item, 32) for item in d.items(0)]
    if (len(puts), len(a), len(b), len(c)) != (4, 4, 2, 4):
        raise d.unknown()

    def step(w: Warp) -> int | None:
        if not whole_warp(w):
            return BLOCKED
        left = _matrix([fetch(w) for fetch in a], INDEX_A, (16, 16))
        right = _matrix([fetch(w) for fetch in b], INDEX_B, (16, 8))
        sums = np.array([fetch(w) for fetch in c]).view(np.float32)
        with np.errstate(all="ignore"):
            products = (left @ right).reshape(-1)[INDEX_SUM]
            total = (products + sums).astype(np.float32).view(np.uint32)
        for put, value in zip(puts, total, strict=True):
            put(w, value)
        return None

    return step
