"""The page kernels' PTX on the tensors of a PageStore: `zf_cute.launch` without a GPU.

A `SimulatedLayer` calls the functions of `zf_cute.launch` themselves, for a store on the CPU; where
they would launch a kernel, its PTX is interpreted with the same arguments.  What is written lands
in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import torch
from kernels.ptx import Simulator
from kernels.ptx import tensor as struct
from kernels_compiled import report
from torch import Tensor

from zf_cute import PageStore, launch
from zf_cute.compile_key import CompileKey
from zf_cute.kernels import catalog
from zf_layouts.page import SPAN_ALIGNMENT

INDEX = {torch.int32: "int32", torch.int64: "int64"}
NAN = 0x7FC0


class SimulatedLayer:
    """A layer of a CPU store whose operations run as interpreted PTX.

    Parameters
    ----------
    store : PageStore
        On the CPU; its tensors are written.
    layer : int
        Which layer.
    seed, schedule
        How warps take turns: see `kernels.ptx.Simulator`.
    mutate : callable, optional
        Changes the PTX before it is run.
    warps : int, optional
        Warps of a CTA that encodes; by default what the launch says.
    races : bool
        Whether two accesses that nothing orders raise.
    pool_at : int
        The store's pool is what begins at this byte, a multiple of 128, of a larger one, of which
        nothing else is mapped.  `far` moves the places of a store along.
    mapped : slice
        The bytes of the store's pool that are mapped: reading or writing any other raises.
    """

    def __init__(
        self,
        store: PageStore,
        layer: int = 0,
        *,
        seed: int = 0,
        schedule: str = "random",
        mutate: Callable[[str], str] | None = None,
        warps: int | None = None,
        races: bool = True,
        pool_at: int = 0,
        mapped: slice = slice(None),
    ) -> None:
        """Keep the layer and how it is run."""
        self.kv, self.state = store.layer(layer), store.state(layer)
        self.seed, self.schedule, self.races = seed, schedule, races
        self.warps = warps
        self.mutate = mutate or (lambda ptx: ptx)
        self.pool_at, self.mapped = pool_at, mapped
        self.steps = 0
        self.launched: list[CompileKey] = []

    def append(
        self,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        *,
        sharers: int | None = None,
        vectors: bool | None = None,
    ) -> None:
        """`zf_cute.launch.append`; `sharers` and `vectors` overrule what it chooses."""
        with self._launching(sharers=sharers, vectors=vectors):
            launch.append(self.kv, self.state, k, v, slots)

    def encode(self, pages: Tensor, destinations: Tensor | None = None) -> Tensor:
        """`zf_cute.launch.encode`, lengths over -1."""
        lengths = torch.full((len(pages), self.kv.layout.spans), -1, dtype=torch.int32)
        with self._launching():
            return launch.encode(
                self.kv, self.state, pages, destinations=destinations, lengths=lengths
            )

    def decode_pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """`zf_cute.launch.decode_pages`, over NaN."""
        layout = self.kv.layout
        shape = (len(pages), layout.page_size, layout.num_kv_heads, layout.head_dim)
        k, v = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in "kv")
        with self._launching():
            return launch.decode_pages(self.kv, self.state, pages, k=k, v=v)

    def clear(self, pages: Tensor) -> None:
        """`zf_cute.launch.clear`."""
        with self._launching():
            launch.clear(self.kv, self.state, pages)

    def _launching(self, **overruled: object) -> AbstractContextManager:
        """While this lasts, `zf_cute.launch` runs its kernels here."""

        def key(device, name, dtype, head_dim=0, rope="", vectors=True):
            if overruled.get("vectors") is not None:
                vectors = overruled["vectors"]
            return CompileKey(name, head_dim, rope, INDEX[dtype], vectors)

        def run(key, *args):
            args = list(args)
            if key.kernel == "append" and overruled.get("sharers") is not None:
                args[-1] = overruled["sharers"]
            if key.kernel == "encode" and self.warps is not None:
                args[-2] = self.warps
            if key.kernel in ("encode", "decode_pages"):  # bytes of the pool
                args[-1] += self.pool_at
            self._run(key, args)

        return mock.patch.multiple(launch, _kernel=key, _launch=run)

    def _run(self, key: CompileKey, args: list) -> None:
        compiled = report(key)
        simulator = Simulator(
            self.mutate(compiled.ptx),
            seed=self.seed,
            schedule=self.schedule,
            check_races=self.races,
        )
        self.launched.append(key)
        kernel = catalog.build(key)
        launched = _Launch(kernel, args)
        fakes = {id(x): fake for x, fake in zip(args, kernel.arguments(), strict=True)}
        mapped: dict[int, int] = {}
        params = [
            self._tensor(simulator, mapped, x, fakes[id(x)]) if isinstance(x, Tensor) else int(x)
            for x in launched.params
        ]
        simulator.launch(
            params,
            grid=launched.grid,
            block=launched.block,
            smem=compiled.smem_bytes - simulator.static_bytes,
        )
        self.steps += simulator.steps_run

    def _tensor(self, simulator: Simulator, mapped: dict[int, int], x: Tensor, fake) -> bytes:
        """A tensor as a kernel takes it: the sizes and strides that its stand-in leaves open.

        Views of one storage are one allocation.
        """
        sizes = [size for size, open_ in zip(x.shape, fake.shape, strict=True) if _is_open(open_)]
        strides = [
            stride for stride, open_ in zip(x.stride(), fake.stride, strict=True) if _is_open(open_)
        ]
        if x is self.kv.pool:
            first, stop, _ = self.mapped.indices(x.numel())
            base = simulator.alloc(x.numpy()[first:stop], "the pool") - first - self.pool_at
            return struct(base, [self.pool_at + x.numel()], strides, shape_bits=64)
        storage = x.untyped_storage()
        base = mapped.get(storage.data_ptr())
        if base is None:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            base = mapped[storage.data_ptr()] = simulator.alloc(flat.numpy())
        return struct(base + x.data_ptr() - storage.data_ptr(), sizes, strides)


class _Launch:
    """What the host code of a kernel, run here as plain Python, launches."""

    def __init__(self, kernel, args: list) -> None:
        """Run it on ints and torch tensors; it only asks for sizes."""
        kernel.kernel = self._kernel
        type(kernel).__call__.__wrapped__(kernel, *args, None)

    def _kernel(self, *params):
        self.params = params
        return self

    def launch(self, *, grid, block, **_rest) -> None:
        """What ``kernel(...).launch`` is told."""
        self.grid, self.block = grid, block


def _is_open(size: object) -> bool:
    """Whether a size or stride of a stand-in is known only at run time."""
    return not isinstance(size, int)


def poison(store: PageStore) -> None:
    """Fill all of the pool that is no metadata with NaNs that are nobody's values."""
    layout = store.shape.layout
    homes = store.pool.view(-1, layout.span_stride)[:, layout.metadata_bytes :]
    homes.view(torch.int16).fill_(np.int16(NAN))


def far(store: PageStore, pool_at: int) -> None:
    """Let a store's places say that its pool begins `pool_at` bytes into a larger one."""
    for places in (store.places, store._raw_places):
        start = (places[..., 0].long() & 0xFFFFFFFF) + pool_at // SPAN_ALIGNMENT
        places[..., 0] = start.to(torch.int32)  # the low 32 bits: places are unsigned
