"""BatchAttention: decode attention over a batch of requests, plan once, run for every layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, overload

import torch
from torch import Tensor

from zf_cute import reference
from zf_cute.checks import check_device, check_tensor
from zf_cute.config import KVShape
from zf_cute.errors import ArgumentError, UnsupportedError
from zf_cute.pages import LayerPages

MAX_QUERY_TOKENS = 8
"""Most query tokens of one request in a run (speculative decoding)."""


@dataclass(frozen=True)
class _Plan:
    """What plan() was told."""

    block_table: Tensor
    seq_lens: Tensor
    q_len: int
    sm_scale: float | None
    window_left: int
    logits_soft_cap: float


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
    backend : {"auto", "reference"}
        "reference" is torch on any device; "auto" (default) is the fastest there is, which in this
        version is "reference" everywhere.  The attribute `backend` says which it became.
    compute_dtype : torch.dtype
        Type the reference backend computes in: float32 (default) or float64.

    Raises
    ------
    UnsupportedError
        Names the parameter, its value and what is supported.

    References
    ----------
    ZipFusion (arXiv 2610.33719), attention over compressed pages; plan and run as in FlashInfer.
    """

    def __init__(
        self,
        shape: KVShape,
        max_batch: int,
        *,
        device: str | torch.device = "cpu",
        backend: Literal["auto", "reference"] = "auto",
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Check the parameters; nothing is planned yet."""
        if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
            raise UnsupportedError(f"max_batch={max_batch!r} must be an int of at least 1")
        if not isinstance(shape, KVShape):
            raise ArgumentError(f"shape is a {type(shape).__name__}; a KVShape is wanted")
        if backend not in ("auto", "reference"):
            raise UnsupportedError(f"backend={backend!r}: choose 'auto' or 'reference'")
        if compute_dtype not in (torch.float32, torch.float64):
            raise UnsupportedError(f"compute_dtype={compute_dtype}: float32 or float64")
        self.device = check_device(device)
        self.shape = shape
        self.max_batch = max_batch
        self.backend: Literal["reference"] = "reference"
        self.compute_dtype = compute_dtype
        self._plan: _Plan | None = None

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
        """Say which pages the coming runs read.

        The tensors are kept, not copied.  Plan again after they have changed, before the next run.

        Parameters
        ----------
        block_table : Tensor
            [batch, max_pages] int32 page ids of each request in order, on the device.  Entries
            past a request's length are not read.
        seq_lens : Tensor
            [batch] int32 tokens of each request in the cache, the query tokens included, on the
            device.  0 is allowed: such a request gets output 0 and LSE -inf.  All of these tokens
            must have been appended: a slot that was not holds anything, NaN included.
        q_len : int
            Query tokens of each request, 1 (default) to 8.  Token i is at position
            ``seq_len - q_len + i`` and sees the tokens up to its own (causal); one before position
            0 sees none.
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
            check_tensor(name, x)
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
        soft_cap = _finite("logits_soft_cap", logits_soft_cap)
        if soft_cap < 0:
            raise ArgumentError(f"logits_soft_cap={logits_soft_cap} is below 0 (0 is no cap)")
        scale = None if sm_scale is None else _finite("sm_scale", sm_scale)
        self._plan = _Plan(block_table, seq_lens, q_len, scale, window_left, soft_cap)

    @overload
    def run(
        self,
        q: Tensor,
        kv: LayerPages,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def run(
        self,
        q: Tensor,
        kv: LayerPages,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
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
            softmax's denominator (and the LSE) without a value.  Finite, or -inf for none.
        out : Tensor, optional
            Written and returned if given; shape and dtype of q.  May be q itself.
        lse : Tensor, optional
            Written if given: float32, shape of q without head_dim; shares no memory with `out`.
        return_lse : bool
            Also return the LSE.

        Returns
        -------
        out : Tensor
            Shape of q, bfloat16; 0 for a query that sees no token.
        lse : Tensor
            Only with `return_lse`: float32, the natural logarithm of the softmax's
            denominator; -inf for a query that sees no token and has no sink.

        Raises
        ------
        ArgumentError
            If nothing was planned, or a shape, dtype or device does not fit.  The reference
            backend also checks lengths and page ids, for which it waits for the device.
        FormatError
            If a page's bytes are none that a writer makes (reference backend).
        """
        plan = self._plan
        if plan is None:
            raise ArgumentError("nothing is planned: call plan(block_table, seq_lens) first")
        want = self._check_inputs(plan, q, kv, sinks)
        _check_outputs(q, out, lse)
        got_out, got_lse = reference.attention(
            q.reshape(want),
            kv,
            plan.block_table,
            plan.seq_lens,
            sm_scale=plan.sm_scale,
            window_left=plan.window_left,
            logits_soft_cap=plan.logits_soft_cap,
            sinks=sinks,
            compute_dtype=self.compute_dtype,
        )
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out.copy_(got_out.view(q.shape))
        if lse is None:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        lse.copy_(got_lse.view(q.shape[:-1]))
        return (out, lse) if return_lse else out

    def _check_inputs(
        self, plan: _Plan, q: Tensor, kv: LayerPages, sinks: Tensor | None
    ) -> tuple[int, int, int, int]:
        """Check run's inputs against the plan; returns [batch, q_len, num_qo_heads, head_dim]."""
        batch, heads = len(plan.seq_lens), (self.shape.num_qo_heads, self.shape.head_dim)
        if len(plan.block_table) != batch:
            raise ArgumentError("the planned block_table or seq_lens was resized: plan again")
        check_tensor("q", q)
        if not isinstance(kv, LayerPages):
            raise ArgumentError(f"kv is a {type(kv).__name__}; pass store.layer(i)")
        want = (batch, plan.q_len, *heads)
        if q.dtype != torch.bfloat16:
            raise UnsupportedError(f"q is {q.dtype}; bfloat16 is supported")
        if tuple(q.shape) != want and not (plan.q_len == 1 and tuple(q.shape) == (batch, *heads)):
            raise ArgumentError(f"q has shape {tuple(q.shape)}; the plan wants {want}")
        if q.device != self.device:
            raise ArgumentError(f"q is on {q.device} and the attention on {self.device}")
        if kv.layout != self.shape.layout:
            differing = [
                f"{field.name}={getattr(kv.layout, field.name)} (here "
                f"{getattr(self.shape.layout, field.name)})"
                for field in fields(kv.layout)
                if getattr(kv.layout, field.name) != getattr(self.shape.layout, field.name)
            ]
            raise ArgumentError(
                f"kv has {', '.join(differing)}: build the store and the attention from one KVShape"
            )
        if kv.pool.device != self.device:
            raise ArgumentError(f"kv is on {kv.pool.device} and the attention on {self.device}")
        if sinks is not None:
            check_tensor("sinks", sinks)
            if sinks.shape != heads[:1] or not sinks.is_floating_point():
                raise ArgumentError(
                    f"sinks must be a floating-point tensor of shape {heads[:1]}, not "
                    f"{sinks.dtype} of shape {tuple(sinks.shape)}"
                )
            if sinks.device != self.device:
                raise ArgumentError(
                    f"sinks is on {sinks.device} and the attention on {self.device}"
                )
        return want


def _finite(name: str, value: float) -> float:
    """`value` as a float, or ArgumentError if it is no number that float32 holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"{name}={value!r} is not a number")
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ArgumentError(f"{name}={value} is not a finite float32 number")
    return float(value)


def _check_outputs(q: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    """Raise ArgumentError unless `out` and `lse` can be written without harm to each other."""
    for name, x, shape, dtype in (
        ("out", out, q.shape, q.dtype),
        ("lse", lse, q.shape[:-1], torch.float32),
    ):
        if x is None:
            continue
        check_tensor(name, x)
        if x.shape != shape or x.dtype != dtype or x.device != q.device:
            raise ArgumentError(f"{name} must be {dtype} of shape {tuple(shape)} on {q.device}")
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(f"{name} was made under inference_mode and cannot be written here")
        reach = 1
        for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True)):
            if size > 1 and stride < reach:
                raise ArgumentError(f"{name} is a view whose elements share memory")
            reach += stride * (size - 1)
    if out is not None and lse is not None and out.numel() and lse.numel():
        (a, a_end), (b, b_end) = _memory(out), _memory(lse)
        if a < b_end and b < a_end:
            raise ArgumentError("out and lse share memory")


def _memory(x: Tensor) -> tuple[int, int]:
    """First byte of a tensor and the byte past its last."""
    last = sum(stride * (size - 1) for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
