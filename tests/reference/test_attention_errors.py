"""BatchAttention and reference.attention: each error names what is wrong and what is allowed."""

from __future__ import annotations

import math
import re

import pytest
import torch
from reference.dense import (
    Batch,
    dense_attention,
    make_batch,
    plan,
    small,
)

from zf_cute import ArgumentError, BatchAttention, FormatError, PageStore, UnsupportedError
from zf_cute.reference import attention


# ---- errors ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((small(), 0), {}, "max_batch=0 must be an int of at least 1"),
        ((small(), True), {}, "max_batch=True must be an int"),
        ((small(), 2.0), {}, "max_batch=2.0 must be an int"),
        ((small(), 1), {"compute_dtype": torch.bfloat16}, "bfloat16: float32 or float64"),
    ],
)
def test_construction_errors(arguments, options, message):
    """Unsupported parameters are refused by name and value."""
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        BatchAttention(*arguments, **options)


INT32 = torch.int32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.zeros(2, 3)}, "block_table is torch.float32; int32 is wanted"),
        ({"seq_lens": torch.zeros(2).long()}, "seq_lens is torch.int64; int32 is wanted"),
        ({"block_table": torch.zeros(6, dtype=INT32)}, "block_table has 1 dimensions; 2 are"),
        ({"seq_lens": torch.zeros(2, 1, dtype=INT32)}, "seq_lens has 2 dimensions; 1 are"),
        ({"seq_lens": torch.zeros(1, dtype=INT32)}, "block_table has 2 rows and seq_lens 1"),
        (
            {
                "block_table": torch.zeros(3, 1, dtype=INT32),
                "seq_lens": torch.zeros(3, dtype=INT32),
            },
            "a batch of 3 is more than max_batch=2",
        ),
        (
            {"seq_lens": torch.zeros(2, dtype=INT32, device="meta")},
            "seq_lens is on meta and the attention on cpu",
        ),
        ({"q_len": 0}, "q_len=0 is outside 1..8"),
        ({"q_len": 9}, "q_len=9 is outside 1..8"),
        ({"q_len": 2.0}, "q_len=2.0 must be an int"),
        ({"q_len": True}, "q_len=True must be an int"),
        ({"window_left": 2.5}, "window_left=2.5 must be an int"),
        ({"window_left": -2}, "window_left=-2 is below -1"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap=-1.0 is below 0"),
        ({"logits_soft_cap": math.nan}, "logits_soft_cap=nan"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap=inf"),
        ({"sm_scale": math.nan}, "sm_scale=nan is not a finite float32 number"),
        ({"sm_scale": 10**400}, "is not a finite float32 number"),
        ({"sm_scale": 1j}, "sm_scale=1j is not a number"),
        ({"logits_soft_cap": None}, "logits_soft_cap=None is not a number"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap=1e+39 is not a finite float32 number"),
        ({"seq_lens": [17, 3]}, "seq_lens is a list; a torch tensor is wanted"),
        ({"sm_scale": -math.inf}, "sm_scale=-inf is not a finite float32 number"),
    ],
)
def test_plan_errors(changes, message):
    """A refused plan says why, and leaves the plan before it in force."""
    batch = make_batch(small(), (17, 3))
    planned, view = plan(batch), batch.store.layer(0)
    want = planned.run(batch.q, view)
    arguments = {
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "q_len": 1,
        **changes,
    }
    with pytest.raises(ArgumentError, match=re.escape(message)):
        planned.plan(**arguments)
    assert torch.equal(planned.run(batch.q, view), want)


def test_run_before_plan():
    """A run needs a plan."""
    batch = make_batch(small(), (3,))
    with pytest.raises(ArgumentError, match="nothing is planned: call plan"):
        BatchAttention(small(), 1).run(batch.q, batch.store.layer(0))


def _damage(batch: Batch) -> None:
    """Give a block of the second request's first page a descriptor that names no kind."""
    layout = batch.shape.layout
    batch.store._homes[0, int(batch.block_table[1, 0]), 0, layout.descriptor_byte(0, "k")] = 250


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 2, 6, 64).half()}, UnsupportedError, "q is torch.float16; bfloat16"),
        ({"q": torch.zeros(2, 6, 64).bfloat16()}, ArgumentError, "q has shape (2, 6, 64)"),
        ({"q": torch.zeros(3, 2, 6, 64).bfloat16()}, ArgumentError, "the plan wants (2, 2, 6, 64)"),
        ({"q": torch.zeros(2, 2, 6, 128).bfloat16()}, ArgumentError, "(2, 2, 6, 128)"),
        (
            {"q": torch.zeros(2, 2, 6, 64, dtype=torch.bfloat16, device="meta")},
            ArgumentError,
            "q is on meta and the attention on cpu",
        ),
        (
            {"kv": PageStore(small(rope="interleaved"), 9).layer(0)},
            ArgumentError,
            "rope=interleaved (here half)",
        ),
        ({"kv": PageStore(small(page_size=32), 9).layer(0)}, ArgumentError, "page_size=32"),
        ({"sinks": torch.zeros(5)}, ArgumentError, "sinks must be a floating-point tensor of"),
        ({"sinks": torch.zeros(6, 1)}, ArgumentError, "of shape (6,)"),
        ({"sinks": torch.zeros(6, device="meta")}, ArgumentError, "sinks"),
        ({"sinks": torch.zeros(6, dtype=torch.int32)}, ArgumentError, "floating-point"),
        (
            {"out": torch.zeros(2, 2, 6, 64)},
            ArgumentError,
            "out must be torch.bfloat16 of shape (2, 2, 6, 64) on cpu",
        ),
        ({"out": torch.zeros(2, 6, 64).bfloat16()}, ArgumentError, "out must be"),
        ({"lse": torch.zeros(2, 2, 6).double()}, ArgumentError, "lse must be torch.float32"),
        ({"lse": torch.zeros(2, 6)}, ArgumentError, "of shape (2, 2, 6)"),
        ({"seq_lens": (33, -1)}, ArgumentError, "seq_lens[1]=-1: the block table has room for 0"),
        # Three pages are used; the table's width is five.
        ({"seq_lens": (33, 81)}, ArgumentError, "room for 0 to 80 tokens a request"),
        ({"page": -1}, ArgumentError, "block_table[1] names a page outside 0..8"),
        ({"page": 9}, ArgumentError, "block_table[1] names a page outside 0..8 among the 3 that"),
        ({"page": -(2**31)}, ArgumentError, "seq_lens[1]=48 uses"),
        ({"damage": True}, FormatError, "block descriptor 250"),
    ],
)
def test_run_errors_leave_the_outputs(changes, error, message):
    """Whatever a run refuses, it has written nothing, also where only the last request is wrong."""
    batch = make_batch(small(), (33, 48), q_len=2, seal=False)
    assert batch.store.num_pages == 9
    assert batch.block_table.shape[1] == 5
    planned = plan(batch)
    out = torch.full((2, 2, 6, 64), 77.0, dtype=torch.bfloat16)
    lse = torch.full((2, 2, 6), 77.0)
    arguments = {"q": batch.q, "kv": batch.store.layer(0), "out": out, "lse": lse}
    arguments |= {
        name: changes[name] for name in ("q", "kv", "sinks", "out", "lse") if name in changes
    }
    if "seq_lens" in changes:
        batch.seq_lens[:] = torch.tensor(changes["seq_lens"])
    if "page" in changes:
        batch.block_table[1, 2] = changes["page"]
    if "damage" in changes:
        _damage(batch)
    with pytest.raises(error, match=re.escape(message)):
        planned.run(**arguments)
    assert (out == 77).all()
    assert (lse == 77).all()


