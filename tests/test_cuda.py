"""The store and the reference backend give the same bytes on CUDA tensors as on CPU ones."""

import pytest
import torch

import zf_cute as zf

pytestmark = pytest.mark.gpu


@pytest.fixture
def stores(real_kv):
    """Two layers of the sample in a store on each device, every other page sealed."""
    shape = zf.KVShape(2, 12, 2, 128)
    made = {}
    for device in ("cpu", "cuda"):
        store = zf.PageStore(shape, 40, device=device)
        slots = (torch.randperm(40, generator=torch.Generator().manual_seed(0))[:32] * 16)[:, None]
        slots = (slots + torch.arange(16)).flatten()
        for layer, name in enumerate(("layer0", "layer23")):
            k, v = (real_kv[f"qwen2.5-coder-1.5b/{name}/{part}"].to(device) for part in "kv")
            store.append(layer, k, v, slots.to(device))
            store.seal(layer, slots[::32].to(device) // 16)
        made[device] = store
    return made, slots


def test_same_bytes_on_both_devices(stores):
    made, slots = stores
    pages = slots[::16] // 16
    assert torch.equal(made["cpu"].places, made["cuda"].places.cpu())
    for layer in range(2):
        for ours, theirs in zip(
            made["cpu"].read(layer, pages), made["cuda"].read(layer, pages), strict=True
        ):
            assert theirs.is_cuda
            assert torch.equal(ours.view(torch.int16), theirs.cpu().view(torch.int16))
        for page in pages.tolist():
            for (start, length), other in zip(
                made["cpu"].places[layer, page].tolist(),
                made["cuda"].places[layer, page].tolist(),
                strict=True,
            ):
                assert [start, length] == other
                span = slice(start * 128, start * 128 + length)
                assert torch.equal(made["cpu"].pool[span], made["cuda"].pool[span].cpu())


def test_attention_agrees(stores):
    made, slots = stores
    table = (slots[::16] // 16).int().repeat(5, 1)
    lens = torch.tensor([0, 1, 17, 300, 512], dtype=torch.int32)
    q = torch.randn(5, 12, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = {}
    for device, store in made.items():
        attention = zf.BatchAttention(store.shape, 8, device=device)
        attention.plan(table.to(device), lens.to(device))
        got[device] = attention.run(q.to(device), store.layer(1), return_lse=True)
    (out, lse), (other_out, other_lse) = got["cpu"], (x.cpu() for x in got["cuda"])
    # Two float32 sums in different orders, rounded to BF16: at most one ulp apart.
    torch.testing.assert_close(out, other_out, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-5)
    assert torch.isneginf(other_lse[0]).all()


def test_a_pool_past_4_gib():
    """Offsets past 32 bits: the last page of a pool of 4.2 GiB."""
    shape = zf.KVShape(1, 8, 8, 128)
    num_pages = (4 << 30) // shape.layout.page_stride + 3000
    store = zf.PageStore(shape, num_pages, device="cuda")
    k, v = (torch.randn(16, 8, 128, device="cuda").bfloat16() for _ in "kv")
    last = num_pages - 1
    store.append(0, k, v, last * 16 + torch.arange(16, device="cuda"))
    store.seal(0, last)
    for read, given in zip(store.read(0, last), (k, v), strict=True):
        assert torch.equal(read.view(torch.int16), given.view(torch.int16))
