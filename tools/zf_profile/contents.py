"""Keys and values to time kernels on: made on the device, from little that is copied there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zf_layouts.fragment import TILE
from zf_profile.bench_cases import KV, Case

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_REAL = {64: "smollm2-135m", 128: "qwen2.5-coder-1.5b", 256: "qwen2.5-coder-1.5b"}
_SHIFT = 5
"""Tiles of 16 tokens by which a request starts later in the sample than the one before it."""


def describe(kv: str, head_dim: int) -> str:
    """Say where the values come from."""
    if kv != "real":
        return KV[kv]
    joined = ", two heads joined along their dims" if head_dim == 256 else ""
    return f"{KV[kv]}: all layers and KV heads of {_REAL[head_dim]}{joined}"


def make(case: Case, kv: str, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and values of a case.

    Parameters
    ----------
    case : Case
        Shape, batch and length.
    kv : {"real", "gaussian", "uniform"}
        What they hold.
    seed : int
        Of random values.
    device : torch.device
        Where.

    Returns
    -------
    k, v : Tensor
        [tokens, num_kv_heads, head_dim] bfloat16, request by request.
    """
    import torch

    if kv == "real":
        return _tiled(case, device)
    shape = (case.tokens, case.shape.num_kv_heads, case.shape.head_dim)
    generator = torch.Generator(device=device).manual_seed(seed)
    if kv == "gaussian":
        k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in "kv")
        return k.normal_(generator=generator), v.normal_(generator=generator)
    k, v = (
        torch.randint(
            -(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device, generator=generator
        )
        for _ in "kv"
    )
    return k.view(torch.bfloat16), v.view(torch.bfloat16)


def _tiled(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sample, its heads and tokens repeated; tiles of 16 tokens stay whole.

    Request r starts 5 r tiles into the sample, and its head h is head r * heads + h of the
    sample's, so that every layer occurs also where a GPU has one head.
    """
    import torch

    heads, batch = case.shape.num_kv_heads, case.batch
    tensors = _source(case.shape.head_dim)
    tokens, sample_heads, _ = tensors[0].shape
    request = torch.arange(batch, device=device)[:, None]
    token = (torch.arange(case.kv_len, device=device) + request * (_SHIFT * TILE)) % tokens
    head = (request * heads + torch.arange(heads, device=device)) % sample_heads
    row = (token[:, :, None] * sample_heads + head[:, None, :]).flatten()
    k, v = (
        x.to(device).flatten(0, 1).index_select(0, row).view(case.tokens, heads, -1)
        for x in tensors
    )
    return k, v


def _source(head_dim: int) -> tuple[Tensor, Tensor]:
    """[512, heads, head_dim] keys and values of all layers of the sample's model."""
    import torch

    from zf_profile import sample

    layers = sample.load()[_REAL[head_dim]]
    k, v = (torch.cat([getattr(layer, part) for layer in layers], 1) for part in "kv")
    if head_dim != 256:
        return k, v
    return _joined(k), _joined(v)


def _joined(x: Tensor) -> Tensor:
    """Pairs of heads of 128 dims as heads of 256, RoPE's partners half a head apart as before."""
    tokens, heads, head_dim = x.shape
    halves = x.reshape(tokens, heads // 2, 2, 2, head_dim // 2)  # head of the pair, half
    return halves.transpose(2, 3).reshape(tokens, heads // 2, 2 * head_dim)
