"""A PTX interpreter: runs what CuTe DSL emits for sm_90a on the CPU, strictly.

>>> ptx = cute.compile(host, *fakes, make_fake_stream(), options="--gpu-arch sm_90a ...").__ptx__
>>> sim = Simulator(ptx, seed=0, schedule="random")
>>> x = tensor(sim.alloc(array), shape=(1000,), strides=())  # only what is dynamic
>>> sim.launch([x, 37], grid=(8, 2), smem=4096)  # `array` now holds the results

Read it in this order: `parser` knows the grammar, `decode` makes a step of each instruction with
the functions that `integers`, `bits`, `control`, `floats`, `loads`, `collective`, `matrices`,
`barriers`, `mbarriers`, `asynchronous` and `bulk` enter by opcode, `warp` and `cta` run steps,
`simulator` schedules them, `memory` and `races` check every access.

It raises where PTX leaves something undefined: registers read before they are written, accesses
outside an allocation or misaligned, accesses that nothing orders, copies not waited for, barriers
that never complete.  An instruction or modifier that it does not know raises NotImplementedError.

Limits   No clusters, tensor maps, wgmma, local memory, calls, FP16 or FP64.  Memory is
         sequentially consistent: fences and proxies are not checked.  Lanes of a warp diverge and
         meet again by lowest program counter, where hardware may keep them apart longer.
"""

from .errors import Deadlock, MemoryFault, Misaligned, PtxError, Race, Unwritten
from .params import tensor
from .parser import Param, parse
from .simulator import SCHEDULES, Simulator

__all__ = [
    "SCHEDULES",
    "Deadlock",
    "MemoryFault",
    "Misaligned",
    "Param",
    "PtxError",
    "Race",
    "Simulator",
    "Unwritten",
    "parse",
    "tensor",
]
