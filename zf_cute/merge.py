"""Merge attention states: two outputs over disjoint sets of tokens become one over their union."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zf_cute.checks import check_tensor
from zf_cute.errors import ArgumentError


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, base: Literal["e", "2"] = "e"
) -> tuple[Tensor, Tensor]:
    """Merge two attention states, as shared-prefix cascades and splits need.

    Parameters
    ----------
    out_a, out_b : Tensor
        [..., head_dim] outputs.
    lse_a, lse_b : Tensor
        [...] logarithms of the softmax denominators, -inf for an empty state.
    base : {"e", "2"}
        Base of the logarithms: "e" (default) as zf_cute and FlashAttention give them, "2" as
        FlashInfer does.

    Returns
    -------
    out, lse : Tensor
        Merged state, in the dtypes of the inputs.  An empty state changes nothing, whatever its
        output holds; two empty states give 0 and -inf.

    Raises
    ------
    ArgumentError
        If shapes or dtypes do not fit, or the base is unknown.

    References
    ----------
    FlashInfer's merge_state, whose LSE has base 2.
    """
    for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_tensor(name, x)
    if base not in ("e", "2"):
        raise ArgumentError(f"base={base!r}: choose 'e' or '2' (strings)")
    fits = out_a.dim() and out_a.shape == out_b.shape
    if not fits or not out_a.shape[:-1] == lse_a.shape == lse_b.shape:
        raise ArgumentError(
            f"shapes do not fit: outputs {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
            f"LSE {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    if out_a.dtype != out_b.dtype or lse_a.dtype != lse_b.dtype:
        raise ArgumentError(
            f"dtypes do not fit: outputs {out_a.dtype} and {out_b.dtype}, LSE {lse_a.dtype} and "
            f"{lse_b.dtype}"
        )
    add, exp = (torch.logaddexp, torch.exp) if base == "e" else (torch.logaddexp2, torch.exp2)
    a, b = lse_a.double(), lse_b.double()
    lse = add(a, b)
    merged = sum(
        exp(part - lse)[..., None] * out.double() for out, part in ((out_a, a), (out_b, b))
    )
    # 0 * NaN is NaN: where one state is empty, take the other as it is.
    a_empty, b_empty = torch.isneginf(a)[..., None], torch.isneginf(b)[..., None]
    merged = torch.where(b_empty, out_a.double(), merged)
    merged = torch.where(a_empty, out_b.double(), merged)
    merged = torch.where(a_empty & b_empty, 0.0, merged)
    return merged.to(out_a.dtype), lse.to(lse_a.dtype)
