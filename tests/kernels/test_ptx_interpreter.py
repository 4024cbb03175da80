"""The PTX interpreter gives what the PTX ISA says, and notices what a kernel must not do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernels.ptx import SCHEDULES, Deadlock, PtxError, Unwritten
from kernels.ptx.snippets import run, simulate

EDGES = [0, 1, 2, 5, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x12345678]
EDGES += [0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0xDEADBEEF]


def words(seed: int, bits: int = 32) -> np.ndarray:
    """32 lanes of edge cases among random values."""
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 1 << bits, 32, dtype=np.uint64)
    edges = draw.permutation(np.array([*EDGES, 1 << 63, (1 << 64) - 1], np.uint64))
    chosen = draw.random(32) < 0.6
    return np.where(chosen, np.resize(edges, 32), values) & np.uint64((1 << bits) - 1)


def signed(value: int, bits: int = 32) -> int:
    """The value of two's complement bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def truncated(a: int, b: int) -> int:
    """The quotient rounded towards zero; of a division by zero, what the interpreter gives."""
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def extract(a: int, position: int, length: int, *, signs: bool) -> int:
    """``bfe.?32``, bit by bit as the ISA has it."""
    position, length = position & 255, length & 255
    sign = a >> min(position + length - 1, 31) & 1 if signs and length else 0
    bits = [a >> position + i & 1 if i < length and position + i <= 31 else sign for i in range(32)]
    return sum(bit << i for i, bit in enumerate(bits))


def insert(a: int, b: int, position: int, length: int) -> int:
    """``bfi.b32``, bit by bit."""
    for i in range(length & 255):
        if (position & 255) + i <= 31:
            at = (position & 255) + i
            b = b & ~(1 << at) | (a >> i & 1) << at
    return b


def permuted(a: int, b: int, c: int) -> int:
    """``prmt.b32`` by selectors."""
    source, result = (b << 32 | a).to_bytes(8, "little"), 0
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = source[nibble & 7]
        result |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return result


def halves(function, a: int, b: int, bits: int = 16) -> int:
    """A function of the signed or unsigned 16-bit halves."""
    read = (lambda x: signed(x, 16)) if bits < 0 else (lambda x: x)
    low, high = (function(read(a >> s & 0xFFFF), read(b >> s & 0xFFFF)) & 0xFFFF for s in (0, 16))
    return high << 16 | low


def highest(a: int) -> int:
    """The position of the highest one, -1 if there is none."""
    return a.bit_length() - 1


