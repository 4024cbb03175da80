"""Model shapes that reports speak of."""

from __future__ import annotations

from dataclasses import dataclass

from zf_cute.config import KVShape


@dataclass(frozen=True)
class Model:
    """A model's attention shape and weight bytes.

    Attributes
    ----------
    name : str
        As people say it.
    shape : KVShape
        On one GPU, 16 tokens a page.
    parameters : int
        Weights, BF16.
    """

    name: str
    shape: KVShape
    parameters: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in BF16."""
        return 2 * self.parameters


# Parameter counts and shapes as in the models' published configurations.
LLAMA_3_1_8B = Model("Llama 3.1 8B", KVShape(32, 32, 8, 128), 8_030_261_248)
QWEN3_8B = Model("Qwen3 8B", KVShape(36, 32, 8, 128), 8_190_735_360)
