"""The rebuild routine traced by the DSL and run on the CPU: results leave through pointers.

A module of its own because the DSL reads the source of what it compiles, and so that the tests in
numpy and torch do not need the DSL.
"""

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int32, Uint32
from cutlass.cute.runtime import make_ptr

from zf_cute.kernels.rebuild import IntegerOps, high_bytes, join, patch, rebuild

OPS = IntegerOps(Uint32)


@cute.jit
def _rebuild(source: cute.Pointer, target: cute.Pointer, n: Int32):
    x = cute.make_tensor(source, cute.make_layout(n * 4))
    y = cute.make_tensor(target, cute.make_layout(n * 4))
    for i in cutlass.range(n):
        words = rebuild((x[i * 4], x[i * 4 + 1]), x[i * 4 + 2], x[i * 4 + 3], OPS)
        for j in cutlass.range_constexpr(4):
            y[i * 4 + j] = words[j]


@cute.jit
def _rebuild_entries(source: cute.Pointer, target: cute.Pointer, n: Int32):
    x = cute.make_tensor(source, cute.make_layout(n * 9))
    y = cute.make_tensor(target, cute.make_layout(n * 4))
    for i in cutlass.range(n):
        low, entries = (x[i * 9], x[i * 9 + 1]), tuple(x[i * 9 + 5 + j] for j in range(4))
        words = rebuild(
            low, x[i * 9 + 2], x[i * 9 + 3], OPS, fragment=x[i * 9 + 4], entries=entries
        )
        for j in cutlass.range_constexpr(4):
            y[i * 4 + j] = words[j]


@cute.jit
def _high_bytes(source: cute.Pointer, target: cute.Pointer, n: Int32):
    x = cute.make_tensor(source, cute.make_layout(n * 2))
    y = cute.make_tensor(target, cute.make_layout(n * 2))
    for i in cutlass.range(n):
        words = high_bytes(x[i * 2], x[i * 2 + 1], OPS)
        for j in cutlass.range_constexpr(2):
            y[i * 2 + j] = words[j]


@cute.jit
def _join(source: cute.Pointer, target: cute.Pointer, n: Int32):
    x = cute.make_tensor(source, cute.make_layout(n * 4))
    y = cute.make_tensor(target, cute.make_layout(n * 4))
    for i in cutlass.range(n):
        words = join((x[i * 4], x[i * 4 + 1]), (x[i * 4 + 2], x[i * 4 + 3]), OPS)
        for j in cutlass.range_constexpr(4):
            y[i * 4 + j] = words[j]


@cute.jit
def _patch(source: cute.Pointer, target: cute.Pointer, n: Int32):
    x = cute.make_tensor(source, cute.make_layout(n * 6))
    y = cute.make_tensor(target, cute.make_layout(n))
    for i in cutlass.range(n):
        entries = (x[i * 6 + 2], x[i * 6 + 3], x[i * 6 + 4], x[i * 6 + 5])
        y[i] = patch(x[i * 6], x[i * 6 + 1], entries, OPS)


_ROUTINES = {
    "rebuild": _rebuild,
    "rebuild_entries": _rebuild_entries,
    "high_bytes": _high_bytes,
    "join": _join,
    "patch": _patch,
}


def run(name: str, words: np.ndarray, columns: int) -> np.ndarray:
    """Run a routine on each row of `words` ([n, inputs] uint32); returns [n, columns] uint32."""
    words = np.ascontiguousarray(words, np.uint32)
    # Not zeros: a word that the routine does not write must not look right.
    result = np.full((len(words), columns), 0xDEADBEEF, np.uint32)
    source, target = (
        make_ptr(Uint32, a.ctypes.data, cute.AddressSpace.generic, assumed_align=4)
        for a in (words, result)
    )
    n = Int32(len(words))
    cute.compile(_ROUTINES[name], source, target, n)(source, target, n)
    return result
