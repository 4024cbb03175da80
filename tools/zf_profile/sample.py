"""The bundled sample: keys, values and queries of two trained models (data/README.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PATH = Path(__file__).parent / "data" / "real_kv.safetensors"
TOKENS = 512
FIRST_QUERY = 448
"""Position of the first of the sample's 64 queries."""


@dataclass(frozen=True)
class SampleLayer:
    """One layer of one model.

    Attributes
    ----------
    name : str
        ``model/layerN``.
    k, v : Tensor
        [512, kv_heads, head_dim] bfloat16, keys after RoPE.
    q : Tensor
        [64, q_heads, head_dim] bfloat16, for tokens 448 to 511, after RoPE.
    """

    name: str
    k: Tensor
    v: Tensor
    q: Tensor


def load() -> dict[str, list[SampleLayer]]:
    """Layers of each model, by the model's name."""
    from safetensors.torch import load_file

    tensors = load_file(PATH)
    names = {name.rsplit("/", 1)[0] for name in tensors if name.endswith("/k")}
    models: dict[str, list[SampleLayer]] = {}
    for name in sorted(names, key=lambda n: (n.split("/")[0], int(n.split("layer")[1]))):
        k, v, q = (tensors[f"{name}/{part}"] for part in "kvq")
        models.setdefault(name.split("/")[0], []).append(SampleLayer(name, k, v, q))
    return models
