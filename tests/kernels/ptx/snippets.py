"""Runs pieces of PTX: what the tests of the interpreter share."""

from __future__ import annotations

import re

import numpy as np

from .simulator import Simulator

HEADER = """
.version 9.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry snippet({params})
{{
    .reg .pred %p<8>; .reg .b16 %rs<16>; .reg .b32 %r<64>; .reg .b64 %rd<32>;
    {loads}
    {body}
    ret;
}}
"""


def simulate(code: str, arrays, *, block=32, grid=1, smem=4096, values=(), **options) -> Simulator:
    """Run a body in which ``%rd0``, ``%rd1``, ... are the addresses of arrays.

    `values` are 32-bit parameters after them, in ``%r50`` and on.
    """
    count = len(arrays)
    params = [f".param .u64 p{i}" for i in range(count)]
    params += [f".param .u32 p{count + i}" for i in range(len(values))]
    loads = [f"ld.param.b64 %rd{i}, [p{i}];" for i in range(count)]
    loads += [f"ld.param.b32 %r{50 + i}, [p{count + i}];" for i in range(len(values))]
    text = HEADER.format(params=", ".join(params), loads=" ".join(loads), body=code)
    sim = Simulator(text, **options)
    addresses = [a if isinstance(a, int) else sim.alloc(a) for a in arrays]
    sim.launch([*addresses, *values], grid, block, smem)
    return sim


def run(code: str, a, b=None, c=None, *, bits: int = 32, outputs: int = 1):
    """Run instructions in one warp: registers ``%a``, ``%b``, ``%c`` hold a value of each lane.

    Returns what is in ``%d`` of each lane at the end, and in ``%e`` too if `outputs` is 2.  ``%p``
    and ``%q`` are predicates.  Of the scratch registers ``%x`` and ``%y`` have half of `bits`, and
    ``%w`` has 64.
    """
    dtype = np.dtype(f"u{bits // 8}")
    inputs = np.array([a, a if b is None else b, a if c is None else c]).astype(dtype)
    out = np.zeros((outputs, 32), dtype)
    stem, half = {32: ("r", "rs"), 64: ("rd", "r")}[bits]
    names = {"a": f"{stem}10", "b": f"{stem}11", "c": f"{stem}12", "d": f"{stem}13"}
    names |= {"e": f"{stem}14", "x": f"{half}8", "y": f"{half}9", "w": "rd20", "p": "p1", "q": "p2"}
    code = re.sub(r"%([abcdexywpq])\b", lambda found: "%" + names[found[1]], code)
    width = bits // 8
    body = f"mov.u32 %r60, %laneid; mul.wide.u32 %rd30, %r60, {width};"
    body += "add.s64 %rd28, %rd0, %rd30; add.s64 %rd29, %rd1, %rd30;"
    for i in range(3):
        body += f"ld.global.b{bits} %{stem}{10 + i}, [%rd28+{i * 32 * width}];"
    ends = re.search(r"[;:]\s*\}?\s*$", code)
    body += code if ends else code + ";"
    for i in range(outputs):
        body += f"st.global.b{bits} [%rd29+{i * 32 * width}], %{stem}{13 + i};"
    simulate(body, [inputs, out])
    return out[0] if outputs == 1 else out


def at(width: int, base: int = 0, into: int = 11) -> str:
    """Set ``%r0`` to the thread and ``%rd<into>`` to its `width` bytes of array `base`."""
    return (
        f"mov.u32 %r0, %tid.x; mul.wide.u32 %rd10, %r0, {width};"
        f"add.s64 %rd{into}, %rd{base}, %rd10;"
    )


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    """Bytes of which none is likely to be right by accident."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
