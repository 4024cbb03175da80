"""The PTX interpreter's memory: loads, stores, atomics, matrices, and what lies outside."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.ptx import MemoryFault, Misaligned, Simulator, Unwritten, tensor
from kernels.ptx.snippets import at, random_bytes, run, simulate


@pytest.mark.parametrize("space", ["global", "shared", ""])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("u8", "u1"), ("s8", "i1"), ("u16", "u2"), ("s16", "i2"), ("b32", "u4"), ("b64", "u8")],
)
def test_loads_and_stores(space, kind, dtype):
    """Through shared memory and back, or from global memory, extended by sign or by zero."""
    width = int(dtype[1])
    data = random_bytes(32 * width).view(dtype)
    wide, out = ("rd", np.zeros(32, np.int64)) if width == 8 else ("r", np.zeros(32, np.int32))
    code = at(width) + at(out.itemsize, 1, into=12)
    plain = f"b{8 * width}"
    if space == "shared":
        code += f"""mov.b32 %r1, dynamic; mad.lo.s32 %r1, %r0, {width}, %r1;
            ld.global.{plain} %{wide}5, [%rd11]; st.shared.{plain} [%r1+256], %{wide}5;
            ld.shared.{kind} %{wide}6, [%r1+256];"""
    elif space == "":  # a generic address of shared memory
        code += f"""mov.b64 %rd1, dynamic; cvta.shared.u64 %rd1, %rd1; add.s64 %rd1, %rd1, %rd10;
            ld.global.{plain} %{wide}5, [%rd11]; st.{plain} [%rd1], %{wide}5;
            ld.{kind} %{wide}6, [%rd1];"""
    else:
        code += f"ld.global.nc.L1::no_allocate.L2::128B.{kind} %{wide}6, [%rd11];"
    simulate(code + f"st.global.cs.b{8 * out.itemsize} [%rd12], %{wide}6;", [data, out])
    assert (out == data.astype(out.dtype)).all()


@pytest.mark.parametrize(
    ("kind", "vector", "regs"),
    [("b32", 2, "r"), ("b32", 4, "r"), ("b64", 2, "rd"), ("b16", 4, "rs"), ("u8", 4, "rs")],
)
def test_vectors(kind, vector, regs):
    width = int(kind[1:]) // 8 * vector
    data, out = random_bytes(64 * width), np.zeros(64 * width, np.uint8)
    some = ", ".join(f"%{regs}{5 + i}" for i in range(vector))
    code = at(width) + at(width, 1, into=12)
    code += f"ld.global.v{vector}.{kind} {{{some}}}, [%rd11];"
    simulate(code + f"st.global.v{vector}.{kind} [%rd12], {{{some}}};", [data, out], block=64)
    assert (out == data).all()


def test_atomics():
    keys = np.random.default_rng(1).integers(0, 5, (2, 64), dtype=np.uint32)
    counts, old = np.zeros(8, np.uint32), np.zeros((2, 64), np.uint32)
    code = (
        at(4)
        + """mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd12, %r1, 256;
        add.s64 %rd13, %rd11, %rd12; ld.global.b32 %r2, [%rd13];
        mul.wide.u32 %rd14, %r2, 4; add.s64 %rd14, %rd1, %rd14;
        atom.global.add.u32 %r3, [%rd14], 1;
        add.s64 %rd15, %rd2, %rd10; add.s64 %rd15, %rd15, %rd12; st.global.b32 [%rd15], %r3;
        red.relaxed.gpu.global.max.s32 [%rd1+24], %r2; atom.global.or.b32 %r4, [%rd1+28], %r2;"""
    )
    simulate(code, [keys, counts, old], grid=2, block=64)
    assert counts[:5].tolist() == np.bincount(keys.ravel(), minlength=5).tolist()
    for key in range(5):  # each saw another count
        assert sorted(old[keys == key].tolist()) == list(range(counts[key]))
    assert counts[6:].tolist() == [keys.max(), np.bitwise_or.reduce(keys.ravel())]


def test_compare_and_swap():
    """A lock that one thread at a time holds, within warps and across them and CTAs."""
    data = np.zeros(2, np.uint32)
    code = """TRY: atom.global.acquire.gpu.cas.b32 %r1, [%rd0], 0, 1;
        setp.ne.b32 %p1, %r1, 0; @%p1 bra TRY;
        ld.volatile.global.u32 %r2, [%rd0+4]; add.s32 %r2, %r2, 1;
        st.volatile.global.u32 [%rd0+4], %r2; membar.gl;
        atom.global.exch.b32 %r3, [%rd0], 0;"""
    simulate(code, [data], grid=2, block=64)
    assert data.tolist() == [0, 128]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_loads_and_stores(count, transposed):
    """Lane l holds elements 2(l%4) and the next of row l/4 (of column l/4 if transposed)."""
    matrices = random_bytes(count * 128).view(np.uint16).reshape(count, 8, 8)
    held, back = np.zeros((count, 32, 2), np.uint16), np.zeros_like(matrices)
    trans = ".trans" if transposed else ""
    some = ", ".join(f"%r{20 + i}" for i in range(count))
    code = (
        at(16)
        + f"""mov.b32 %r1, dynamic; and.b32 %r2, %r0, {8 * count - 1};
        shl.b32 %r2, %r2, 4; add.s32 %r1, %r1, %r2; mul.wide.u32 %rd12, %r2, 1;
        add.s64 %rd12, %rd0, %rd12; setp.lt.u32 %p1, %r0, {8 * count};
        @%p1 ld.global.v2.b64 {{%rd20, %rd21}}, [%rd12];
        @%p1 st.shared.v2.b64 [%r1], {{%rd20, %rd21}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{some}}}, [%r1];
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%r1+1024], {{{some}}};
        bar.warp.sync -1;
        @%p1 ld.shared.v2.b64 {{%rd20, %rd21}}, [%r1+1024];
        add.s64 %rd13, %rd2, %rd12; sub.s64 %rd13, %rd13, %rd0;
        @%p1 st.global.v2.b64 [%rd13], {{%rd20, %rd21}};"""
    )
    code += at(4, 1, into=14)
    code += "".join(f"st.global.b32 [%rd14+{128 * i}], %r{20 + i};" for i in range(count))
    simulate(code, [matrices, held, back])
    read = matrices.swapaxes(1, 2) if transposed else matrices
    for lane in range(32):
        assert (held[:, lane] == read[:, lane // 4, 2 * (lane % 4) :][:, :2]).all()
    assert (back == matrices).all()


def test_matrix_transposition():
    values = random_bytes(128).view(np.uint32)
    found = run("movmatrix.sync.aligned.m8n8.trans.b16 %d, %a", values)
    assert (found.view(np.uint16).reshape(8, 8) == values.view(np.uint16).reshape(8, 8).T).all()


def test_matrix_product():
    """Lanes hold A as the ISA's figures have it: a0 a1 in row l/4, columns 2(l%4) and the next."""
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((16, 16)), draw.standard_normal((16, 8))
    c = draw.standard_normal((16, 8)).astype(np.float32)
    a, b = ((x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    fragment = np.zeros((32, 10), np.uint32)
    halves = fragment.view(np.uint16).reshape(32, 10, 2)
    for lane in range(32):
        row, pair = lane // 4, 2 * (lane % 4) + np.arange(2)
        for i, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            halves[lane, i] = a[row + down, pair + right]
        for i in range(2):
            halves[lane, 4 + i] = b[pair + 8 * i, row]
            fragment[lane, 6 + 2 * i : 8 + 2 * i] = c[row + 8 * i, pair].view(np.uint32)
    out = np.zeros((32, 4), np.float32)
    code = at(40) + "".join(f"ld.global.b32 %r{20 + i}, [%rd11+{4 * i}];" for i in range(10))
    code += """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4},
        {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r26, %r27, %r28, %r29};"""
    simulate(code + at(16, 1) + "st.global.v4.b32 [%rd11], {%r1, %r2, %r3, %r4};", [fragment, out])
    a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b))
    wanted = (a @ b + c).astype(np.float32)
    for lane in range(32):
        pair = 2 * (lane % 4) + np.arange(2)
        assert (out[lane].reshape(2, 2) == wanted[lane // 4 :: 8][:, pair]).all()


def test_floats():
    draw = np.random.default_rng(2)
    a, b, c = draw.standard_normal((3, 32)).astype(np.float32) * np.float32(3)
    exact = (a.astype(np.longdouble) * b + c).astype(np.float32)
    for code, wanted in {
        "add.f32 %d, %a, %b": a + b,
        "sub.ftz.f32 %d, %a, %b": a - b,
        "mul.rn.f32 %d, %a, %b": a * b,
        "fma.rn.f32 %d, %a, %b, %c": exact,
        "max.f32 %d, %a, %b": np.maximum(a, b),
        "neg.f32 %d, %a": -a,
        "ex2.approx.ftz.f32 %d, %a": np.exp2(a.astype(np.float64)),
        "mul.f32 %e, %a, %a; lg2.approx.f32 %d, %e": np.log2((a * a).astype(np.float64)),
        "rcp.approx.ftz.f32 %d, %a": 1 / a.astype(np.float64),
        "setp.gtu.f32 %p, %a, %b; selp.f32 %d, %a, %b, %p": np.maximum(a, b),
        "cvt.rzi.s32.f32 %e, %a; cvt.rn.f32.s32 %d, %e": np.trunc(a),
    }.items():
        found = run(code, *(x.view(np.uint32) for x in (a, b, c))).view(np.float32)
        assert (found == np.asarray(wanted).astype(np.float32)).all(), code
    # Round to nearest even, ties both ways, overflow to infinity, NaN.
    words = np.resize([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFFC12345], 32)
    bf16 = np.resize([0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FFF], 32)
    found = run("cvt.rn.bf16x2.f32 %d, %a, %b", words, np.roll(words, 1))
    assert (found == (bf16 << 16 | np.roll(bf16, 1))).all()
    assert (run("max.NaN.f32 %d, %a, %b", words, words)[4] & 0x7FFFFFFF) == 0x7FFFFFFF


def test_accesses_outside():
    data, out = np.zeros(33, np.uint32), np.zeros(32, np.uint32)
    out.flags.writeable = False
    for code, error in {
        at(8) + "ld.global.b32 %r1, [%rd11];": MemoryFault,
        at(4) + "ld.global.b32 %r1, [%rd11+-4];": MemoryFault,
        at(4) + "ld.global.b64 %rd12, [%rd0+128];": MemoryFault,  # half of it inside
        at(4) + "ld.global.b32 %r1, [%rd11+2];": Misaligned,
        at(4) + "ld.global.v2.b32 {%r1, %r2}, [%rd11];": Misaligned,
        at(4) + "cvt.u32.u64 %r1, %rd11; cvt.u64.u32 %rd12, %r1; ld.global.b32 %r2, [%rd12];": (
            MemoryFault
        ),
        at(4, 1) + "st.global.b32 [%rd11], %r0;": MemoryFault,
        "mov.b32 %r1, dynamic; ld.shared.b32 %r2, [%r1+4096];": MemoryFault,
        "mov.b32 %r1, dynamic; ld.shared.b32 %r2, [%r1+-4];": MemoryFault,
        "mov.b32 %r1, dynamic; ld.shared.b32 %r2, [%r1+6];": Misaligned,
        "mov.b32 %r1, dynamic; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1+8];": (
            Misaligned
        ),
        at(4) + "mov.b32 %r1, dynamic; cp.async.ca.shared.global [%r1], [%rd11], 8;": Misaligned,
    }.items():
        with pytest.raises(error, match="line"):
            simulate(code, [data, out])


POOL = """.version 9.4 .target sm_90a .address_size 64
    .entry k(.param .u64 p) .reqntid 32, 1, 1 {{ .reg .b32 %r<4>; .reg .b64 %rd<4>;
    ld.param.b64 %rd0, [p]; {body} ret; }}"""


def test_sparse_memory():
    """A pool of 16 GiB of which three pages are touched."""
    code = """mov.b64 %rd1, 12345678848; add.s64 %rd1, %rd0, %rd1; mov.u32 %r0, %laneid;
        mul.wide.u32 %rd2, %r0, 4; add.s64 %rd3, %rd1, %rd2;
        {load} st.global.b32 [%rd3], %r0; ld.global.b32 %r2, [%rd3];"""

    def pool(load, strict=False):
        text = "" if load is None else f"ld.global.b32 %r1, [%rd3+{load}];"
        sim = Simulator(POOL.format(body=code.format(load=text)))
        address = sim.alloc_sparse(1 << 34, strict=strict)
        sim.write(address + (1 << 33) - 2, np.arange(4, dtype=np.uint8))
        sim.launch([address], 1)
        return sim, address

    sim, address = pool(4096)
    written = sim.read(address + 12345678848 - 4, 136).view(np.uint32)
    assert written[1:33].tolist() == list(range(32))
    assert np.isnan(written[[0, 33]].view(np.float32)).all()
    assert sim.read(address + (1 << 33) - 2, 4).tolist() == [0, 1, 2, 3]
    assert np.isnan(sim.read(address, 4).view(np.float32)).all()
    pool(None, strict=True)
    for load in (0, 8192):
        with pytest.raises(Unwritten, match="allocation 0"):
            pool(load, strict=True)
    with pytest.raises(MemoryFault):
        pool(1 << 34)


def test_tensor_parameters():
    """A struct of pointer, 32-bit extents and 64-bit strides, as the DSL lays it out."""
    text = """.version 9.4 .target sm_90a .address_size 64
        .entry k(.param .align 8 .b8 p_0[40], .param .u32 p_1) {
        .reg .b32 %r<4>; .reg .b64 %rd<6>; ld.param.b64 %rd0, [p_0]; ld.param.b32 %r0, [p_0+12];
        ld.param.b64 %rd1, [p_0+32]; ld.param.b32 %r1, [p_1]; st.global.b64 [%rd0], %rd1;
        st.global.v2.b32 [%rd0+8], {%r0, %r1}; ret; }"""
    out = np.zeros(2, np.int64)
    sim = Simulator(text)
    assert [(p.size, p.loads) for p in sim.params] == [
        (40, ((0, "b64"), (12, "b32"), (32, "b64"))),
        (4, ((0, "b32"),)),
    ]
    sim.launch([tensor(sim.alloc(out), (5, 6, 7), (-8, 9)), -2], 1, 1)
    assert out.view(np.int32).tolist() == [9, 0, 6, -2]
    sim.launch([{0: sim.alloc(out), 12: 3, 32: -1}, 4], 1, 1)
    assert out.view(np.int32).tolist() == [-1, -1, 3, 4]
    with pytest.raises(Unwritten, match="p_0"):
        sim.launch([{0: sim.alloc(out), 32: -1}, 4], 1, 1)


def test_variables():
    """Static shared arrays before the dynamic one, and initialised arrays of the module."""
    text = """.version 9.4
        .target sm_90a
        .address_size 64
        .extern .shared .align 1024 .b8 rest[];
        .shared .align 4 .b8 first[12];
        .global .align 4 .b32 table[3] = {5, -1, 0x10};
        .entry other() { ret; }
        .entry k(.param .u64 p) { .shared .align 8 .b64 second; .reg .b32 %r<8>; .reg .b64 %rd<4>;
        .loc 1 23 9
        ld.param.b64 %rd0, [p]; mov.b32 %r0, first; mov.b32 %r1, second; mov.b32 %r2, rest;
        .loc 1 24 9, function_name $L__info_string0, inlined_at 1 12 0
        sub.s32 %r1, %r1, %r0; sub.s32 %r2, %r2, %r0; mov.b64 %rd1, table;
        ld.global.b32 %r3, [%rd1+4]; ld.global.b32 %r4, [table+8];
        st.shared.b32 [first+4], %r4; ld.shared.b32 %r4, [%r0+4];
        st.global.v4.b32 [%rd0], {%r1, %r2, %r3, %r4}; ret; }"""
    out = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="other, k"):
        Simulator(text)
    sim = Simulator(text, "k")
    sim.launch([sim.alloc(out)], 1, 1, smem=16)
    assert out.tolist() == [16, 1024, -1, 16]
