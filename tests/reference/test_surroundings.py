"""The caller's torch settings, and memory that is shared, change no result."""

import math

import pytest
import torch
from reference.dense import make_batch

from zf_cute import ArgumentError, BatchAttention, KVShape, LayerPages, UnsupportedError
from zf_cute.reference import pages as reference_pages

SHAPE = KVShape(1, 6, 2, 64)


@pytest.fixture
def batch():
    return make_batch(SHAPE, (0, 17, 100))


def run(batch, **options):
    attention = BatchAttention(SHAPE, 8)
    attention.plan(batch.block_table, batch.seq_lens)
    return attention.run(batch.q, batch.store.layer(0), return_lse=True, **options)


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_does_not_lower_the_precision(batch):
    want = run(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(run(batch), want)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_matmul_precision_is_not_the_callers(batch, precision):
    """TF32 or BF16 products, which serving stacks switch on, and which must be left on."""
    want = run(batch)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert same(run(batch), want)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_no_graph_is_kept(batch):
    """A reused `out` must not chain autograd graphs from step to step."""
    batch.q.requires_grad_()
    sinks = torch.nn.Parameter(torch.zeros(6))
    out = torch.empty_like(batch.q, requires_grad=False)
    got, lse = run(batch, sinks=sinks, out=out)
    assert not got.requires_grad
    assert not lse.requires_grad
    run(batch, out=batch.q)  # a leaf that autograd would not let be written


def test_lse_given_from_inference_mode_is_refused_before_out_is_written(batch):
    with torch.inference_mode():
        lse = torch.empty(batch.q.shape[:-1])
    out = torch.full_like(batch.q, 7)
    with pytest.raises(ArgumentError, match="lse was made under inference_mode"):
        run(batch, out=out, lse=lse)
    assert (out == 7).all()


def test_outputs_that_share_memory_are_refused(batch):
    memory = torch.zeros(batch.q.numel(), dtype=torch.bfloat16)
    out = memory.view(batch.q.shape)
    lse = memory.view(torch.float32)[: batch.q[..., 0].numel()].view(batch.q.shape[:-1])
    with pytest.raises(ArgumentError, match="out and lse share memory"):
        run(batch, out=out, lse=lse)
    apart = torch.zeros(batch.q.numel() + 2 * lse.numel(), dtype=torch.bfloat16)
    out = apart[: batch.q.numel()].view(batch.q.shape)
    lse = apart[batch.q.numel() :].view(torch.float32).view(batch.q.shape[:-1])
    assert same(run(batch, out=out, lse=lse), run(batch))  # one workspace, two places
    for strides in ((1, 1, 1, 1), (0, 0, 64, 1)):
        with pytest.raises(ArgumentError, match="out is a view whose elements share memory"):
            run(batch, out=memory.as_strided(batch.q.shape, strides))


def test_shared_pages_are_decoded_once(batch, monkeypatch):
    """However many requests share a prefix."""
    decoded = []
    real = reference_pages.decode_pages

    def counting(kv, pages):
        decoded.extend(pages.tolist())
        return real(kv, pages)

    monkeypatch.setattr("zf_cute.reference.paged_attention.decode_pages", counting)
    monkeypatch.setattr("zf_cute.reference.paged_attention.PAGES_AT_ONCE", 8)
    attention = BatchAttention(SHAPE, 64)
    attention.plan(batch.block_table[2:].expand(40, -1), batch.seq_lens[2:].expand(40))
    attention.run(batch.q[2:].expand(40, *batch.q.shape[1:]), batch.store.layer(0))
    assert len(decoded) == len(set(decoded)) == 7


def layer_pages(**changes):
    view = {
        "pool": torch.zeros(1 << 16, dtype=torch.uint8),
        "places": torch.zeros(4, 1, 2, dtype=torch.int32),
        "layout": SHAPE.layout,
    }
    return LayerPages(**{**view, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": torch.zeros(1 << 16)}, "pool must be a contiguous uint8"),
        ({"pool": torch.zeros(1 << 17, dtype=torch.uint8)[::2]}, "pool must be a contiguous uint8"),
        ({"pool": torch.zeros(1 << 16, dtype=torch.uint8)[1:]}, "pool must start at a multiple"),
        ({"places": torch.zeros(4, 1, 2)}, "places must be int32"),
        ({"places": torch.zeros(4, 1, 1, dtype=torch.int32)}, r"\[num_pages, 1, 2\]"),
        ({"places": torch.zeros(4, 2, dtype=torch.int32)}, r"shape \(4, 2\)"),
        ({"places": torch.zeros(4, 2, 2, dtype=torch.int32)}, r"shape \(4, 2, 2\)"),
        ({"places": torch.zeros(4, 1, 2, dtype=torch.int32, device="meta")}, "places is on meta"),
    ],
)
def test_a_layer_is_checked_where_it_is_made(changes, message):
    layer_pages()
    with pytest.raises(ArgumentError, match=message):
        layer_pages(**changes)


def test_the_store_is_not_its_layer(batch):
    attention = BatchAttention(SHAPE, 8)
    attention.plan(batch.block_table, batch.seq_lens)
    with pytest.raises(ArgumentError, match=r"kv is a PageStore; pass store.layer\(i\)"):
        attention.run(batch.q, batch.store)


def test_a_resized_table_is_noticed(batch):
    attention = BatchAttention(SHAPE, 8)
    table = batch.block_table.clone()
    attention.plan(table, batch.seq_lens)
    table.resize_(1, table.shape[1])
    with pytest.raises(ArgumentError, match="plan again"):
        attention.run(batch.q, batch.store.layer(0))


@pytest.mark.parametrize("device", ["cudaa", "cuda:99", 3.5])
def test_devices(device):
    with pytest.raises(UnsupportedError, match=r"device=.* cannot be used here"):
        BatchAttention(SHAPE, 8, device=device)


def test_backends():
    assert BatchAttention(SHAPE, 8).backend == "reference"
    with pytest.raises(UnsupportedError, match="backend='fast'"):
        BatchAttention(SHAPE, 8, backend="fast")


def test_length_zero_is_empty(batch):
    out, lse = run(batch)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
