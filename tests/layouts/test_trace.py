"""The tile map is CuTe's: compared with its layouts while a function is traced, without a GPU."""

import pytest

from zf_layouts.fragment import FRAGMENT, LANES, TILE, lane_value, row_column

cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

WARPGROUP = 128


def _mma_atom():
    """One warp's mma.m16n8k16, A from registers."""
    from cutlass.cute.nvgpu import warp

    op = warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16))
    return cute.make_tiled_mma(op)


def _wgmma_atom():
    """A warpgroup's wgmma.m64n64k16, A from registers."""
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

    op = warpgroup.MmaF16BF16Op(
        cutlass.BFloat16,
        cutlass.Float32,
        (64, 64, 16),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(op)


def _trace(build, threads, rows):
    """TV layout of A as indices, and the coordinates each thread's partition holds."""
    found = {}

    def probe():
        tiled = build()
        tv = tiled.tv_layout_A
        found["size"] = (cute.size(tv, mode=[0]), cute.size(tv, mode=[1]))
        found["index"] = [[tv((t, v)) for v in range(FRAGMENT)] for t in range(threads)]
        identity = cute.make_identity_tensor((rows, TILE))
        held = [tiled.get_slice(t).partition_A(identity) for t in range(threads)]
        found["coordinates"] = [[part[i] for i in range(cute.size(part))] for part in held]

    @cute.jit
    def traced():
        probe()

    cute.compile(traced, options="--gpu-arch sm_90a")
    return found


@pytest.fixture(scope="module")
def mma():
    return _trace(_mma_atom, LANES, TILE)


@pytest.fixture(scope="module")
def wgmma():
    return _trace(_wgmma_atom, WARPGROUP, 4 * TILE)


def test_mma_layout_is_the_tile_map(mma):
    assert mma["size"] == (LANES, FRAGMENT)
    for lane in range(LANES):
        for v in range(FRAGMENT):
            row, column = row_column(lane, v)
            assert mma["index"][lane][v] == row + TILE * column


def test_mma_partition_of_an_identity_is_the_tile_map(mma):
    want = [[row_column(lane, v) for v in range(FRAGMENT)] for lane in range(LANES)]
    assert mma["coordinates"] == want
    for lane, held in enumerate(mma["coordinates"]):
        assert [lane_value(*element) for element in held] == [(lane, v) for v in range(FRAGMENT)]


def test_wgmma_layout_is_the_tile_map_of_each_warp(wgmma):
    assert wgmma["size"] == (WARPGROUP, FRAGMENT)
    for thread in range(WARPGROUP):
        warp, lane = divmod(thread, LANES)
        for v in range(FRAGMENT):
            row, column = row_column(lane, v)
            assert wgmma["index"][thread][v] == TILE * warp + row + 4 * TILE * column


def test_wgmma_partition_of_an_identity_is_the_tile_map_of_each_warp(wgmma):
    for thread, held in enumerate(wgmma["coordinates"]):
        warp, lane = divmod(thread, LANES)
        rows_columns = [row_column(lane, v) for v in range(FRAGMENT)]
        assert held == [(TILE * warp + row, column) for row, column in rows_columns]
