"""BatchAttention: decode attention over a batch of requests, plan once, run for every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute import reference
from zf_cute.config import KVShape
from zf_cute.errors import ArgumentError, UnsupportedError
from zf_cute.pages import LayerPages

MAX_QUERY_TOKENS = 8
"""Most query tokens of one request in a run (speculative decoding)."""


class BatchAttention:
    """Attention of the newest tokens of each request over its pages, raw and sealed.

    `plan` once a step, when page tables or lengths have changed; `run` for every layer.

    Parameters
    ----------
    shape : KVShape
        The model's attention shape and the page layout.
    max_batch : int
        Most requests in a plan.
    device : str or torch.device
        Where the inputs lie: "cpu" (default) or a CUDA device.
    compute_dtype : torch.dtype
        Type the reference backend computes in: float32 (default) or float64.

    Raises
    ------
    UnsupportedError
        Names the parameter, its value and what is supported.
    """

    def __init__(
        self,
        shape: KVShape,
        max_batch: int,
        *,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Check the parameters; nothing is planned yet."""
        if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
            raise UnsupportedError(f"max_batch={max_batch!r} must be an int of at least 1")
        if compute_dtype not in (torch.float32, torch.float64):
            raise UnsupportedError(f"compute_dtype={compute_dtype}: float32 or float64")
        self.shape = shape
        self.max_batch = max_batch
        self.device = torch.empty(0, device=device).device
        self.compute_dtype = compute_dtype
        self._block_table: Tensor | None = None
        self._seq_lens: Tensor | None = None

    def plan(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        q_len: int = 1,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
    ) -> None:
        """Say which pages the coming runs read.  The tensors are kept, not copied.

        Parameters
        ----------
        block_table : Tensor
            [batch, max_pages] int32 page ids of each request in order, on the device.  Entries
            past a request's length are not read.
        seq_lens : Tensor
            [batch] int32 tokens of each request in the cache, the query tokens included, on the
            device.  0 is allowed: such a request gets output 0 and LSE -inf.
        q_len : int
            Query tokens of each request, 1 (default) to 8.  Token i is at position
            ``seq_len - q_len + i`` and sees the tokens up to its own (causal).
        sm_scale : float, optional
            Factor of the scores; ``head_dim ** -0.5`` by default.
        window_left : int
            Sliding window: tokens a query sees before its own; -1 (default) is all.
        logits_soft_cap : float
            ``cap * tanh(score / cap)`` on the scaled scores; 0 (default) is none.

        Raises
        ------
        ArgumentError
            If a shape, dtype or device does not fit, or an option is out of range.
        """
        for name, x, dims in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
            if x.dtype != torch.int32:
                raise ArgumentError(f"{name} is {x.dtype}; int32 is wanted")
            if x.dim() != dims:
                raise ArgumentError(f"{name} has {x.dim()} dimensions; {dims} are wanted")
            if x.device != self.device:
                raise ArgumentError(f"{name} is on {x.device} and the attention on {self.device}")
        batch = len(seq_lens)
        if len(block_table) != batch:
            raise ArgumentError(f"block_table has {len(block_table)} rows and seq_lens {batch}")
        if batch > self.max_batch:
            raise ArgumentError(f"a batch of {batch} is more than max_batch={self.max_batch}")
        if isinstance(q_len, bool) or not isinstance(q_len, int):
            raise ArgumentError(f"q_len={q_len!r} must be an int")
        if not 1 <= q_len <= MAX_QUERY_TOKENS:
            raise ArgumentError(f"q_len={q_len} is outside 1..{MAX_QUERY_TOKENS}")
        if isinstance(window_left, bool) or not isinstance(window_left, int):
            raise ArgumentError(f"window_left={window_left!r} must be an int")
        if window_left < -1:
            raise ArgumentError(f"window_left={window_left} is below -1 (-1 is no window)")
        if not 0 <= logits_soft_cap < float("inf"):
            raise ArgumentError(f"logits_soft_cap={logits_soft_cap} is not 0 or a positive number")
        if sm_scale is not None and not abs(sm_scale) < float("inf"):
            raise ArgumentError(f"sm_scale={sm_scale} is not a finite number")
        self._block_table, self._seq_lens = block_table, seq_lens
        self._q_len = q_len
        self._sm_scale, self._window_left = sm_scale, window_left
        self._logits_soft_cap = logits_soft_cap

    def run(
        self,
        q: Tensor,
        kv: LayerPages,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over one layer's pages, as planned.

        Parameters
        ----------
        q : Tensor
            [batch, num_qo_heads, head_dim] bfloat16, or [batch, q_len, num_qo_heads, head_dim];
            any strides.  Query head h uses KV head ``h // gqa_group``.
        kv : LayerPages
            ``store.layer(i)``.  The query tokens' own keys and values have been appended.
        sinks : Tensor, optional
            [num_qo_heads] floating-point score of each head's attention sink: it joins the
            softmax's denominator (and the LSE) without a value.
        out : Tensor, optional
            Written and returned if given; shape and dtype of q.
        lse : Tensor, optional
            Written and returned if given: float32, shape of q without head_dim.
        return_lse : bool
            Also return the LSE.

        Returns
        -------
        out : Tensor
            Shape of q, bfloat16; 0 for a query that sees no token.
        lse : Tensor
            Only with `return_lse` or `lse`: float32, the natural logarithm of the softmax's
            denominator; -inf for a query that sees no token and has no sink.

        Raises
        ------
        ArgumentError
            If nothing was planned, or a shape, dtype, device, length or page id does not fit.
        FormatError
            If a page's bytes are none that a writer makes.
        """
        if self._block_table is None or self._seq_lens is None:
            raise ArgumentError("nothing is planned: call plan(block_table, seq_lens) first")
        heads = (self.shape.num_qo_heads, self.shape.head_dim)
        want = (len(self._seq_lens), self._q_len, *heads)
        if q.dtype != torch.bfloat16:
            raise UnsupportedError(f"q is {q.dtype}; bfloat16 is supported")
        if tuple(q.shape) != want and not (self._q_len == 1 and tuple(q.shape) == want[:1] + heads):
            raise ArgumentError(f"q has shape {tuple(q.shape)}; the plan wants {want}")
        if q.device != self.device:
            raise ArgumentError(f"q is on {q.device} and the attention on {self.device}")
        if kv.layout != self.shape.layout:
            raise ArgumentError(f"kv is laid out as {kv.layout}; {self.shape.layout} is wanted")
        if kv.pool.device != self.device:
            raise ArgumentError(f"kv is on {kv.pool.device} and the attention on {self.device}")
        if sinks is not None and (sinks.shape != heads[:1] or not sinks.is_floating_point()):
            raise ArgumentError(f"sinks must be a floating-point tensor of shape {heads[:1]}")
        if sinks is not None and sinks.device != self.device:
            raise ArgumentError(f"sinks is on {sinks.device} and the attention on {self.device}")
        for name, x, shape, dtype in (
            ("out", out, q.shape, q.dtype),
            ("lse", lse, q.shape[:-1], torch.float32),
        ):
            if x is not None and (x.shape != shape or x.dtype != dtype or x.device != q.device):
                raise ArgumentError(f"{name} must be {dtype} of shape {tuple(shape)} on {q.device}")
            if x is not None and any(
                n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)
            ):
                raise ArgumentError(f"{name} is an expanded view: its elements share memory")
        got_out, got_lse = reference.attention(
            q.reshape(want),
            kv,
            self._block_table,
            self._seq_lens,
            sm_scale=self._sm_scale,
            window_left=self._window_left,
            logits_soft_cap=self._logits_soft_cap,
            sinks=sinks,
            compute_dtype=self.compute_dtype,
        )
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out.copy_(got_out.view(q.shape))
        if lse is None and not return_lse:
            return out
        if lse is None:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        lse.copy_(got_lse.view(q.shape[:-1]))
        return out, lse