S = signed
WORD_CASES = {
    "add.s32 %d, %a, %b": lambda a, b, c: a + b,
    "sub.s32 %d, %a, %b": lambda a, b, c: a - b,
    "add.s32 %d, %a, -5": lambda a, b, c: a - 5,
    "mul.lo.s32 %d, %a, %b": lambda a, b, c: a * b,
    "mul.hi.u32 %d, %a, %b": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %d, %a, %b": lambda a, b, c: S(a) * S(b) >> 32,
    "mad.lo.u32 %d, %a, %b, %c": lambda a, b, c: a * b + c,
    "mad.hi.s32 %d, %a, %b, %c": lambda a, b, c: (S(a) * S(b) >> 32) + c,
    "div.u32 %d, %a, %b": lambda a, b, c: truncated(a, b),
    "div.s32 %d, %a, %b": lambda a, b, c: truncated(S(a), S(b)),
    "rem.u32 %d, %a, 7": lambda a, b, c: a % 7,
    "rem.s32 %d, %a, 7": lambda a, b, c: S(a) - 7 * truncated(S(a), 7),
    "min.u32 %d, %a, %b": lambda a, b, c: min(a, b),
    "max.s32 %d, %a, %b": lambda a, b, c: max(S(a), S(b)),
    "min.u16x2 %d, %a, %b": lambda a, b, c: halves(min, a, b),
    "max.u16x2 %d, %a, %b": lambda a, b, c: halves(max, a, b),
    "min.s16x2 %d, %a, %b": lambda a, b, c: halves(min, a, b, -16),
    "max.s16x2 %d, %a, %b": lambda a, b, c: halves(max, a, b, -16),
    "abs.s32 %d, %a": lambda a, b, c: abs(S(a)),
    "neg.s32 %d, %a": lambda a, b, c: -a,
    "not.b32 %d, %a": lambda a, b, c: ~a,
    "cnot.b32 %d, %a": lambda a, b, c: int(a == 0),
    "and.b32 %d, %a, %b": lambda a, b, c: a & b,
    "or.b32 %d, %a, 0x0F0F0F0F": lambda a, b, c: a | 0x0F0F0F0F,
    "xor.b32 %d, %a, %b": lambda a, b, c: a ^ b,
    "sad.u32 %d, %a, %b, %c": lambda a, b, c: abs(a - b) + c,
    "mul24.lo.u32 %d, %a, %b": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "shl.b32 %d, %a, %b": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 %d, %a, %b": lambda a, b, c: a >> b,
    "shr.b32 %d, %a, 9": lambda a, b, c: a >> 9,
    "shr.s32 %d, %a, %b": lambda a, b, c: S(a) >> b,
    "shr.s32 %d, %a, 40": lambda a, b, c: S(a) >> 40,
    "shl.b32 %d, %a, 32": lambda a, b, c: 0,
    "shf.l.wrap.b32 %d, %a, %b, %c": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.wrap.b32 %d, %a, %b, %c": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.l.clamp.b32 %d, %a, %b, %c": lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32,
    "shf.r.clamp.b32 %d, %a, %b, %c": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "bfe.u32 %d, %a, %b, %c": lambda a, b, c: extract(a, b, c, signs=False),
    "bfe.s32 %d, %a, %b, %c": lambda a, b, c: extract(a, b, c, signs=True),
    "bfe.s32 %d, %a, 8, 8": lambda a, b, c: extract(a, 8, 8, signs=True),
    "bfi.b32 %d, %a, %b, 5, 9": lambda a, b, c: insert(a, b, 5, 9),
    "bfi.b32 %d, %a, %b, %c, 16": lambda a, b, c: insert(a, b, c, 16),
    "bfind.u32 %d, %a": lambda a, b, c: highest(a),
    "bfind.s32 %d, %a": lambda a, b, c: highest(S(a) if S(a) >= 0 else ~S(a)),
    "bfind.shiftamt.u32 %d, %a": lambda a, b, c: 31 - highest(a) if a else -1,
    "clz.b32 %d, %a": lambda a, b, c: 31 - highest(a),
    "popc.b32 %d, %a": lambda a, b, c: a.bit_count(),
    "brev.b32 %d, %a": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "prmt.b32 %d, %a, %b, %c": permuted,
    "prmt.b32 %d, %a, %b, 0x5140": lambda a, b, c: permuted(a, b, 0x5140),
    "prmt.b32 %d, %a, %b, 0xFB73": lambda a, b, c: permuted(a, b, 0xFB73),
    "prmt.b32.rc8 %d, %a, %b, 2": lambda a, b, c: permuted(a, b, 0x2222),
    "prmt.b32.f4e %d, %a, %b, 3": lambda a, b, c: permuted(a, b, 0x6543),
    "prmt.b32.b4e %d, %a, %b, 0": lambda a, b, c: permuted(a, b, 0x5670),
    "lop3.b32 %d, %a, %b, %c, 0xEA": lambda a, b, c: a & b | c,
    "lop3.b32 %d, %a, %b, %c, 0x96": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 %d, %a, %b, %c, 0x01": lambda a, b, c: ~(a | b | c),
    "setp.lt.s32 %p, %a, %b; selp.b32 %d, %a, %c, %p": lambda a, b, c: a if S(a) < S(b) else c,
    "setp.hi.u32 %p, %a, %b; selp.b32 %d, 1, 0, %p": lambda a, b, c: int(a > b),
    "setp.ge.u32 %p, %a, %b; not.pred %q, %p; selp.b32 %d, 1, 0, %q": lambda a, b, c: int(a < b),
    "setp.eq.b32 %p|%q, %a, %b; selp.b32 %d, 1, 0, %q": lambda a, b, c: int(a != b),
    "setp.ne.b32 %q, %c, 0; setp.le.and.s32 %p, %a, %b, %q; selp.b32 %d, 1, 0, %p": (
        lambda a, b, c: int(S(a) <= S(b) and c != 0)
    ),
    "setp.ne.b32 %q, %c, 0; setp.gt.or.u32 %p, %a, %b, !%q; selp.b32 %d, 1, 0, %p": (
        lambda a, b, c: int(a > b or c == 0)
    ),
    "set.lt.u32.s32 %d, %a, %b": lambda a, b, c: -(S(a) < S(b)),
    "slct.b32.s32 %d, %a, %b, %c": lambda a, b, c: a if S(c) >= 0 else b,
    "mov.b32 {%x, %y}, %a; mov.b32 %d, {%y, %x}": lambda a, b, c: a >> 16 | (a & 0xFFFF) << 16,
    "mov.b32 {_, %y}, %a; cvt.u32.u16 %d, %y": lambda a, b, c: a >> 16,
    "cvt.u16.u32 %x, %a; cvt.s32.s16 %d, %x": lambda a, b, c: S(a, 16),
    "cvt.u16.u32 %x, %a; cvt.u32.u16 %d, %x": lambda a, b, c: a & 0xFFFF,
    "cvt.u32.u8 %d, %a": lambda a, b, c: a & 0xFF,
    "cvt.s32.s8 %d, %a": lambda a, b, c: S(a, 8),
    "cvt.sat.u8.s32 %d, %a": lambda a, b, c: min(max(S(a), 0), 255),
    "cvt.u16.u32 %x, %a; mul.wide.u16 %d, %x, 300": lambda a, b, c: (a & 0xFFFF) * 300,
    "mul.wide.s32 %w, %a, %b; cvt.u32.u64 %d, %w": lambda a, b, c: a * b,
    "mov.b32 %d, 5; setp.lt.u32 %p, %a, %b; @%p mov.b32 %d, %c": (
        lambda a, b, c: c if a < b else 5
    ),
    "mov.b32 %d, 5; setp.lt.u32 %p, %a, %b; @!%p add.s32 %d, %d, %c": (
        lambda a, b, c: 5 if a < b else 5 + c
    ),
    "{ .reg .b32 t; .reg .pred p; setp.lt.u32 p, %a, %b; mov.b32 t, %a; @p bra L; mov.b32 t, %b;"
    " L: mov.b32 %d, t; }": lambda a, b, c: min(a, b),
}
LONG_CASES = {
    "add.s64 %d, %a, %b": lambda a, b, c: a + b,
    "mul.lo.s64 %d, %a, %b": lambda a, b, c: a * b,
    "mul.hi.u64 %d, %a, %b": lambda a, b, c: a * b >> 64,
    "mad.lo.s64 %d, %a, %b, %c": lambda a, b, c: a * b + c,
    "div.s64 %d, %a, %b": lambda a, b, c: truncated(S(a, 64), S(b, 64)),
    "div.u64 %d, %a, 48": lambda a, b, c: a // 48,
    "rem.u64 %d, %a, 48": lambda a, b, c: a % 48,
    "min.s64 %d, %a, %b": lambda a, b, c: min(S(a, 64), S(b, 64)),
    "shl.b64 %d, %a, 7": lambda a, b, c: a << 7,
    "shr.s64 %d, %a, 63": lambda a, b, c: S(a, 64) >> 63,
    "shr.u64 %d, %a, 60": lambda a, b, c: a >> 60,
    "and.b64 %d, %a, -16": lambda a, b, c: a & -16,
    "cvt.u32.u64 %x, %a; cvt.s64.s32 %d, %x": lambda a, b, c: S(a),
    "cvt.u32.u64 %x, %a; cvt.u64.u32 %d, %x": lambda a, b, c: a & 0xFFFFFFFF,
    "cvt.u32.u64 %x, %a; mul.wide.u32 %d, %x, 12": lambda a, b, c: (a & 0xFFFFFFFF) * 12,
    "cvt.u32.u64 %x, %a; mad.wide.s32 %d, %x, 12, %c": lambda a, b, c: S(a) * 12 + c,
    "mov.b64 {%x, %y}, %a; mov.b64 %d, {%y, %x}": lambda a, b, c: a >> 32 | a << 32,
    "setp.lt.s64 %p, %a, %b; selp.b64 %d, %a, %b, %p": lambda a, b, c: min(S(a, 64), S(b, 64)),
    "clz.b64 %x, %a; cvt.u64.u32 %d, %x": lambda a, b, c: 63 - highest(a),
    "bfe.u64 %d, %a, 20, 30": lambda a, b, c: a >> 20 & (1 << 30) - 1,
    "brev.b64 %d, %a": lambda a, b, c: int(f"{a:064b}"[::-1], 2),
}


