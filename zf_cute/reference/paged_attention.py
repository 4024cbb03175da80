"""Decode attention over pages in any mix of raw and sealed, one request at a time.

Every query token sees a contiguous run of tokens: all up to its own position, or the last
`window_left` before it.  So nothing is masked: what a query does not see is never computed with,
and NaN in unused slots or in masked tokens cannot reach it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zf_cute.errors import ArgumentError
from zf_cute.pages import LayerPages
from zf_cute.reference.pages import decode_pages

PAGES_AT_ONCE = 2048
"""Pages decoded at a time, shared ones once; a longer request is decoded whole."""


@torch.no_grad()
def attention(
    q: Tensor,
    kv: LayerPages,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of the last query tokens of each request over its pages.

    Parameters
    ----------
    q : Tensor
        [batch, q_len, num_qo_heads, head_dim].  Query token i of a request is at position
        ``seq_len - q_len + i`` and sees the tokens up to and including its own position.
    kv : LayerPages
        Pages of the layer; the query tokens' own keys and values are in them.
    block_table : Tensor
        [batch, max_pages] integer page ids; entries past a request's length are not read.
    seq_lens : Tensor
        [batch] integer tokens in the cache, the query tokens included; 0 is allowed.
    sm_scale : float, optional
        Factor of the scores; ``head_dim ** -0.5`` by default.
    window_left : int
        Tokens a query sees before its own; -1 (default) is all.
    logits_soft_cap : float
        ``cap * tanh(score / cap)`` if above 0.
    sinks : Tensor, optional
        [num_qo_heads] score that joins each head's softmax without a value; finite, or -inf for
        none.
    compute_dtype : torch.dtype
        float32 (default) or float64: type of scores, softmax and results.

    Returns
    -------
    out : Tensor
        Shape of q, in `compute_dtype`.  0 for a query that sees no token.
    lse : Tensor
        [batch, q_len, num_qo_heads] natural logarithm of the softmax's denominator, the sink
        included; -inf for a query that sees no token and has no sink.

    Raises
    ------
    ArgumentError
        If a length or a page id is out of range.
    FormatError
        If a page is one that no writer makes.
    """
    _, q_len, num_qo_heads, head_dim = q.shape
    layout = kv.layout
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    group = num_qo_heads // layout.num_kv_heads
    sink = None if sinks is None else sinks.to(compute_dtype).view(-1, group)
    out = torch.zeros(q.shape, dtype=compute_dtype, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=compute_dtype, device=q.device)
    if sinks is not None:
        lse[:] = sinks.to(compute_dtype)

    lengths = seq_lens.tolist()
    first_pages = _first_pages(lengths, q_len, window_left, layout.page_size)
    for requests, k_pages, v_pages, rows in _decoded(kv, block_table, lengths, first_pages):
        for b, row in zip(requests, rows, strict=True):
            offset = first_pages[b] * layout.page_size
            k, v = k_pages[row].flatten(0, 1), v_pages[row].flatten(0, 1)
            for i in range(q_len):
                position = lengths[b] - q_len + i
                if position < 0:
                    continue
                begin = max(0, position - window_left) if window_left >= 0 else 0
                seen = slice(begin - offset, position + 1 - offset)
                query = q[b, i].reshape(-1, group, head_dim)
                scores = _product("hgd,thd->hgt", query, k[seen], compute_dtype) * scale
                if logits_soft_cap > 0:
                    scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
                head_out, head_lse = _softmax_values(scores, v[seen], sink)
                out[b, i] = head_out.reshape(num_qo_heads, head_dim)
                lse[b, i] = head_lse.flatten()
    return out, lse


def _product(equation: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Einsum whose sums are exact to `dtype`.

    In float64, since float32 products are rounded to TF32 or BF16 where the caller's autocast or
    matmul precision says so.
    """
    return torch.einsum(equation, a.double(), b.double()).to(dtype)


def _softmax_values(scores: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [heads, group, dim] and LSE [heads, group] from scores [heads, group, tokens]."""
    top = scores.amax(-1)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - top)
    out = _product("hgt,thd->hgd", weights, v, weights.dtype) / total[..., None]
    return out, top + torch.log(total)


def _first_pages(lengths: list[int], q_len: int, window_left: int, page_size: int) -> list[int]:
    """First page of each request that any of its queries sees."""
    if window_left < 0:
        return [0] * len(lengths)
    return [max(0, n - q_len - window_left) // page_size for n in lengths]


def _decoded(
    kv: LayerPages, block_table: Tensor, lengths: list[int], first_pages: list[int]
) -> Iterator[tuple[list[int], Tensor, Tensor, list[Tensor]]]:
    """Decode pages for runs of requests.

    Yields the requests of a run, the decoded K and V of its distinct pages, and for each request
    the rows of those that are its pages in order.
    """
    page_size, table = kv.layout.page_size, block_table.long()
    wanted: list[Tensor] = []
    for b, (length, first) in enumerate(zip(lengths, first_pages, strict=True)):
        last = -(-length // page_size)
        if length < 0 or last > table.shape[1]:
            raise ArgumentError(
                f"seq_lens[{b}]={length}: the block table has room for 0 to "
                f"{table.shape[1] * page_size} tokens a request"
            )
        ids = table[b, first:last]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < kv.num_pages:
            raise ArgumentError(
                f"block_table[{b}] names a page outside 0..{kv.num_pages - 1} among the "
                f"{last - first} that seq_lens[{b}]={length} uses"
            )
        wanted.append(ids)
    begin = 0
    while begin < len(lengths):
        end, together = begin + 1, set(wanted[begin].tolist())
        while end < len(lengths):
            more = together.union(wanted[end].tolist())
            if len(more) > PAGES_AT_ONCE:
                break
            end, together = end + 1, more
        distinct, rows = torch.unique(torch.cat(wanted[begin:end]), return_inverse=True)
        k, v = decode_pages(kv, distinct)
        sizes = [len(ids) for ids in wanted[begin:end]]
        yield list(range(begin, end)), k, v, list(rows.split(sizes))
        begin = end
