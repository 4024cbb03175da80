"""merge_state against whole sequences, and FlashInfer's page tables against a plain loop."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
import torch
from reference.dense import dense_attention, make_batch

from zf_cute import ArgumentError, BatchAttention, KVShape, merge_state
from zf_cute.integrations.flashinfer import block_table_from_csr
from zf_cute.reference import attention

HEADS, DIM = 6, 64
LN2 = math.log(2)


def random_qkv(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries [1, 6, 64], keys and values [tokens, 2, 64], float64."""
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(1, HEADS, DIM, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, tokens, 2, DIM, generator=generator, dtype=torch.float64)
    return q, k, v


def empty_state(like: torch.Tensor, fill: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    """A state over no token whose output was never written."""
    return torch.full_like(like, fill), torch.full(like.shape[:-1], -math.inf, dtype=like.dtype)


# ---- merge_state ------------------------------------------------------------------------------
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("cut", [1, 16, 50, 99])
def test_two_parts_merge_to_the_whole(base, cut):
    """Any cut of 100 tokens, from one token in the first part to one in the second."""
    unit = LN2 if base == "2" else 1.0
    q, k, v = random_qkv(100)
    want, want_lse = dense_attention(q, k, v)
    out_a, lse_a = dense_attention(q, k[:cut], v[:cut])
    out_b, lse_b = dense_attention(q, k[cut:], v[cut:])
    out, lse = merge_state(out_a, lse_a / unit, out_b, lse_b / unit, base=base)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, want_lse / unit, rtol=0, atol=1e-13)
    # The base matters: the other one gives something else.
    other_base = "e" if base == "2" else "2"
    other, _ = merge_state(out_a, lse_a / unit, out_b, lse_b / unit, base=other_base)
    assert (other - want).abs().max() > 1e-3


def test_merging_is_symmetric():
    """The order of the two parts does not matter."""
    q, k, v = random_qkv(40)
    a, b = dense_attention(q, k[:9], v[:9]), dense_attention(q, k[9:], v[9:])
    for one, other in zip(merge_state(*a, *b), merge_state(*b, *a), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-15)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("fill", [math.nan, math.inf, 7.0])
def test_an_empty_state_changes_nothing(base, fill):
    """On either side, whatever its output holds; and beside it other rows merge as ever."""
    q, k, v = random_qkv(12)
    a, b = dense_attention(q, k[:5], v[:5]), dense_attention(q, k[5:], v[5:])
    empty = empty_state(a[0], fill)
    for out, lse in (merge_state(*a, *empty, base=base), merge_state(*empty, *a, base=base)):
        torch.testing.assert_close(out, a[0], rtol=0, atol=1e-15)
        torch.testing.assert_close(lse, a[1], rtol=0, atol=1e-15)
    # Head 2 of the one and head 4 of the other are empty.
    for state, head in ((a, 2), (b, 4)):
        state[0][:, head], state[1][:, head] = fill, -math.inf
    out, lse = merge_state(*a, *b)
    whole, _ = dense_attention(q, k, v)
    assert torch.equal(out[:, 2], b[0][:, 2])
    assert torch.equal(lse[:, 4], a[1][:, 4])
    torch.testing.assert_close(out[:, :2], whole[:, :2], rtol=0, atol=1e-13)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_empty_states(base, dtype):
    """Give exactly 0 and -inf, never NaN."""
    empty = empty_state(torch.empty(3, HEADS, DIM, dtype=dtype))
    out, lse = merge_state(*empty, *empty, base=base)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert out.dtype == lse.dtype == dtype


@pytest.mark.parametrize("pieces", range(1, 9))
def test_any_number_of_pieces(pieces):
    """Merged one after another, with an empty piece among them, they give the whole."""
    q, k, v = random_qkv(37, seed=pieces)
    bounds = [37 * i // pieces for i in range(pieces + 1)]
    bounds.insert(pieces // 2, bounds[pieces // 2])
    out, lse = empty_state(q)
    for begin, end in pairwise(bounds):
        part = dense_attention(q, k[begin:end], v[begin:end]) if end > begin else empty_state(q)
        out, lse = merge_state(out, lse, *part)
    want, want_lse = dense_attention(q, k, v)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-13)


def test_far_apart_scores():
    """LSE of hundreds, which exp() would overflow, and a part that weighs nothing."""
    ones = torch.ones(1, 1, 4)
    out, lse = merge_state(ones, torch.tensor([[800.0]]), 3 * ones, torch.tensor([[800.0]]))
    assert torch.equal(out, 2 * ones)
    assert float(lse) == pytest.approx(800 + LN2, abs=1e-4)
    out, lse = merge_state(ones, torch.tensor([[-800.0]]), 3 * ones, torch.tensor([[800.0]]))
    assert torch.equal(out, 3 * ones)
    assert float(lse) == 800.0


def test_dtypes_are_kept():
    """BF16 outputs and an FP32 LSE stay so, and are rounded once."""
    q, k, v = random_qkv(64)
    (out_a, lse_a), (out_b, lse_b) = (
        (out.bfloat16(), lse.float())
        for out, lse in (dense_attention(q, k[:20], v[:20]), dense_attention(q, k[20:], v[20:]))
    )
    out, lse = merge_state(out_a, lse_a, out_b, lse_b)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    exact, exact_lse = merge_state(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    assert torch.equal(out, exact.bfloat16())
    assert torch.equal(lse, exact_lse.float())


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 6), (0, 6)])
def test_any_leading_shape(shape):
    """Any number of leading dimensions, none and size 0 among them."""
    a, b = torch.zeros(*shape, 4), torch.ones(*shape, 4)
    lse = torch.zeros(shape)
    out, merged = merge_state(a, lse, b, lse + math.log(3))
    torch.testing.assert_close(out, torch.full_like(a, 0.75))
    torch.testing.assert_close(merged, torch.full_like(lse, math.log(4)))