@pytest.mark.parametrize(
    ("code", "expected", "bits"),
    [(code, f, 32) for code, f in WORD_CASES.items()]
    + [(code, f, 64) for code, f in LONG_CASES.items()],
)
def test_arithmetic(code, expected, bits):
    for seed in range(2):
        a, b, c = (words(3 * seed + i, bits) for i in range(3))
        if seed and bits == 32:
            b, c = b % np.uint64(40), c % np.uint64(40)  # amounts, positions, lengths
        found = run(code, a, b, c, bits=bits)
        wanted = [
            expected(*(int(v) for v in lane)) & (1 << bits) - 1
            for lane in zip(a, b, c, strict=True)
        ]
        assert found.tolist() == wanted


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The source lane and the predicate of shfl.sync, as the ISA's pseudocode has them."""
    segment, clamp, b = c >> 8 & 31, c & 31, b & 31
    most, least = (lane & segment) | (clamp & ~segment), lane & segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment)}[mode]
    inside = j >= most if mode == "up" else j <= most
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode):
    values = words(1)
    # Whole warps, segments of 8 (c = mask << 8 | clamp), a clamp at 20, amounts beyond the warp.
    for b, c in itertools.product((0, 1, 5, 16, 31, 33), (31, 0, 0x181F, 0x1800, 20)):
        code = f"shfl.sync.{mode}.b32 %d|%p, %a, {b}, {c}, -1; selp.b32 %e, 1, 0, %p"
        found, inside = run(code, values, outputs=2)
        wanted = [shuffled(mode, lane, b, c) for lane in range(32)]
        assert found.tolist() == [values[source] for source, _ in wanted]
        assert inside.tolist() == [int(ok) for _, ok in wanted]


