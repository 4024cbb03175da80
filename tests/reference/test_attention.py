"""BatchAttention and reference.attention against dense attention in float64."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from reference.dense import (
    LENGTHS,
    Batch,
    bf16_bound,
    make_batch,
    plan,
    run,
    small,
)

from zf_cute import KVShape, PageStore
from zf_cute.reference import attention
from zf_layouts import kind_of

SEEN = 5
"""Window of the leak tests: shorter than a page, so it begins and ends inside pages."""


def check(batch: Batch, *, sinks=None, layer: int = 0, **options) -> None:
    """Hold a batch against dense attention: the project's bound in FP32, far tighter in FP64."""
    want, want_lse = batch.dense(sinks=sinks, **options)
    rounded, _ = batch.dense(sinks=sinks, dtype=torch.float32, round_weights=True, **options)
    bound = bf16_bound(want, rounded.bfloat16())
    empty = torch.isneginf(want_lse)
    lse_scale = want_lse[~empty].abs().clamp(min=1.0)

    out, lse = run(batch, sinks=sinks, layer=layer, **options)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert out.shape == batch.q.shape
    assert lse.shape == batch.q.shape[:-1]
    if out.numel():
        assert float((out.double() - want).abs().max()) <= bound
    assert torch.equal(torch.isneginf(lse), empty)
    assert ((lse.double() - want_lse)[~empty].abs() <= 1e-5 * lse_scale).all()
    if sinks is None:
        assert (out[empty] == 0).all()

    exact, exact_lse = attention(
        batch.q,
        batch.store.layer(layer),
        batch.block_table,
        batch.seq_lens,
        sinks=sinks,
        compute_dtype=torch.float64,
        **options,
    )
    assert exact.dtype == exact_lse.dtype == torch.float64
    torch.testing.assert_close(exact, want, rtol=0, atol=1e-12)
    assert torch.equal(torch.isneginf(exact_lse), empty)
    assert ((exact_lse - want_lse)[~empty].abs() <= 1e-12 * lse_scale).all()

    # FP64 inside: what is left is one rounding, at most half a BF16 ulp of each value.
    out, _ = run(batch, sinks=sinks, layer=layer, compute_dtype=torch.float64, **options)
    assert ((out.double() - want).abs() <= want.abs() * (2**-8 + 2**-20) + 1e-12).all()


# ---- shapes ------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims_and_page_sizes(head_dim, page_size):
    """Every page geometry, over ragged lengths; two query tokens, so length 1 is the shorter."""
    shape = KVShape(1, 6, 2, head_dim, page_size)
    check(make_batch(shape, LENGTHS, q_len=2))


@pytest.mark.parametrize(
    ("group", "kv_heads"),
    # Every group size, 3 and 6 among them (not a power of two); 1 KV head is MQA, 3 is smollm2's.
    [(1, 8), (1, 1), (3, 3), (4, 8), (6, 2), (8, 1), (8, 3), (16, 1), (16, 2)],
)
def test_query_and_kv_heads(group, kv_heads):
    """Query head h reads KV head h // group."""
    check(make_batch(KVShape(1, group * kv_heads, kv_heads, 64), (33, 0, 17, 1)))


@pytest.mark.parametrize("heads_per_span", [1, 2, 4])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_spans_and_rope_orders(heads_per_span, rope):
    """Heads in one span, several, or one each; both orders of K's tiles."""
    shape = KVShape(1, 8, 4, 128, rope=rope, heads_per_span=heads_per_span)
    assert shape.layout.spans == 4 // heads_per_span
    check(make_batch(shape, (0, 16, 49)))


@pytest.mark.parametrize("max_exceptions", [0, 1, 4])
def test_exception_limits(max_exceptions):
    """The paper's format (no exceptions) and ours give the same attention."""
    check(make_batch(small(max_exceptions=max_exceptions), (64, 47)))


