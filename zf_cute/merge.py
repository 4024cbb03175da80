"""Merge attention states: two outputs over disjoint sets of tokens become one over their union."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from zf_cute.errors import ArgumentError


def merge_states(
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
        If shapes do not fit or the base is unknown.
    """
    if base not in ("e", "2"):
        raise ArgumentError(f"base={base!r}: choose 'e' or '2'")
    if out_a.shape != out_b.shape or not out_a.shape[:-1] == lse_a.shape == lse_b.shape:
        raise ArgumentError(
            f"shapes do not fit: outputs {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
            f"LSE {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    factor = math.log(2) if base == "2" else 1.0
    a, b = lse_a.double() * factor, lse_b.double() * factor
    lse = torch.logaddexp(a, b)
    merged = torch.zeros(out_a.shape, dtype=torch.float64, device=out_a.device)
    for out, part in ((out_a, a), (out_b, b)):
        weight = torch.exp(part - lse)[..., None]
        empty = torch.isneginf(part)[..., None]  # 0 * NaN is NaN: leave an empty state's output out
        merged += torch.where(empty, 0.0, weight * out.double())
    return merged.to(out_a.dtype), (lse / factor).to(lse_a.dtype)