@pytest.mark.parametrize(
    ("length", "page", "message"),
    [
        (-1, 0, "seq_lens[0]=-1"),
        (33, 0, "room for 0 to 32 tokens"),
        (17, 4, "names a page outside 0..3"),
        (17, -1, "names a page outside 0..3"),
    ],
)
def test_reference_errors(length, page, message):
    """`reference.attention` checks lengths and page ids by itself, with int64 tables too."""
    store = PageStore(small(), 4)
    q = torch.zeros(1, 1, 6, 64)
    table, lengths = torch.tensor([[0, page]]), torch.tensor([length])
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention(q, store.layer(0), table, lengths)


def test_dense_attention_by_hand():
    """The oracle itself: two tokens with scores 0 and log 3, and a sink of log 4."""
    q, k = torch.zeros(2, 1, 64), torch.zeros(2, 1, 64)
    q[:, 0, 0], k[1, 0, 0] = 1.0, math.log(3)
    v = torch.stack([torch.ones(1, 64), torch.full((1, 64), 5.0)])
    out, lse = dense_attention(q, k, v, sm_scale=1.0)
    assert out[:, 0, 0].tolist() == pytest.approx([1.0, (1 + 3 * 5) / 4], abs=1e-6)
    assert lse[:, 0].tolist() == pytest.approx([0.0, math.log(4)], abs=1e-6)
    out, lse = dense_attention(q, k, v, sm_scale=1.0, sinks=torch.tensor([math.log(4)]))
    assert out[:, 0, 0].tolist() == pytest.approx([1 / 5, (1 + 3 * 5) / 8], abs=1e-6)
    assert lse[:, 0].tolist() == pytest.approx([math.log(5), math.log(8)], abs=1e-6)