def test_pages_mix_all_kinds_of_blocks():
    """The batches of this file hold what they are meant to: all kinds inside single pages."""
    batch = make_batch(small(head_dim=128), LENGTHS)
    pages = [page for request in range(len(LENGTHS)) for page in batch.full_pages(request).tolist()]
    sealed = batch.store.is_sealed(0, pages)
    kinds = [
        {kind_of(d).name for d in descriptors.flatten().tolist()}
        for descriptors in batch.store.descriptors(0, pages)
    ]
    assert {"raw"} in [kind for kind, is_sealed in zip(kinds, sealed, strict=True) if not is_sealed]
    assert {"compressed", "exceptions", "raw"} in kinds
    # And some request has sealed and raw pages side by side.
    last = batch.store.is_sealed(0, batch.full_pages(len(LENGTHS) - 1))
    assert last.any()
    assert not last.all()


def test_layers_are_apart():
    """Layer 1 has the same page ids and other bytes."""
    batch = make_batch(small(num_layers=2), (16, 35))
    first = run(batch)[0]
    for request in range(2):
        batch.k[request], batch.v[request] = -batch.k[request], batch.v[request].flip(0)
        batch.write(request, layer=1)
    check(batch, layer=1)
    assert torch.equal(run(batch)[0], first)


@pytest.mark.parametrize("q_len", [1, 8])
def test_batch_of_none(q_len):
    """An empty batch gives empty tensors."""
    batch = make_batch(small(), (), q_len=q_len)
    check(batch)
    check(batch, window_left=3, sinks=torch.zeros(6))


def test_batch_of_empty_requests():
    """Requests without a token give 0 and -inf, and need no page at all."""
    batch = make_batch(small(), (0, 0, 0))
    batch.block_table = torch.empty(3, 0, dtype=torch.int32)
    check(batch)
    out, lse = run(batch)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


# ---- query tokens, window, soft cap, sinks, scale ----------------------------------------------
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_causal_query_tokens(q_len):
    """Token i of q_len sees up to its own position; a request may be shorter than q_len."""
    # 0..9: every way a length relates to q_len; then the ends of a page.
    check(make_batch(small(), (*range(10), 15, 16, 17, 18, 24, 33), q_len=q_len))


def test_causal_order_by_hand():
    """With q = 0 token i gives the mean of the tokens up to its own: 3 tokens, 4 query tokens."""
    batch = make_batch(KVShape(1, 1, 1, 64), (3,), q_len=4)
    batch.q.zero_()
    batch.v = [torch.tensor([1.0, 2.0, 6.0]).bfloat16().view(3, 1, 1).expand(3, 1, 64)]
    batch.write(0)
    out, lse = run(batch)
    assert out[0, :, 0, 0].tolist() == [0.0, 1.0, 1.5, 3.0]
    assert lse[0, 0, 0] == -math.inf
    assert lse[0, 1:, 0].exp().round().tolist() == [1, 2, 3]


@pytest.mark.parametrize("q_len", [1, 8])
# 0 is the own token alone; 15 and 16 around a page, 100 begins inside a page, 1000 is past all.
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 100, 1000])
def test_sliding_windows(window_left, q_len):
    """A query sees its own token and `window_left` before it."""
    check(make_batch(small(), (*LENGTHS, 101, 102), q_len=q_len), window_left=window_left)


def test_sliding_window_by_hand():
    """With q = 0 and a window of 1 token i gives the mean of two tokens."""
    batch = make_batch(KVShape(1, 1, 1, 64), (20,), q_len=3)
    batch.q.zero_()
    batch.v = [torch.arange(20).bfloat16().view(20, 1, 1).expand(20, 1, 64)]
    batch.store.clear(0, batch.pages(0))
    batch.write(0)
    assert run(batch, window_left=1)[0][0, :, 0, 0].tolist() == [16.5, 17.5, 18.5]
    assert run(batch, window_left=0)[0][0, :, 0, 0].tolist() == [17.0, 18.0, 19.0]


