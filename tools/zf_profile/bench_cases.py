"""What ``bench`` can time: kernels with their variants, and cases of a shape, a batch and a length.

Plain data: ``bench --list`` shows it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zf_cute.config import KVShape

KERNELS: dict[str, dict[str, str]] = {
    "append": {
        "prefill": "every row of the case at once; pages are shuffled, rows in their order",
        "unaligned": "prompts whose lengths are no multiples of 16: rows start anywhere in a page",
        "step-64": "one decode step: 64 rows, each into a page of its own",
        "step-256": "the same with 256 rows",
    },
    "encode": {
        "to-new-place": "every page of the case, to other places of the pool",
        "in-place": "every page of the case, over its own raw bytes",
    },
    "decode_pages": {
        "sealed": "every page of the case, sealed in place",
        "raw": "every page of the case, raw",
    },
    "copy": {
        "memcpy": "torch's copy_ (cudaMemcpyAsync) of as many bytes as the case's K and V",
        "memcpy-large": "the same of a larger buffer",
        "elementwise": "an elementwise kernel of torch's, as many bytes as the case's K and V",
        "elementwise-large": "the same of a larger buffer",
    },
}
"""Kernels and their variants; the copies are the ceiling, measured whatever else is."""

KV = {
    "real": "tiled from the bundled sample of real caches",
    "gaussian": "normal random values",
    "uniform": "random bits: every block stays raw",
}


@dataclass(frozen=True)
class Case:
    """Keys and values of one layer for a batch of requests.

    Attributes
    ----------
    name : str
        As ``--case`` takes it.
    model : str
        Whose shape this is.
    shape : KVShape
        One layer.
    batch, kv_len : int
        Requests, and tokens of each.
    default : bool
        Whether it runs where no case is named.
    """

    name: str
    model: str
    shape: KVShape
    batch: int
    kv_len: int
    default: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return self.batch * self.kv_len

    @property
    def pages_per_request(self) -> int:
        """Pages of one request, its last perhaps partly filled."""
        return -(-self.kv_len // self.shape.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of all requests."""
        return self.batch * self.pages_per_request

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values as plain BF16."""
        return self.tokens * self.shape.bf16_token_bytes

    @property
    def text(self) -> str:
        """One line for people."""
        shape = self.shape
        return (
            f"{self.model}: {self.batch} requests x {self.kv_len} tokens, {shape.num_kv_heads} KV "
            f"heads of {shape.head_dim}, {shape.page_size} tokens a page, one layer, "
            f"{self.kv_bytes / 1e6:.0f} MB of K and V"
        )

    def record(self) -> dict[str, Any]:
        """``case`` of a JSON record."""
        shape = self.shape
        return {
            "name": self.name,
            "model": self.model,
            "batch": self.batch,
            "kv_len": self.kv_len,
            "num_qo_heads": shape.num_qo_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "page_size": shape.page_size,
            "pages": self.num_pages,
            "spans": shape.layout.spans,
            "kv_bytes": self.kv_bytes,
        }


# Attention shapes as in the models' published configurations; the layer count is 1 throughout.
_LLAMA_8B = KVShape(1, 32, 8, 128)
_CASES = (
    Case("llama-3.1-8b-b32-8k", "Llama 3.1 8B", _LLAMA_8B, 32, 8192, default=True),
    Case("llama-3.1-8b-b32-2k", "Llama 3.1 8B", _LLAMA_8B, 32, 2048, default=True),
    Case("llama-3.1-8b-b64-2k", "Llama 3.1 8B", _LLAMA_8B, 64, 2048, default=True),
    # The same shape for one layer; here under its own name because people look for it.
    Case("qwen3-8b-b32-8k", "Qwen3 8B", KVShape(1, 32, 8, 128), 32, 8192),
    Case(
        "llama-70b-tp8-b32-8k",
        "Llama 3.1 70B, one of 8 GPUs",
        KVShape(1, 8, 1, 128, page_size=64),
        32,
        8192,
    ),
    Case("llama-3.2-1b-b32-8k", "Llama 3.2 1B", KVShape(1, 32, 8, 64), 32, 8192),
    Case("gemma-2-9b-b32-8k", "Gemma 2 9B", KVShape(1, 16, 8, 256), 32, 8192),
    Case("llama-3.1-8b-p32-b32-8k", "Llama 3.1 8B", KVShape(1, 32, 8, 128, page_size=32), 32, 8192),
    Case("llama-3.1-8b-p64-b32-8k", "Llama 3.1 8B", KVShape(1, 32, 8, 128, page_size=64), 32, 8192),
)
CASES: dict[str, Case] = {case.name: case for case in _CASES}


def default_cases() -> list[str]:
    """Names of the cases that run where none is named."""
    return [name for name, case in CASES.items() if case.default]
