"""The reference backend on CUDA tensors: the bytes of the CPU, over pages of any writer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bits import mixed_values
from gpu.gpu_store import DEVICE, Pair, assert_holds, assert_same_bits, slots_of
from store.small_store import poisoned
from torch import Tensor

from zf_cute import BatchAttention, KVShape, PageStateError, PageStore, reference

pytestmark = pytest.mark.gpu

SHAPE = KVShape(2, 12, 2, 128)
PAGES = 40


@pytest.fixture
def sample(paired: Callable, real_kv: dict[str, Tensor]) -> tuple[Pair, Tensor]:
    """Two layers of the sample, every other page sealed by each backend; and the pages' ids."""
    pair = paired(SHAPE, PAGES)
    ids = torch.randperm(PAGES)[:32]
    for layer, name in enumerate(("layer0", "layer23")):
        k, v = (real_kv[f"qwen2.5-coder-1.5b/{name}/{part}"] for part in "kv")
        pair.append(layer, k, v, slots_of(ids, 16))
        pair.seal(layer, ids[::2])
    pair.assert_same("the sample, half of it sealed")
    return pair, ids


def test_attention_over_pages_of_the_kernels(sample: tuple[Pair, Tensor]) -> None:
    """Attention on the device agrees with attention on the CPU over the reference's pages."""
    pair, ids = sample
    table = ids.int().repeat(5, 1)
    lens = torch.tensor([0, 1, 17, 300, 512], dtype=torch.int32)
    q = torch.randn(5, 12, 128).bfloat16()
    got = []
    for store in (pair.cpu, pair.gpu):
        attention = BatchAttention(SHAPE, 8, device=store.device)
        attention.plan(table.to(store.device), lens.to(store.device))
        got.append(attention.run(q.to(store.device), store.layer(1), return_lse=True))
    (out, lse), (other_out, other_lse) = got[0], (x.cpu() for x in got[1])
    # Two float32 sums in different orders, rounded to BF16: at most one ulp apart.
    torch.testing.assert_close(out, other_out, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-5)
    assert torch.isneginf(other_lse[0]).all()


def test_the_reference_reads_what_the_kernels_wrote(sample: tuple[Pair, Tensor]) -> None:
    """`reference.decode_pages` on the device, over raw and sealed pages of the kernels."""
    pair, ids = sample
    for layer in range(2):
        want = pair.cpu.read(layer, ids)
        got = reference.decode_pages(pair.gpu.layer(layer), ids.to(DEVICE))
        for name, x, y in zip("kv", got, want, strict=True):
            assert x.is_cuda
            assert_same_bits(x.flatten(0, 1), y, f"{name} of layer {layer}")


def test_a_store_of_the_reference_on_the_device(real_kv: dict[str, Tensor]) -> None:
    """backend="reference" takes CUDA tensors: the same states, places and bytes, and its errors."""
    stores = [
        poisoned(PageStore(SHAPE, PAGES, device=device, backend="reference"))
        for device in ("cpu", DEVICE)
    ]
    assert [store.backend for store in stores] == ["reference", "reference"]
    ids = torch.randperm(PAGES)[:32]
    k, v = (real_kv[f"qwen2.5-coder-1.5b/layer14/{part}"] for part in "kv")
    for store in stores:
        on = store.device
        store.append(1, k.to(on), v.to(on), slots_of(ids, 16).to(on))
        store.seal(1, ids[:20].to(on))
        store.clear(1, ids[3:5].to(on))
        with pytest.raises(PageStateError, match=f"page {int(ids[0])} of layer 1 is full and seal"):
            store.append(1, k[:1].to(on), v[:1].to(on), (ids[:1] * 16).to(on))
        with pytest.raises(PageStateError, match=f"page {int(ids[3])} of layer 1 holds 0 of 16"):
            store.seal(1, ids[3:4].to(on))
        store.check()
    for name in ("pool", "places", "_written", "_sealed"):
        ours, theirs = (getattr(store, name) for store in stores)
        assert_same_bits(theirs.cpu(), ours, name)


def test_the_kernels_read_what_the_reference_wrote(made: Callable) -> None:
    """A pool sealed by the reference, copied to the device with its places."""
    shape = KVShape(1, 3, 3, 64, 32)
    cpu, gpu = poisoned(PageStore(shape, 6)), made(shape, 6)
    k, v = (mixed_values((192, 3, 64), seed) for seed in (1, 2))
    ids = torch.randperm(6)
    cpu.append(0, k, v, slots_of(ids, 32))
    cpu.seal(0, ids[:4])
    for name in ("pool", "places", "_written", "_sealed"):
        getattr(gpu, name).copy_(getattr(cpu, name))
    assert_holds(gpu, 0, ids, k, v)
    gpu.seal(0, ids[4:].to(DEVICE))
    assert_holds(gpu, 0, ids, k, v)
