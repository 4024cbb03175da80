"""Instructions that CuTe DSL has no pure call for, and vector access to memory.

Each wrapper is one PTX instruction (or a compare and one), free of side effects where the
instruction is, so that the compiler may move, merge or drop it.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from zf_layouts.page import SPAN_ALIGNMENT

_ATT = {"is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}


def _asm(result: Any, args: list[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    return llvm.inline_asm(
        result, args, text, constraints, has_side_effects=False, loc=loc, ip=ip, **_ATT
    )


def _effect(result: Any, args: list[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    """Convergent, or touching memory: stays where it is written."""
    return llvm.inline_asm(
        result, args, text, constraints, has_side_effects=True, loc=loc, ip=ip, **_ATT
    )


def _words(values: Any, loc: Any, ip: Any) -> list[Any]:
    return [Uint32(x).ir_value(loc=loc, ip=ip) for x in values]


# ---- bytes in a word ---------------------------------------------------------------------------
@dsl_user_op
def prmt(a: Any, b: Any, selector: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Four of the bytes of `a` (0..3) and `b` (4..7), by one nibble of `selector` each."""
    v = _words((a, b, selector), loc, ip)
    return Uint32(_asm(T.i32(), v, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", loc, ip))


@dsl_user_op
def prmt_if_equal(a: Any, x: Any, y: Any, entry: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """``prmt(a, entry, selector=entry)`` where x == y, else `a`: one compare, one PRMT."""
    v = _words((a, x, y, entry), loc, ip)
    text = "{ .reg .pred p; setp.eq.u32 p, $2, $3; mov.b32 $0, $1; @p prmt.b32 $0, $1, $4, $4; }"
    return Uint32(_asm(T.i32(), v, text, "=&r,r,r,r,r", loc, ip))


class DeviceOps:
    """The op set of `rebuild` on the device: PRMT is one instruction."""

    u32 = staticmethod(Uint32)
    prmt = staticmethod(prmt)
    prmt_if_equal = staticmethod(prmt_if_equal)


# ---- two 16-bit numbers in a word --------------------------------------------------------------
@dsl_user_op
def min_u16x2(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Lesser of each pair of unsigned halves."""
    v = _words((a, b), loc, ip)
    return Uint32(_asm(T.i32(), v, "min.u16x2 $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def max_u16x2(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Greater of each pair of unsigned halves."""
    v = _words((a, b), loc, ip)
    return Uint32(_asm(T.i32(), v, "max.u16x2 $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def max_s16x2(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Greater of each pair of signed halves."""
    v = _words((a, b), loc, ip)
    return Uint32(_asm(T.i32(), v, "max.s16x2 $0, $1, $2;", "=r,r,r", loc, ip))


# ---- 8x8 matrices between registers and shared memory ------------------------------------------
@dsl_user_op
def ldmatrix_x4(
    row: cute.Pointer, transposed: bool, *, loc: Any = None, ip: Any = None
) -> tuple[Uint32, ...]:
    """Four 8x8 matrices of 16-bit values; lane i gives row i % 8 of matrix i // 8."""
    at = [row.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    struct = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    four = _effect(struct, at, text, "=r,=r,=r,=r,r,~{memory}", loc, ip)
    return tuple(Uint32(llvm.extractvalue(T.i32(), four, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def stmatrix_x4(
    row: cute.Pointer, words: Any, transposed: bool, *, loc: Any = None, ip: Any = None
) -> None:
    """Inverse of `ldmatrix_x4`."""
    v = [row.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), *_words(words, loc, ip)]
    trans = ".trans" if transposed else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0], {{$1, $2, $3, $4}};"
    _effect(None, v, text, "r,r,r,r,r,~{memory}", loc, ip)


# ---- global to shared memory, past the registers -----------------------------------------------
@dsl_user_op
def copy_async_16(shared: cute.Pointer, address: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying 16 bytes from a global address; both aligned to 16."""
    v = [
        shared.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int64(address).ir_value(loc=loc, ip=ip),
    ]
    _effect(None, v, "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", loc, ip)


@dsl_user_op
def wait_copies(*, loc: Any = None, ip: Any = None) -> None:
    """Wait for the copies that this thread has started."""
    _effect(None, [], "cp.async.wait_all;", "~{memory}", loc, ip)


# ---- memory by address -------------------------------------------------------------------------
def at(address: Any, n: int, dtype: Any) -> cute.Tensor:
    """`n` elements of global memory at a byte address that is a multiple of their size together."""
    align = n * dtype.width // 8
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(n))


def load(address: Any, n: int = 4, dtype: Any = Uint32) -> cute.Tensor:
    """`n` elements as one vector load."""
    words = cute.make_rmem_tensor(n, dtype)
    cute.autovec_copy(at(address, n, dtype), words)
    return words


def store(address: Any, values: Any, dtype: Any = Uint32) -> None:
    """Store the values as one vector."""
    n = len(values)
    words = cute.make_rmem_tensor(n, dtype)
    for i in range(n):
        words[i] = values[i]
    cute.autovec_copy(words, at(address, n, dtype))


def load_one(address: Any, dtype: Any) -> Any:
    """Load one element, its address known to be a multiple of its size."""
    return dtype(at(address, 1, dtype)[0])  # a pointer forgets that its elements are unsigned


def store_one(address: Any, value: Any, dtype: Any) -> None:
    """Store one element."""
    at(address, 1, dtype)[0] = dtype(value)


def span_address(pool: cute.Pointer, start: Any) -> Int64:
    """Byte address of a span from its start in the place table, 32 bits without a sign."""
    return pool.toint() + (Int64(start) & 0xFFFFFFFF) * SPAN_ALIGNMENT
