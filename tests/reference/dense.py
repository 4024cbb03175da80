"""What the attention tests share: a batch of requests in pages, and attention without pages.

`dense_attention` is written from the definition, with a mask over whole sequences, and knows
nothing of pages, blocks or spans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zf_cute import BatchAttention, KVShape, PageStore

NAN_BITS = 0x7FC1

# Around one token, one page of 16 (and one token tile), and the 256 tokens that kernels like to
# take at a time; 0 is a request that has just been admitted.
LENGTHS = (0, 1, 15, 16, 17, 255, 256, 257)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    round_weights: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of one request: q [q_len, heads, dim], k and v [tokens, kv_heads, dim].

    Returns the output in `dtype` and the LSE [q_len, heads].  With `round_weights`, the softmax's
    numerators exp(score - max), before they are normalised, are rounded to BF16 on their way to
    the product with V, as tensor cores need them; the denominator sums them unrounded.
    """
    q_len, heads, head_dim = q.shape
    tokens, group = len(k), heads // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, 1)
    values = v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("ihd,thd->iht", q.to(dtype), keys)
    scores = scores * (head_dim**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    behind = (tokens - q_len + torch.arange(q_len))[:, None] - torch.arange(tokens)
    seen = behind >= 0
    if window_left >= 0:
        seen &= behind <= window_left
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    # The sink is one more column, which has no value.
    sink = torch.full((heads,), -math.inf) if sinks is None else sinks
    scores = torch.cat([scores, sink.to(dtype).expand(q_len, -1)[..., None]], -1)
    lse = torch.logsumexp(scores, -1)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(torch.isneginf(top), 0.0))
    total = weights.sum(-1)[..., None]
    if round_weights:
        weights = weights.to(torch.bfloat16).to(dtype)
    out = torch.einsum("iht,thd->ihd", weights[..., :-1], values)
    return torch.where(total > 0, out / total, 0.0), lse


def bf16_bound(exact: Tensor, bf16: Tensor) -> float:
    """The project's bound on |output - exact|, from the error of the same formula in BF16.

    Twice the largest error of BF16 torch, plus one BF16 ulp of the largest output.
    """
    if not exact.numel():
        return 0.0
    largest = float(exact.abs().max())
    ulp = 2.0 ** (math.floor(math.log2(largest)) - 7) if largest else 0.0
    return 2 * float((bf16.double() - exact).abs().max()) + ulp