def test_inputs_are_not_written():
    """The states merged are left alone."""
    states = [torch.randn(2, 3, 4), torch.randn(2, 3), torch.randn(2, 3, 4), torch.randn(2, 3)]
    copies = [x.clone() for x in states]
    merge_state(*states)
    for x, copy in zip(states, copies, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize(
    ("shapes", "base", "message"),
    [
        (((2, 4), (2,), (2, 4), (2,)), "10", "base='10': choose 'e' or '2'"),
        (((2, 4), (2,), (2, 4), (2,)), 2, "base=2: choose"),
        (((2, 4), (2,), (3, 4), (2,)), "e", "outputs (2, 4) and (3, 4)"),
        (((2, 4), (2,), (2, 4), (3,)), "e", "LSE (2,) and (3,)"),
        (((2, 4), (2, 1), (2, 4), (2, 1)), "e", "LSE (2, 1) and (2, 1)"),
        # Shapes that would broadcast are refused too.
        (((2, 4), (1,), (2, 4), (1,)), "e", "LSE (1,) and (1,)"),
        (((2, 4), (2,), (1, 4), (2,)), "e", "outputs (2, 4) and (1, 4)"),
    ],
)
def test_merge_errors(shapes, base, message):
    """Shapes that do not fit and unknown bases are named."""
    with pytest.raises(ArgumentError, match=re.escape(message)):
        merge_state(*(torch.zeros(shape) for shape in shapes), base=base)


def test_runs_over_prefix_and_suffix_merge():
    """A shared-prefix cascade: two runs of BatchAttention give what one run over all gives.

    In float64 to the last digits; in BF16 within the rounding of the parts and of the result.
    """
    batch = make_batch(KVShape(1, HEADS, 2, DIM), (48, 37, 32, 0))
    view = batch.store.layer(0)
    prefix = batch.seq_lens.clamp(max=32)
    tables = [
        (batch.block_table[:, :2], prefix),
        (batch.block_table[:, 2:], batch.seq_lens - prefix),
    ]
    want, want_lse = batch.dense()
    parts = [attention(batch.q, view, *part, compute_dtype=torch.float64) for part in tables]
    out, lse = merge_state(*parts[0], *parts[1])
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)

    planned, states = BatchAttention(batch.shape, 4), []
    for table, lengths in tables:
        planned.plan(table, lengths)
        states += planned.run(batch.q, view, return_lse=True)
    out, lse = merge_state(*states)
    assert out.dtype == torch.bfloat16
    assert (out.double() - want).abs().max() <= 2**-7 * want.abs().max()
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


# ---- block_table_from_csr ----------------------------------------------------------------------
def plain(indptr: list[int], indices: list[int], last: list[int], page_size: int):
    """Rows of pages and lengths, one request at a time."""
    rows, lengths = [], []
    for b in range(len(indptr) - 1):
        pages = indices[indptr[b] : indptr[b + 1]]
        rows.append(pages)
        lengths.append((len(pages) - 1) * page_size + last[b] if pages else 0)
    width = max(map(len, rows), default=0)
    return [row + [0] * (width - len(row)) for row in rows], lengths, width


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("counts", "last"),
    [
        ([], []),
        ([1], [1]),
        ([3], [16]),
        ([2, 0, 5, 1, 0], [7, 0, 16, 1, 99]),  # last_page_len without pages is ignored
        ([0, 0], [0, -3]),
        ([0, 4], [5, 15]),
    ],
)
def test_csr_tables(counts, last, dtype):
    """Ragged, with empty requests in every place, and more indices than are used."""
    indptr = [0]
    for count in counts:
        indptr.append(indptr[-1] + count)
    indices = [(7 * i + 3) % 41 for i in range(indptr[-1] + 2)]
    table, lengths = block_table_from_csr(
        torch.tensor(indptr, dtype=dtype),
        torch.tensor(indices, dtype=dtype),
        torch.tensor(last, dtype=dtype),
        16,
    )
    rows, want, width = plain(indptr, indices, last, 16)
    assert table.dtype == lengths.dtype == torch.int32
    assert table.shape == (len(counts), width)
    assert table.tolist() == rows
    assert lengths.tolist() == want


