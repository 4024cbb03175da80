"""The whole life of pages, small enough for compute-sanitizer; `test_gpu_sanitizer` runs it.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_case.py

initcheck follows only what the checked kernels write and what is copied to the device.  So every
tensor is copied here from the host, whole, and none is filled by a kernel of torch: what a kernel
of ours reads has then been written by one of ours, or is part of what a store sets up.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "layouts")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from zf_cute import KVShape, PageStore, launch  # noqa: E402

HEADS, PAGES = 2, 10
LENGTHS = (64, 64)
DONE = "sanitizer_case: done"


def copied_store(shape: KVShape) -> PageStore:
    """A store on the GPU whose every byte comes from the host: NaN where nothing is written."""
    host = PageStore(shape, PAGES, backend="reference")
    layout = shape.layout
    slack = host.pool.view(-1, layout.span_stride)[:, layout.metadata_bytes :]
    slack.view(torch.int16).fill_(0x7FC0)
    store = PageStore(shape, PAGES, device="cuda", backend="kernels")
    for name, x in vars(host).items():
        if isinstance(x, Tensor):
            getattr(store, name).copy_(x)
    return store


def rows(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V on the host: blocks of one window, with exceptions, and of random bits."""
    x = torch.randn(2, tokens, HEADS, head_dim).bfloat16() + 4
    x[torch.rand(x.shape) < 0.001] = 0
    bits = torch.randint(-(1 << 15), 1 << 15, x[:, :16].shape, dtype=torch.int16)
    x[:, :16] = bits.view(torch.bfloat16)
    return x[0], x[1]


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Compare on the host."""
    if not torch.equal(got.cpu().view(torch.int16), want.contiguous().view(torch.int16)):
        sys.exit(f"sanitizer_case: {what} differs")


def live(head_dim: int, index: torch.dtype, max_exceptions: int) -> None:
    """Two sequences: a prefill, decode steps, sealing in place and elsewhere, reading, clearing."""
    shape = KVShape(1, HEADS, HEADS, head_dim, max_exceptions=max_exceptions, heads_per_span=1)
    store = copied_store(shape)
    kv, state = store.layer(0), store.state(0)
    tokens = sum(LENGTHS)
    k, v = rows(tokens, head_dim)
    pages = torch.tensor([7, 2, 0, 5, 9, 1, 3, 8])
    slots = (pages[:, None] * 16 + torch.arange(16)).flatten().to(index)

    def append(some: slice | list[int], odd: bool = False) -> None:
        given = [x[some].contiguous() for x in (k, v)]
        if odd:  # rows that begin at no multiple of 16 bytes
            wide = [torch.nn.functional.pad(x, (1, 1)).to("cuda") for x in given]
            given = [x[:, :, 1:-1] for x in wide]
        launch.append(kv, state, *(x.to("cuda") for x in given), slots[some].to("cuda"))

    append(slice(0, 50))  # whole tiles and single rows
    append(slice(50, 60), odd=True)
    append(slice(64, 110), odd=True)
    for step in range(4):  # a token of each sequence
        append([60 + step, 110 + step])
    append(slice(114, 128))
    ids = pages.to(index).to("cuda")

    def read(what: str) -> None:
        got = launch.decode_pages(kv, state, ids)
        for name, x, want in zip("kv", got, (k, v), strict=True):
            same(x.flatten(0, 1), want, f"{name} {what}")

    read("raw")
    launch.encode(kv, state, ids[:5])
    read("with five pages sealed in place")
    homes = store.state(0).homes.cpu()
    to = torch.stack([homes[[4, 6, 4], 0, 0], homes[[4, 6, 6], 1, 0]], 1)
    to[2] = homes[8, :, 0]  # the last one in place, by its own address
    launch.encode(kv, state, ids[5:], destinations=to.to("cuda"))
    read("with three more sealed, two of them elsewhere")
    launch.clear(kv, state, ids[:6])
    append(slice(0, 96))
    read("filled again")
    store.check()


def main() -> None:
    """Two head dims, both dtypes of ids, with and without exceptions."""
    torch.manual_seed(1)
    live(64, torch.int32, 0)
    live(128, torch.int64, 4)
    torch.cuda.synchronize()
    print(DONE)


if __name__ == "__main__":
    main()