def mixed_values(tokens: int, heads: int, dim: int, generator: torch.Generator) -> Tensor:
    """[tokens, heads, dim] BF16 whose blocks are of every kind once sealed.

    Tiles of 16 tokens by 16 dims are Gaussian without tiny values (compressed), hold exact zeros
    (exceptions), or spread over 26 exponents (raw).
    """
    rows = -(-tokens // 16) * 16
    x = torch.randn(rows, heads, dim, generator=generator)
    small = x.abs() < 2**-9
    x = torch.where(small, x.sign() * 2**-9, x)
    tile = (rows // 16, heads, dim // 16)

    def spread(per_tile: Tensor) -> Tensor:
        return per_tile.repeat_interleave(16, 0).repeat_interleave(16, 2)

    style = spread(torch.rand(tile, generator=generator))
    at = torch.randint(16, (2, *tile), generator=generator)
    token = (torch.arange(rows) % 16)[:, None, None] == spread(at[0])
    zero = token & ((torch.arange(dim) % 16) == spread(at[1]))
    x[zero & (style < 0.25)] = 0.0
    exponent = torch.randint(-25, 1, x.shape, generator=generator)
    x = torch.where(style > 0.85, torch.ldexp(x.sign(), exponent), x)
    return x[:tokens].to(torch.bfloat16)


def poison(store: PageStore) -> None:
    """Fill everything of a pool but the metadata with NaN."""
    store._homes[..., store.shape.layout.metadata_bytes :].view(torch.int16).fill_(NAN_BITS)


@dataclass
class Batch:
    """Requests in pages, and the dense tensors that were put there."""

    store: PageStore
    block_table: Tensor
    seq_lens: Tensor
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]

    @property
    def shape(self) -> KVShape:
        """Shape of the store."""
        return self.store.shape

    def pages(self, request: int) -> Tensor:
        """Page ids of a request."""
        used = -(-int(self.seq_lens[request]) // self.shape.page_size)
        return self.block_table[request, :used].long()

    def full_pages(self, request: int) -> Tensor:
        """Page ids of a request that can be sealed."""
        return self.pages(request)[: int(self.seq_lens[request]) // self.shape.page_size]

    def write(self, request: int, layer: int = 0) -> None:
        """(Re)write a request's dense keys and values into its pages, which must be raw."""
        page_size, at = self.shape.page_size, torch.arange(len(self.k[request]))
        slots = self.pages(request)[at // page_size] * page_size + at % page_size
        self.store.append(layer, self.k[request], self.v[request], slots)

    def dense(self, **options) -> tuple[Tensor, Tensor]:
        """`dense_attention` of all requests: [batch, q_len, heads, dim], [batch, q_len, heads]."""
        if not len(self.q):
            return self.q.double(), self.q[..., 0].double()
        states = [
            dense_attention(*qkv, **options) for qkv in zip(self.q, self.k, self.v, strict=True)
        ]
        out, lse = zip(*states, strict=True)
        return torch.stack(out), torch.stack(lse)


def make_batch(
    shape: KVShape, lengths: tuple[int, ...], *, q_len: int = 1, seal: bool = True, seed: int = 0
) -> Batch:
    """Requests of some lengths in shuffled pages of a pool full of NaN.

    With `seal`, two in three of the full pages are sealed.  Table entries past a length are -1 or
    the largest id there is.
    """
    generator = torch.Generator().manual_seed(seed)
    page_size, heads, dim = shape.page_size, shape.num_kv_heads, shape.head_dim
    counts = [-(-length // page_size) for length in lengths]
    store = PageStore(shape, sum(counts) + 3)
    poison(store)
    width = max(counts, default=0) + 2
    block_table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    block_table[:, -1] = 2**31 - 1
    free = torch.randperm(store.num_pages, generator=generator)
    for request, count in enumerate(counts):
        block_table[request, :count], free = free[:count], free[count:]
    batch = Batch(
        store,
        block_table,
        torch.tensor(lengths, dtype=torch.int32),
        torch.randn(len(lengths), q_len, shape.num_qo_heads, dim, generator=generator).bfloat16(),
        [mixed_values(length, heads, dim, generator) for length in lengths],
        [mixed_values(length, heads, dim, generator) for length in lengths],
    )
    for request in range(len(lengths)):
        batch.write(request)
    if seal:
        full = [page for r in range(len(lengths)) for page in batch.full_pages(r).tolist()]
        chosen = [page for i, page in enumerate(full) if i % 3]
        if chosen:
            store.seal(0, chosen)
    return batch


def small(**changes) -> KVShape:
    """The smallest shape with two KV heads and several query heads each."""
    return KVShape(
        **{"num_layers": 1, "num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64} | changes
    )


def plan(batch: Batch, *, compute_dtype: torch.dtype = torch.float32, **options) -> BatchAttention:
    """A planned BatchAttention for a batch."""
    planned = BatchAttention(batch.shape, max(1, len(batch.q)), compute_dtype=compute_dtype)
    planned.plan(batch.block_table, batch.seq_lens, q_len=batch.q.shape[1], **options)
    return planned


def run(batch: Batch, *, sinks=None, layer: int = 0, **options) -> tuple[torch.Tensor, ...]:
    """Output and LSE of one run over a batch."""
    planned = plan(batch, **options)
    return planned.run(batch.q, batch.store.layer(layer), sinks=sinks, return_lse=True)
