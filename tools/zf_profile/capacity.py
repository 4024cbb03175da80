"""Tokens and requests that fit in a GPU's memory, uncompressed and compressed, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zf_profile.models import Model

FORMULA = """\
budget   = {fraction:g} x GPU bytes - weights
BF16     = ({prefix} + {new}) tokens x token bytes
zf_cute  = ({prefix} x {sealed:.4f} + {new} x {raw:.4f}) tokens x token bytes
requests = floor(budget / bytes),  tokens = {total} x budget / bytes
{sealed:.4f}: sealed page over BF16, with its metadata, alignment and places
{raw:.4f}: raw page over BF16, as the {new} new tokens are counted
Activations and workspace are counted on neither side."""


@dataclass(frozen=True)
class Load:
    """What every request holds, and the memory it may use.

    Attributes
    ----------
    prefix_tokens, new_tokens : int
        Tokens in sealed pages and tokens counted raw, per request.
    fraction : float
        Share of the GPU's memory that weights and cache may take.
    """

    prefix_tokens: int = 8192
    new_tokens: int = 256
    fraction: float = 0.8

    @property
    def tokens(self) -> int:
        """Tokens of a request."""
        return self.prefix_tokens + self.new_tokens


def formula(load: Load, sealed_ratio: float, raw_ratio: float) -> str:
    """Text of the arithmetic that `fit` does."""
    return FORMULA.format(
        fraction=load.fraction,
        prefix=load.prefix_tokens,
        new=load.new_tokens,
        total=load.tokens,
        sealed=sealed_ratio,
        raw=raw_ratio,
    )


def fit(
    model: Model, gpu_bytes: float, load: Load, sealed_ratio: float, raw_ratio: float
) -> dict[str, Any]:
    """What fits, uncompressed and compressed.

    Parameters
    ----------
    model : Model
        Shape and weights.
    gpu_bytes : float
        Memory of the GPU.
    load : Load
        Tokens per request and the share of memory.
    sealed_ratio, raw_ratio : float
        Stored bytes over BF16 bytes of sealed and of raw pages.
    """
    token = model.shape.bf16_token_bytes
    budget = load.fraction * gpu_bytes - model.weight_bytes
    plain = load.tokens * token
    compressed = token * (load.prefix_tokens * sealed_ratio + load.new_tokens * raw_ratio)
    sides = {
        name: {
            "bytes_per_request": size,
            "requests": max(0, int(budget // size)),
            "tokens": max(0.0, budget / size * load.tokens),
        }
        for name, size in (("uncompressed", plain), ("compressed", compressed))
    }
    return {
        "model": model.name,
        "gpu_bytes": gpu_bytes,
        "weight_bytes": model.weight_bytes,
        "budget_bytes": budget,
        **sides,
        "token_gain": plain / compressed,
    }