def test_votes_and_reductions():
    a = words(5)
    odd = [int(v) & 1 for v in a]
    ballot = sum(bit << lane for lane, bit in enumerate(odd))
    test = "and.b32 %e, %a, 1; setp.eq.b32 %p, %e, 1; "
    assert set(run(test + "vote.sync.ballot.b32 %d, %p, -1", a).tolist()) == {ballot}
    for mode, wanted in (("any", any(odd)), ("all", all(odd))):
        code = test + f"vote.sync.{mode}.pred %q, %p, -1; selp.b32 %d, 1, 0, %q"
        assert set(run(code, a).tolist()) == {int(wanted)}
    ints = [int(v) for v in a]
    for code, wanted in {
        "redux.sync.add.s32": sum(ints),
        "redux.sync.min.u32": min(ints),
        "redux.sync.max.s32": max(S(v) for v in ints),
        "redux.sync.and.b32": int(np.bitwise_and.reduce(a)),
        "redux.sync.or.b32": int(np.bitwise_or.reduce(a)),
        "redux.sync.xor.b32": int(np.bitwise_xor.reduce(a)),
    }.items():
        assert set(run(f"{code} %d, %a, -1", a).tolist()) == {wanted & 0xFFFFFFFF}
    groups = np.arange(32) % 3
    found = run("match.any.sync.b32 %d, %a, -1", groups)
    assert found.tolist() == [sum(1 << j for j in range(32) if j % 3 == i % 3) for i in range(32)]
    leader = run("elect.sync %e|%p, -1; selp.b32 %d, 7, %e, %p", a)
    assert leader.tolist() == [7] + [0] * 31


