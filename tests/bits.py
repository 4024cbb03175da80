"""Bit patterns, blocks and pages that the tests are made of.

Nothing here calls the code under test, except to hold its page objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from zf_cute.pages import LayerPages
    from zf_layouts import PageLayout

COMPRESSED, EXCEPTIONS, RAW = 768, 784, 1024
SELECTORS = (0x3217, 0x3270, 0x3710, 0x7210)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two bfloat16 tensors are equal in shape and in every bit, NaN payloads included."""
    assert a.dtype == b.dtype == torch.bfloat16
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def from_patterns(patterns: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Bfloat16 tensor with the given 16-bit patterns (0 to 65535)."""
    patterns = torch.as_tensor(np.asarray(patterns).astype(np.int64))
    return patterns.to(torch.int16).view(torch.bfloat16)


def to_patterns(values: torch.Tensor) -> np.ndarray:
    """Bit patterns (uint16) of a bfloat16 tensor."""
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def stored_bytes(descriptor: int) -> int:
    """Bytes of a block by FORMAT.md section 5, written again so as not to ask the code."""
    return COMPRESSED if descriptor < 128 else EXCEPTIONS if descriptor < 249 else RAW


def entry(position: int, high: int) -> int:
    """Exception entry by FORMAT.md section 5."""
    return SELECTORS[position & 3] | (position >> 2) << 16 | high << 24


def entry_bytes(entries: Sequence[int]) -> bytes:
    """Four entries as they lie in a block."""
    return b"".join(word.to_bytes(4, "little") for word in entries)


def mixed_values(
    shape: tuple[int, ...], seed: int, *, exceptions: bool = True, raw: bool = True
) -> torch.Tensor:
    """[..., page_size, heads, head_dim] bfloat16 whose blocks are of all kinds.

    Gaussian values of one scale a head, most of them in one window; one value in 1,000 is a zero
    (a block of 512 then has an exception or a few), and one 16 x 16 tile in five is random bits,
    NaN and infinities among them.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape, np.float32)
    # Away from zero, so that no value lies outside the window by itself.
    values = np.sign(values) * np.clip(np.abs(values), 0.02, 8)
    scale = np.float32(2.0) ** rng.integers(-60, 60, shape[-2])
    patterns = to_patterns(torch.from_numpy(values * scale[:, None]).bfloat16()).copy()
    if exceptions:
        zero = rng.random(shape) < 0.001
        patterns[zero] = rng.choice(np.array([0x0000, 0x8000], np.uint16), int(zero.sum()))
    if raw:
        tiled = (*shape[:-3], shape[-3] // 16, shape[-2], shape[-1] // 16)
        noisy = rng.random(tiled) < 0.2
        noisy = noisy.repeat(16, axis=-3).repeat(16, axis=-1)
        patterns[noisy] = rng.integers(0, 1 << 16, int(noisy.sum()))
    return from_patterns(patterns)


def format_parameters(layout: PageLayout) -> dict[str, object]:
    """What the independent decoder must be told about a layout."""
    names = ("num_kv_heads", "head_dim", "page_size", "rope", "max_exceptions", "heads_per_span")
    return {name: getattr(layout, name) for name in names}


def places_of(kv: LayerPages, page: int) -> list[tuple[int, int]]:
    """(start in 128 bytes, length in bytes) of each span of a page, as unsigned numbers."""
    return [(start & 0xFFFFFFFF, length & 0xFFFFFFFF) for start, length in kv.places[page].tolist()]


def pattern(exponent: int, sign: int = 0, fraction: int = 0) -> int:
    """16-bit pattern of an exponent field, a sign and a fraction."""
    return sign << 15 | exponent << 7 | fraction