@pytest.mark.parametrize("sm_scale", [None, 0.3, 1.0, 0.0, -0.1])
@pytest.mark.parametrize("logits_soft_cap", [0.0, 0.7, 30.0])
def test_scale_and_soft_cap(sm_scale, logits_soft_cap):
    """The cap applies to scaled scores; 0.7 bends most of them, 30 hardly any."""
    batch = make_batch(small(), (0, 1, 31, 64), q_len=2)
    check(batch, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)


def test_large_scores():
    """Scores of hundreds neither overflow nor lose the LSE: the maximum is taken out first."""
    batch = make_batch(small(), (5, 16, 40))
    check(batch, sm_scale=20.0)
    lse = run(batch, sm_scale=20.0)[1]
    assert lse.max() > 100  # beyond where exp() in FP32 overflows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sinks(dtype):
    """A sink joins the denominator and the LSE, also of a query that sees no token."""
    # 200 is beyond where exp() in FP32 overflows.
    sinks = torch.tensor([-3.0, 0.0, 1.5, 4.0, -1.0, 200.0], dtype=dtype)
    batch = make_batch(small(), (0, 1, 2, 16, 50), q_len=2)
    check(batch, sinks=sinks)
    _, lse = run(batch, sinks=sinks)
    assert torch.equal(lse[0], sinks.float().expand(2, -1))  # length 0
    assert torch.equal(lse[1, 0], sinks.float())  # length 1: its first query sees nothing