def test_csr_without_any_page():
    """Requests, but not a single page index."""
    none = torch.zeros(0, dtype=torch.int32)
    zeros = torch.zeros(4, dtype=torch.int32)
    table, lengths = block_table_from_csr(zeros, none, zeros[:3], 16)
    assert table.shape == (3, 0)
    assert lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_csr_table_plans(page_size):
    """What comes out is what `plan` takes, and names the same tokens."""
    batch = make_batch(KVShape(1, HEADS, 2, DIM, page_size), (0, 1, 64, 65))
    used = [batch.pages(request) for request in range(4)]
    indptr = torch.tensor([0, *(len(pages) for pages in used)]).cumsum(0)
    last = (batch.seq_lens - 1) % page_size + 1
    table, lengths = block_table_from_csr(indptr, torch.cat(used), last, page_size)
    assert lengths.tolist() == batch.seq_lens.tolist()
    outputs = []
    for tables in ((batch.block_table, batch.seq_lens), (table, lengths)):
        planned = BatchAttention(batch.shape, 4)
        planned.plan(*tables)
        outputs.append(planned.run(batch.q, batch.store.layer(0)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "message"),
    [
        ([0, 1, 2], [5, 6], [1], "indptr has shape (3,) and last_page_len (1,)"),
        ([0, 1], [5], [[1]], "last_page_len is torch.int32 with 2 dimensions"),
        ([[0, 1]], [5], [1], "indptr is torch.int32 with 2 dimensions"),
        ([0, 1, 2], [5, 6], [1, 2, 3], "[batch + 1] and [batch] are wanted"),
        ([0, 1], [[5]], [1], "indices is torch.int32 with 2 dimensions"),
        ([0, 1], [-1], [1], "negative or past 31 bits"),
        ([1, 2], [5, 6], [1], "indptr must start at 0"),
        ([0, 2, 1], [5, 6], [1, 1], "never fall"),
        ([0, 3], [5, 6], [1], "end within indices"),
        ([0, 1], [], [1], "end within indices"),
        ([0, 1], [5], [0], "last_page_len must be 1 to page_size=16"),
        ([0, 1, 2], [5, 6], [16, 17], "last_page_len must be 1 to page_size=16"),
        ([], [], [], "indptr has shape (0,)"),
        (1, [5], [1], "indptr is torch.int32 with 0 dimensions"),
    ],
)
def test_csr_errors(indptr, indices, last, message):
    """Tables that do not fit each other are refused."""
    tables = (torch.tensor(x, dtype=torch.int32) for x in (indptr, indices, last))
    with pytest.raises(ArgumentError, match=re.escape(message)):
        block_table_from_csr(*tables, 16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_csr_dtypes(dtype):
    """Types in which the arithmetic would wrap or round are refused, not computed with."""
    good = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [5], [1])]
    for i in range(3):
        tables = [x.to(dtype) if i == j else x for j, x in enumerate(good)]
        with pytest.raises(ArgumentError, match="int32 or int64"):
            block_table_from_csr(*tables, 16)


def test_csr_past_31_bits():
    """Page ids and lengths that int32 cannot hold."""
    tables = [torch.tensor(x) for x in ([0, 1], [2**31 + 5], [1])]
    with pytest.raises(ArgumentError, match="past 31 bits"):
        block_table_from_csr(*tables, 16)
    tables[1] = torch.tensor([5])
    with pytest.raises(ArgumentError, match="past 31 bits of tokens"):
        block_table_from_csr(*tables, 1 << 31)


def test_csr_ignores_what_lies_past_the_last_request():
    """FlashInfer's buffers of fixed size hold anything past indptr[-1]."""
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [4, 6, 1, -1, -7], [3, 16])]
    table, lengths = block_table_from_csr(*tables, 16)
    assert table.tolist() == [[4, 6], [1, 0]]
    assert lengths.tolist() == [19, 16]
    wide, same = block_table_from_csr(*tables, 16, max_pages=4)
    assert wide.tolist() == [[4, 6, 0, 0], [1, 0, 0, 0]]
    assert torch.equal(same, lengths)


def test_dtypes_must_fit():
    """A float64 state is not narrowed without a word."""
    out, lse = torch.zeros(2, 4), torch.zeros(2)
    with pytest.raises(ArgumentError, match="dtypes do not fit"):
        merge_state(out, lse, out.double(), lse)


@pytest.mark.parametrize("base", ["e", "2"])
def test_an_empty_state_changes_no_bit(base):
    """Minus zero and every bit of the LSE included."""
    out, lse = torch.randn(5, 8), torch.randn(5).double()
    out[0] = -0.0
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for state in ((out, lse, *empty), (*empty, out, lse)):
        got, got_lse = merge_state(*state, base=base)
        assert torch.equal(got.view(torch.int32), out.view(torch.int32))
        assert torch.equal(got_lse, lse)
