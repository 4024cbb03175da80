"""The PTX interpreter on what CuTe DSL makes of small kernels, right ones and wrong ones."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import BFloat16, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from kernels.ptx import SCHEDULES, MemoryFault, Race, Simulator, tensor

THREADS = 128


@cute.kernel
def scatter_rows(rows: cute.Tensor, slots: cute.Tensor, pool: cute.Tensor):
    """Row b of [tokens, heads, 128], of any strides, to the slot of its token in a pool."""
    t, _, _ = cute.arch.thread_idx()
    b, h, _ = cute.arch.block_idx()
    slot = slots[b]
    if slot >= 0:
        pool[slot // 16, h, slot % 16, t] = rows[b, h, t]


@cute.jit
def launch_scatter(rows: cute.Tensor, slots: cute.Tensor, pool: cute.Tensor, stream):
    """Launch one CTA for each row."""
    grid = (rows.shape[0], rows.shape[1], 1)
    scatter_rows(rows, slots, pool).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def block_extrema(x: cute.Tensor, y: cute.Tensor, counter: cute.Tensor, n: Int32):
    """The least and the greatest word of each CTA's 512, through cp.async and a reduction."""
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    smem = SmemAllocator()
    words = smem.allocate_tensor(Uint32, cute.make_layout(512), byte_alignment=128)
    partial = smem.allocate_tensor(Uint32, cute.make_layout(8), byte_alignment=16)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Uint32, num_bits_per_copy=128)
    four = cute.make_layout(4)
    source = cute.make_tensor((x.iterator + (b * 512 + t * 4)).align(16), four)
    cute.copy(atom, source, cute.make_tensor((words.iterator + t * 4).align(16), four))
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    least, greatest = Uint32(0xFFFFFFFF), Uint32(0)
    for i in cutlass.range_constexpr(4):
        word = words[(t + i * THREADS) ^ 37]  # of other warps' copies
        least, greatest = min(least, word), max(greatest, word)
    for i in cutlass.range_constexpr(5):
        least = min(least, Uint32(cute.arch.shuffle_sync_bfly(least, 1 << i)))
        greatest = max(greatest, Uint32(cute.arch.shuffle_sync_bfly(greatest, 1 << i)))
    if t % 32 == 0:
        partial[t // 32] = least
        partial[4 + t // 32] = greatest
    cute.arch.sync_threads()
    if t == 0:
        for i in cutlass.range(1, 4):
            least, greatest = min(least, partial[i]), max(greatest, partial[4 + i])
        y[b * 2] = least
        y[b * 2 + 1] = greatest
        cute.arch.atomic_add(counter.iterator, Uint32(n))


@cute.jit
def launch_extrema(x: cute.Tensor, y: cute.Tensor, counter: cute.Tensor, n: Int32, stream):
    """Launch three CTAs."""
    kernel = block_extrema(x, y, counter, n)
    kernel.launch(grid=(3, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """The PTX of both kernels."""
    folder = tmp_path_factory.mktemp("ptx")
    options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {folder}"

    def compact(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    n, stride = cute.sym_int, cute.sym_int64
    rows = make_fake_tensor(BFloat16, (n(), n(), n()), stride=(stride(), stride(), 1))
    arguments = {
        launch_scatter: (rows, compact(Int64, n()), compact(BFloat16, n(), n(), 16, 128)),
        launch_extrema: (*(compact(Uint32, n()) for _ in range(3)), Int32(1)),
    }
    return {
        host: cute.compile(host, *given, make_fake_stream(), options=options).__ptx__
        for host, given in arguments.items()
    }


def test_dynamic_strides(ptx):
    draw = np.random.default_rng(0)
    storage = draw.integers(0, 1 << 16, (5, 3, 160), dtype=np.uint16)
    slots = np.array([17, 0, -1, 63, 16], np.int64)
    pool = np.zeros((4, 3, 16, 128), np.uint16)
    sim = Simulator(ptx[launch_scatter])
    rows = tensor(sim.alloc(storage), (5, 3, 128), (3 * 160, 160))
    where = tensor(sim.alloc(slots), (5,))
    sim.launch([rows, where, tensor(sim.alloc(pool), (4, 3), (3 * 2048,))], (5, 3))
    wanted = np.zeros_like(pool)
    for row, slot in zip(storage, slots, strict=True):
        if slot >= 0:
            wanted[slot // 16, :, slot % 16] = row[:, :128]
    assert (pool == wanted).all()


def test_large_pool(ptx):
    """A page beyond 4 GiB, in a pool that is not backed."""
    sim = Simulator(ptx[launch_scatter])
    pages = (5 << 30) // (16 * 256)
    row, address = np.arange(128, dtype=np.uint16), sim.alloc_sparse(5 << 30)
    slot = np.array([pages * 16 - 1], np.int64)
    pool = tensor(address, (pages, 1), (2048,))
    rows = tensor(sim.alloc(row), (1, 1, 128), (128, 128))
    sim.launch([rows, tensor(sim.alloc(slot), (1,)), pool], (1, 1))
    assert (sim.read(address + (5 << 30) - 256, 256).view(np.uint16) == row).all()
    slot[0] += 1
    with pytest.raises(MemoryFault):
        sim.launch([rows, tensor(sim.alloc(slot), (1,)), pool], (1, 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reduction(ptx, schedule):
    x = np.random.default_rng(1).integers(0, 1 << 32, (3, 512), dtype=np.uint32)

    def extrema(text):
        y, counter = np.zeros((3, 2), np.uint32), np.zeros(1, np.uint32)
        sim = Simulator(text, schedule=schedule)
        arrays = [tensor(sim.alloc(array), (array.size,)) for array in (x, y, counter)]
        sim.launch([*arrays, 5], 3, smem=4096)
        return y, counter

    text = ptx[launch_extrema]
    y, counter = extrema(text)
    assert (y == np.stack([x.min(1), x.max(1)], axis=1)).all()
    assert counter[0] == 15
    first, second = (found for found in _statements(text, "bar.sync"))
    for mutant in (
        text.replace("cp.async.wait_group", "// "),
        text[: first[0]] + text[first[1] :],
        text[: second[0]] + text[second[1] :],
    ):
        with pytest.raises(Race):
            extrema(mutant)


def _statements(text: str, opcode: str) -> list[tuple[int, int]]:
    """Where the statements of an opcode start and end."""
    found, position = [], 0
    while (start := text.find(opcode, position)) >= 0:
        position = text.index(";", start) + 1
        found.append((start, position))
    return found