def test_sink_of_minus_infinity_is_no_sink():
    """A head whose sink is -inf behaves as without one, bit for bit."""
    batch = make_batch(small(), (0, 1, 40))
    for got, want in zip(run(batch, sinks=torch.full((6,), -math.inf)), run(batch), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("seed", range(6))
def test_options_together(seed):
    """Options in combination, on shapes that the other tests do not pair."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    kv_heads = pick(1, 2, 3)
    shape = KVShape(
        1,
        kv_heads * pick(3, 4),
        kv_heads,
        pick(64, 128, 256),
        pick(16, 32),
        rope=pick("half", "interleaved"),
        max_exceptions=pick(0, 4),
        heads_per_span=pick(0, 1),
    )
    lengths = tuple(torch.randint(0, 90, (6,), generator=generator).tolist())
    check(
        make_batch(shape, lengths, q_len=2 + seed, seed=seed),
        window_left=pick(0, 7, 33),
        logits_soft_cap=pick(2.0, 5.0),
        sm_scale=pick(0.05, 0.2),
        sinks=torch.randn(shape.num_qo_heads, generator=generator),
    )


# 4,095 is one below a multiple of the tiles that kernels take; the others are LENGTHS.
@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 4095])
def test_zero_query_gives_the_mean(length):
    """With q = 0 every token weighs the same: padding counted as tokens would show."""
    batch = make_batch(KVShape(1, 3, 1, 64), (length,))
    batch.q.zero_()
    mean = batch.v[0].double().mean(0)
    out, lse = run(batch)
    assert ((out[0, 0].double() - mean).abs() <= mean.abs() * 2**-8 + 1e-6).all()
    assert (lse - math.log(length)).abs().max() < 1e-5
    exact, _ = attention(
        batch.q,
        batch.store.layer(0),
        batch.block_table,
        batch.seq_lens,
        compute_dtype=torch.float64,
    )
    torch.testing.assert_close(exact[0, 0], mean.expand(3, -1), rtol=0, atol=1e-13)


# ---- real keys, values and queries -------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "layer"),
    [
        ("qwen2.5-coder-1.5b", 0),  # key channels up to 360
        ("qwen2.5-coder-1.5b", 7),
        ("qwen2.5-coder-1.5b", 14),
        ("qwen2.5-coder-1.5b", 23),
        ("smollm2-135m", 0),
        ("smollm2-135m", 15),
    ],
)
def test_real_sample(real_kv, model, layer):
    """64 requests that grow by a token each: full pages sealed and shared, own raw tails."""
    q, k, v = (real_kv[f"{model}/layer{layer}/{name}"] for name in "qkv")
    first = len(k) - len(q)
    shape = KVShape(1, q.shape[1], k.shape[1], k.shape[2])
    full, page_size = len(k) // shape.page_size, shape.page_size
    store = PageStore(shape, full + len(q))
    store.append(0, k, v, torch.arange(len(k)))
    store.seal(0, range(full))
    block_table = torch.full((len(q), full), -1, dtype=torch.int32)
    for i in range(len(q)):
        pages, tail = divmod(first + i + 1, page_size)
        block_table[i, :pages] = torch.arange(pages)
        if tail:
            block_table[i, pages] = full + i
            some = slice(pages * page_size, pages * page_size + tail)
            slots = (full + i) * page_size + torch.arange(tail)
            store.append(0, k[some], v[some], slots)
    lengths = torch.arange(first + 1, len(k) + 1, dtype=torch.int32)
    check(
        Batch(
            store,
            block_table,
            lengths,
            q[:, None],
            [k[:n] for n in lengths],
            [v[:n] for n in lengths],
        )
    )


# ---- pages -------------------------------------------------------------------------------------
def test_sealing_changes_no_bit():
    """The same plan and view before and after pages are sealed."""
    batch = make_batch(small(num_kv_heads=3, head_dim=128), LENGTHS, q_len=3, seal=False)
    planned, view = plan(batch), batch.store.layer(0)
    before = planned.run(batch.q, view, return_lse=True)
    for request in range(len(LENGTHS)):
        if len(batch.full_pages(request)):
            batch.store.seal(0, batch.full_pages(request))
        after = planned.run(batch.q, view, return_lse=True)
        assert torch.equal(after[0].view(torch.int16), before[0].view(torch.int16))
        assert torch.equal(after[1], before[1])


def test_sealing_no_pages():
    """A request without a full page has nothing to seal: that is no error."""
    batch = make_batch(small(), (15,))
    assert batch.store.seal(0, batch.full_pages(0)).tolist() == []
    check(batch)


def test_shared_pages():
    """A sealed prefix shared by three requests, one of which has one of its pages twice."""
    batch = make_batch(small(), (40, 35, 64), q_len=2)
    prefix = batch.block_table[0, :2].clone()
    for request in (1, 2):
        batch.block_table[request, :2] = prefix
        for dense in (batch.k, batch.v):
            dense[request] = torch.cat([dense[0][:32], dense[request][32:]])
    batch.block_table[2, 3] = prefix[0]
    for dense in (batch.k, batch.v):
        dense[2] = torch.cat([dense[2][:48], dense[0][:16]])
    check(batch)
    check(batch, window_left=20)


def test_page_ids_reused_for_new_tokens():
    """A cleared page serves another request: nothing of the old tokens is left in a plan."""
    batch = make_batch(small(), (48, 33))
    planned, view = plan(batch), batch.store.layer(0)
    old = planned.run(batch.q, view)
    other = make_batch(small(), (48, 33), seed=1)
    batch.k, batch.v = other.k, other.v
    batch.store.clear(0, torch.cat([batch.pages(0), batch.pages(1)]))
    for request in range(2):
        batch.write(request)
    new = planned.run(batch.q, view)
    assert not torch.equal(new, old)
    assert torch.equal(new, run(batch)[0])
    check(batch)
    batch.store.seal(0, batch.full_pages(0))
    check(batch)


def test_plan_keeps_its_tensors():
    """Lengths and page ids changed in place are seen by the next run, without a new plan."""
    batch = make_batch(small(), (20, 20))
    planned = plan(batch)
    batch.seq_lens[1] = 18
    batch.block_table[:] = batch.block_table.flip(0)
    batch.k = [batch.k[1], batch.k[0][:18]]
    batch.v = [batch.v[1], batch.v[0][:18]]
    out = planned.run(batch.q, batch.store.layer(0))
    assert torch.equal(out, run(batch)[0])
    check(batch)


def test_tables_of_any_stride():
    """Tables and lengths may be slices of larger ones."""
    batch = make_batch(small(), (40, 17))
    want = run(batch)
    wide = torch.full((4, 9), -7, dtype=torch.int32)
    wide[::2, 1:8:2] = batch.block_table[:, :4]
    lengths = torch.full((4,), -7, dtype=torch.int32)
    lengths[::2] = batch.seq_lens
    batch.block_table, batch.seq_lens = wide[::2, 1:8:2], lengths[::2]
    for got, same in zip(run(batch), want, strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize("pages_at_once", [1, 4, 7])
def test_decoding_in_chunks_changes_no_bit(monkeypatch, pages_at_once):
    """However many pages are decoded at a time: fewer than a request has, or a few requests'."""
    batch = make_batch(small(), (40, 0, 100, 16, 17, 0), q_len=2)
    want = run(batch)
    monkeypatch.setattr(
        import_module("zf_cute.reference.paged_attention"), "PAGES_AT_ONCE", pages_at_once
    )
    monkeypatch.setattr(import_module("zf_cute.reference.pages"), "BLOCKS_AT_ONCE", 3)
    for got, same in zip(run(batch), want, strict=True):
        assert torch.equal(got, same)


# ---- NaN ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("sealed", [False, True])
def test_hidden_tokens_never_leak(part, value, sealed):
    """NaN or Inf in one token reaches the queries that see it and no other.

    Every token of a request in turn: before the window, in it, and after a query's own position.
    """
    length, q_len = 37, 4
    batch = make_batch(small(), (length,), q_len=q_len, seal=False)
    clean = run(batch, window_left=SEEN)
    assert clean[0].isfinite().all()
    # Inf as a key may give a weight of 0 and be seen nonetheless: only NaN must show.
    must_show = math.isnan(value)
    for token in range(length):
        dense = getattr(batch, part)
        kept, dense[0] = dense[0], dense[0].clone()
        dense[0][token] = value
        batch.store.clear(0, batch.pages(0))
        batch.write(0)
        if sealed:
            batch.store.seal(0, batch.full_pages(0))
        out, lse = run(batch, window_left=SEEN)
        dense[0] = kept
        for i in range(q_len):
            position = length - q_len + i
            if position - SEEN <= token <= position:
                assert not must_show or out[0, i].isnan().all()
                assert part == "v" or not must_show or lse[0, i].isnan().all()
            else:
                assert torch.equal(out[0, i], clean[0][0, i])
                assert torch.equal(lse[0, i], clean[1][0, i])


def test_nan_stays_in_its_head_and_dim():
    """NaN in one KV head stays there; NaN in one dim of V stays in that dim, and off the LSE."""
    batch = make_batch(small(), (20,), seal=False)
    clean, clean_lse = run(batch)
    batch.k[0][5, 1, 9] = math.nan
    batch.v[0][7, 0, 3] = math.nan
    batch.write(0)
    out, lse = run(batch)
    want = clean.clone()
    want[0, 0, 3:] = math.nan
    want[0, 0, :3, 3] = math.nan
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(lse[0, 0, :3], clean_lse[0, 0, :3])
    assert lse[0, 0, 3:].isnan().all()


def test_nan_in_another_request_or_query():
    """Requests and query tokens do not touch each other."""
    batch = make_batch(small(), (18, 18, 0), q_len=2, seal=False)
    clean, _ = run(batch)
    batch.k[0][:] = math.nan
    batch.write(0)
    batch.q[1, 0] = math.nan
    out, lse = run(batch)
    assert out[0].isnan().all()
    assert out[1, 0].isnan().all()
    assert torch.equal(out[1, 1], clean[1, 1])
    assert (out[2] == 0).all()
    assert torch.isneginf(lse[2]).all()


# ---- outputs and strides -----------------------------------------------------------------------
def test_same_inputs_same_bits():
    """Two runs of one plan, and of another plan, give the same bits."""
    batch = make_batch(small(), LENGTHS, q_len=2)
    planned, view = plan(batch), batch.store.layer(0)
    first = planned.run(batch.q, view, return_lse=True)
    for again in (planned.run(batch.q, view, return_lse=True), run(batch)):
        assert torch.equal(again[0].view(torch.int16), first[0].view(torch.int16))
        assert torch.equal(again[1], first[1])


def test_returns():
    """The output alone, or with its LSE: by `return_lse` alone, also where `lse` is given."""
    batch = make_batch(small(), (3, 0))
    planned, view = plan(batch), batch.store.layer(0)
    out, lse = planned.run(batch.q, view, return_lse=True)
    alone = planned.run(batch.q, view)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, out)
    given = torch.full_like(lse, math.nan)
    assert torch.equal(planned.run(batch.q, view, lse=given), out)
    assert torch.equal(given, lse)
    assert planned.run(batch.q, view, lse=given, return_lse=True)[1] is given


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_given_outputs_are_overwritten(q_len, padded):
    """`out` and `lse` hold NaN first; padded and transposed ones are written between their gaps."""
    batch = make_batch(small(), (0, 1, 17), q_len=q_len)
    planned, view = plan(batch), batch.store.layer(0)
    want, want_lse = planned.run(batch.q, view, return_lse=True)
    if padded:
        whole = torch.full((6, q_len, 3, 80), math.nan, dtype=torch.bfloat16)
        out = whole.permute(2, 1, 0, 3)[..., 8:72]
        whole_lse = torch.full((6, q_len, 5), math.nan)
        lse = whole_lse.permute(2, 1, 0)[1:4]
    else:
        out, lse = torch.full_like(want, math.nan), torch.full_like(want_lse, math.nan)
    assert planned.run(batch.q, view, out=out, lse=lse) is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    if padded:
        assert whole[..., :8].isnan().all()
        assert whole[..., 72:].isnan().all()
        assert whole_lse[..., [0, 4]].isnan().all()