def test_collectives_among_some_lanes():
    # Lanes 8..31 leave; the others go two ways and each way votes by itself.
    code = """
        mov.b32 %d, 99; setp.ge.u32 %p, %a, 8; @%p bra END; setp.lt.u32 %q, %a, 3; @%q bra LOW;
        redux.sync.add.s32 %d, %a, 0xF8; bra.uni END;
        LOW: redux.sync.add.s32 %d, %a, 7; END: activemask.b32 %e"""
    found, active = run(code, np.arange(32), outputs=2)
    assert found.tolist() == [3] * 3 + [25] * 5 + [99] * 24
    assert set(active.tolist()) == {0xFFFFFFFF}  # all have met again at END


def test_collective_mistakes():
    low = "setp.lt.u32 %p, %a, 16; "
    with pytest.raises(PtxError, match="take part with the mask 0x0000ffff"):
        run(low + "vote.sync.ballot.b32 %d, %p, 0xFFFF", np.arange(32))
    with pytest.raises(Deadlock, match="vote"):
        run(low + "mov.b32 %d, 0; @%p vote.sync.ballot.b32 %d, %p, -1", np.arange(32))
    with pytest.raises(PtxError, match="absent"):
        run(low + "mov.b32 %d, 0; @%p shfl.sync.idx.b32 %d, %a, 20, 31, 0xFFFF", np.arange(32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_special_registers(schedule):
    """Three-dimensional grids and blocks; every thread writes to its own place."""
    names = ["%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid", "%warpid"]
    loads = "".join(f"mov.u32 %r{i}, {name};" for i, name in enumerate(names))
    code = f"""
        {loads} mov.u32 %r8, %nctaid.y; mov.u32 %r9, %nctaid.x; mov.u32 %r10, %ntid.x;
        mad.lo.s32 %r11, %r5, %r8, %r4; mad.lo.s32 %r11, %r11, %r9, %r3;
        mad.lo.s32 %r12, %r2, 4, %r1; mad.lo.s32 %r12, %r12, %r10, %r0;
        mad.lo.s32 %r12, %r11, 48, %r12; mul.wide.u32 %rd2, %r12, 32; add.s64 %rd2, %rd0, %rd2;
        st.global.v4.b32 [%rd2], {{%r0, %r1, %r2, %r3}};
        st.global.v4.b32 [%rd2+16], {{%r4, %r5, %r6, %r7}};"""
    out = np.full((2, 3, 2, 48, 8), -1, np.int32)
    simulate(code, [out], grid=(2, 3, 2), block=(6, 4, 2), schedule=schedule)
    for (cz, cy, cx), (z, y, x) in itertools.product(np.ndindex(2, 3, 2), np.ndindex(2, 4, 6)):
        thread = (z * 4 + y) * 6 + x
        wanted = [x, y, z, cx, cy, cz, thread % 32, thread // 32]
        assert out[cz, cy, cx, thread].tolist() == wanted


def test_unknown_instructions_name_their_line():
    for code in ("add.sat.s32 %d, %a, %b", "addc.u32 %d, %a, %b", "ld.local.b32 %d, [%rd0]"):
        with pytest.raises(NotImplementedError, match=r"line \d+: " + code.split()[0]):
            run(code, np.arange(32))


def test_unwritten_registers():
    with pytest.raises(Unwritten, match="%r40"):
        run("add.s32 %d, %a, %r40", np.arange(32))
    some = "setp.lt.u32 %p, %a, 5; @%p mov.b32 %r40, 1; "
    with pytest.raises(Unwritten, match="in lane 5"):
        run(some + "add.s32 %d, %a, %r40", np.arange(32))
    run(some + "mov.b32 %d, 0; @%p add.s32 %d, %a, %r40", np.arange(32))
