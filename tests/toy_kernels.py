"""Small kernels for tests of compiling: the DSL wants its functions in a file.

Each has the five parts that `zf_cute.kernels.catalog` names.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

from zf_cute.compile_key import CompileKey

SMEM_WORDS = 200
THREADS = 128


class _Kernel:
    def __init__(self, key: CompileKey) -> None:
        self.words = key.head_dim

    def arguments(self):
        words = [make_fake_compact_tensor(Uint32, (cute.sym_int(),), assumed_align=16)] * 2
        return *words, Int32(1)

    @classmethod
    def variants(cls, arch="sm_90a"):
        return (CompileKey(cls.name, arch=arch), CompileKey(cls.name, head_dim=64, arch=arch))


class ToyKernel(_Kernel):
    """y[t] = x[t] + head_dim + n, by way of shared memory."""

    name = "toy"

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, n: Int32, stream):
        self.kernel(x, y, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, n: Int32):
        t, _, _ = cute.arch.thread_idx()
        words = SmemAllocator().allocate_tensor(
            Uint32, cute.make_layout(SMEM_WORDS), byte_alignment=16
        )
        words[t] = x[t]
        cute.arch.sync_threads()
        y[t] = words[THREADS - 1 - t] + Uint32(self.words) + Uint32(n)


class SpillKernel(_Kernel):
    """More values alive at once than a thread has registers."""

    name = "spill"

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, n: Int32, stream):
        self.kernel(x, y, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, n: Int32):
        t, _, _ = cute.arch.thread_idx()
        many = 280
        r = cute.make_rmem_tensor(cute.make_layout(many), Uint32)
        for i in cutlass.range(many, unroll_full=True):
            r[i] = x[t + THREADS * i]
        for _j in cutlass.range(n):
            for i in cutlass.range(many, unroll_full=True):
                r[i] = r[i] * r[(i * 7 + 1) % many] + Uint32(i)
        for i in cutlass.range(many, unroll_full=True):
            y[t + THREADS * i] = r[i]


class LocalKernel(_Kernel):
    """An array that is indexed at run time: in local memory, though no register is spilled."""

    name = "local"

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, n: Int32, stream):
        self.kernel(x, y, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, n: Int32):
        t, _, _ = cute.arch.thread_idx()
        r = cute.make_rmem_tensor(cute.make_layout(128), Uint32)
        for i in cutlass.range(128, unroll_full=True):
            r[i] = x[t + THREADS * i]
        y[t] = r[n]


class BrokenKernel(_Kernel):
    """Does not compile."""

    name = "broken"

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, n: Int32, stream):
        self.kernel(x, y, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, n: Int32):
        t, _, _ = cute.arch.thread_idx()
        y[t] = x[t] + no_such_thing  # noqa: F821


KERNELS = {
    cls.name: f"{__name__}:{cls.__name__}"
    for cls in (ToyKernel, SpillKernel, LocalKernel, BrokenKernel)
}