def test_output_may_be_the_query():
    """Everything is read before `out` is written, so q can be overwritten."""
    batch = make_batch(small(), (5, 40))
    want, _ = run(batch)
    got = plan(batch).run(batch.q, batch.store.layer(0), out=batch.q)
    assert got is batch.q
    assert torch.equal(got, want)


def test_query_of_three_dimensions():
    """With one query token q may leave its axis out, and so do the outputs."""
    batch = make_batch(small(), (0, 1, 17))
    planned, view = plan(batch), batch.store.layer(0)
    want, want_lse = planned.run(batch.q, view, return_lse=True)
    out, lse = planned.run(batch.q[:, 0], view, return_lse=True)
    assert out.shape == (3, 6, 64)
    assert lse.shape == (3, 6)
    assert torch.equal(out, want[:, 0])
    assert torch.equal(lse, want_lse[:, 0])
    given = torch.full((3, 6, 64), math.nan, dtype=torch.bfloat16)
    assert planned.run(batch.q[:, 0], view, out=given) is given
    assert torch.equal(given, out)


def test_query_of_any_stride():
    """Queries transposed, padded, or one row for all."""
    batch = make_batch(small(), (0, 1, 17), q_len=2)
    planned, view = plan(batch), batch.store.layer(0)
    want = planned.run(batch.q, view)
    transposed = batch.q.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert not transposed.is_contiguous()
    padded = torch.full((3, 2, 9, 100), math.nan, dtype=torch.bfloat16)[:, :, 2:8, 7:71]
    padded.copy_(batch.q)
    for q in (transposed, padded):
        assert torch.equal(planned.run(q, view), want)
    same = batch.q[2:].expand(3, -1, -1, -1)
    assert torch.equal(planned.run(same, view)[2], want[2])
