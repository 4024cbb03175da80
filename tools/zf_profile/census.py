"""How a tensor's blocks are stored, and why: counts, bits per value, exponents, failures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zf_layouts import BLOCK_VALUES, KINDS, PageLayout
from zf_layouts.page import SPAN_ALIGNMENT
from zf_profile import console

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text
    from torch import Tensor


@dataclass
class Census:
    """What became of the blocks of one K or V tensor.

    Bytes and values count whole pages: a partly filled page takes all its raw bytes.

    Attributes
    ----------
    name : str
        Name of the tensor.
    counts : dict
        Blocks of each kind, by the kind's name.
    block_bytes, metadata_bytes, values : int
        Stored bytes of blocks, of the tensor's share of metadata, and values held.
    bitwise_equal : bool
        Whether every bit came back.
    """

    name: str
    counts: dict[str, int]
    block_bytes: int
    metadata_bytes: int
    values: int
    bitwise_equal: bool

    @classmethod
    def of(cls, name: str, descriptors: Tensor, layout: PageLayout, bitwise_equal: bool) -> Census:
        """Count [pages, heads, blocks_per_part] descriptors of one part."""
        from zf_cute.reference import block_kinds

        number = block_kinds(descriptors).flatten().bincount(minlength=len(KINDS)).tolist()
        parts = descriptors.shape[0] * descriptors.shape[1]
        return cls(
            name,
            {kind.name: n for kind, n in zip(KINDS, number, strict=True)},
            sum(kind.nbytes * n for kind, n in zip(KINDS, number, strict=True)),
            parts * layout.head_metadata_bytes // 2,
            descriptors.numel() * BLOCK_VALUES,
            bitwise_equal,
        )

    @property
    def blocks(self) -> int:
        """All blocks."""
        return sum(self.counts.values())

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, metadata included."""
        return (self.block_bytes + self.metadata_bytes) * 8 / self.values

    def record(self) -> dict[str, Any]:
        """Entry of ``tensors`` in a JSON document."""
        return {
            "name": self.name,
            "blocks": self.blocks,
            **self.counts,
            "bits_per_value": self.bits_per_value,
            "bitwise_equal": self.bitwise_equal,
        }


def totals(parts: Sequence[Census], stored_bytes: int | None, reason: str = "") -> dict[str, Any]:
    """``totals`` of a JSON document.

    Parameters
    ----------
    parts : sequence of Census
        Every tensor.
    stored_bytes : int or None
        Bytes of all pages with spans aligned to 128; None where no pages can be made.
    reason : str
        Why there are none.
    """
    raw = 2 * sum(part.values for part in parts)
    used = sum(part.block_bytes + part.metadata_bytes for part in parts)
    document: dict[str, Any] = {
        "blocks": sum(part.blocks for part in parts),
        **{kind.name: sum(part.counts[kind.name] for part in parts) for kind in KINDS},
        "ratio": used / raw,
        "stored_ratio": None if stored_bytes is None else stored_bytes / raw,
        "bits_per_value": used / raw * 16,
        "bitwise_equal": all(part.bitwise_equal for part in parts),
    }
    if stored_bytes is None:
        document["stored_ratio_reason"] = reason
    return document


def aligned_bytes(span_bytes: Tensor) -> int:
    """Sum of span lengths, each rounded up to the alignment of spans."""
    return int(((span_bytes + SPAN_ALIGNMENT - 1) // SPAN_ALIGNMENT * SPAN_ALIGNMENT).sum())


def tensor_table(parts: Iterable[Census], whole: dict[str, Any]) -> Table:
    """Table of tensors with a line of totals."""
    table = console.new_table("Blocks of 512 values, by how they are stored; bits per value")
    table.add_column("tensor")
    for name in ("blocks", *(kind.name for kind in KINDS), "bits", "exact"):
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(*_cells(part.record()))
    table.add_section()
    table.add_row(*_cells({"name": "all", **whole}), style="bold")
    return table


def _cells(record: dict[str, Any]) -> list[str | Text]:
    from rich.text import Text

    counts = [str(record[key]) for key in ("blocks", *(kind.name for kind in KINDS))]
    equal = "yes" if record["bitwise_equal"] else "[red]NO[/red]"
    # Text, not str: a name may look like rich's markup.
    name = Text(console.printable(record["name"]))
    return [name, *counts, f"{record['bits_per_value']:.3f}", equal]


@dataclass
class Exponents:
    """Exponent fields of a tensor and what keeps its blocks out of one window.

    Attributes
    ----------
    histogram : list of int
        How often each of the 256 exponent fields occurs.
    zeros : int
        Values that are exactly +0 or -0.
    outside : list of int
        Blocks by the number of values outside their best window: 0, 1, 2, 3, 4, more.
    zeros_only : int
        Of the blocks with some outside, those that would fit were it not for exact zeros.
    """

    histogram: list[int] = field(default_factory=lambda: [0] * 256)
    zeros: int = 0
    outside: list[int] = field(default_factory=lambda: [0] * 6)
    zeros_only: int = 0

    def add(self, bits: Tensor) -> None:
        """Count [blocks, 512] int32 bit patterns."""
        import torch

        from zf_cute.reference import outlier_counts

        exponents = bits >> 7 & 0xFF
        found = exponents.flatten().bincount(minlength=256).tolist()
        self.histogram = [a + b for a, b in zip(self.histogram, found, strict=True)]
        zero = bits & 0x7FFF == 0
        self.zeros += int(zero.sum())
        outliers = outlier_counts(bits)[1]
        found = outliers.clamp(max=5).bincount(minlength=6).tolist()
        self.outside = [a + b for a, b in zip(self.outside, found, strict=True)]
        least = torch.where(zero, 255, exponents).amin(1) & ~1
        most = torch.where(zero, 0, exponents).amax(1)
        self.zeros_only += int(((outliers > 0) & (most <= least + 15)).sum())

    @property
    def entropy(self) -> float | None:
        """Entropy of the exponent field, in bits per value; None without full pages."""
        n = sum(self.histogram)
        return -sum(c / n * math.log2(c / n) for c in self.histogram if c) if n else None

    @property
    def bound(self) -> float | None:
        """Least bits per value of a code for exponents alone.

        The sign and the fraction of real caches are as good as random: 8 bits.
        """
        return None if self.entropy is None else 8 + self.entropy

    def record(self) -> dict[str, Any]:
        """Fields that ``ratio`` adds to a tensor's JSON entry."""
        return {
            "exponent_histogram": {str(e): n for e, n in enumerate(self.histogram) if n},
            "exponent_entropy_bits": self.entropy,
            "entropy_bound_bits_per_value": self.bound,
            "exact_zeros": self.zeros,
            "blocks_by_values_outside_window": dict(
                zip(("0", "1", "2", "3", "4", "more"), self.outside, strict=True)
            ),
            "blocks_outside_for_zeros_only": self.zeros_only,
        }
