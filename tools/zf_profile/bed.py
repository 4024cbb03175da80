"""The bed a case lies in: its values, its shuffled pages, and pools of them in a known state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zf_layouts import KINDS
from zf_layouts.page import SPAN_ALIGNMENT
from zf_profile import contents
from zf_profile.backend import Backend, Pool
from zf_profile.bench_cases import Case

if TYPE_CHECKING:
    from torch import Tensor

CHECKED_PAGES = 64
"""Pages of a case whose bytes are held against the reference backend's."""


@dataclass(frozen=True)
class Reference:
    """Some pages of a case as the reference backend encodes them.

    Attributes
    ----------
    which : Tensor
        [m] int64, which of the case's pages.
    spans : Tensor
        [m, spans, span_stride] uint8, zero past each length.
    lengths : Tensor
        [m, spans] int64.
    kinds : dict
        How many of their blocks are of each kind.
    """

    which: Tensor
    spans: Tensor
    lengths: Tensor
    kinds: dict[str, int]


class Bed:
    """Values and page ids of a case.

    Parameters
    ----------
    case : Case
        Shape, batch and length; whole pages.
    kv : str
        What the values are, as `contents.make` takes it.
    seed : int
        Of values and of the order of pages.
    backend : Backend
        Whose launches fill pools.

    Attributes
    ----------
    k, v : Tensor
        [tokens, num_kv_heads, head_dim] bfloat16, request by request.
    pages : Tensor
        [num_pages] int64: the pages of request 0, then of request 1, ...; shuffled.
    slots : Tensor
        [tokens] int64: where `append` puts each token.
    """

    def __init__(self, case: Case, kv: str, seed: int, backend: Backend) -> None:
        """Make the values and shuffle the pages."""
        import torch

        page_size, device = case.shape.page_size, backend.device
        if case.kv_len % page_size:
            raise ValueError(f"kv_len={case.kv_len} of {case.name} is not whole pages")
        self.case, self.kv, self.backend = case, kv, backend
        self.k, self.v = contents.make(case, kv, seed, device)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.pages = torch.randperm(case.num_pages, generator=self.generator, device=device)
        offset = torch.arange(page_size, device=device)
        self.slots = (self.pages[:, None] * page_size + offset).flatten()

    # ---- pools ---------------------------------------------------------------------------------
    def pool(self, *, spare_pages: int = 0) -> Pool:
        """Raw, empty pages whose values are poisoned; `spare_pages` more than the case has."""
        pool = self.backend.new_pool(self.case.shape, self.case.num_pages + spare_pages)
        self.poison(pool)
        return pool

    def poison(self, pool: Pool, first_page: int = 0) -> None:
        """Fill pages with NaN bits, from a page on, all but the metadata of their homes."""
        layout = self.case.shape.layout
        homes = pool.kv.pool.view(-1, layout.span_stride)
        homes[first_page * layout.spans :, layout.metadata_bytes :] = 0xFF

    def filled(self, *, spare_pages: int = 0) -> Pool:
        """Pages with all rows of the case appended."""
        pool = self.pool(spare_pages=spare_pages)
        self.backend.launch.append(pool.kv, pool.state, self.k, self.v, self.slots)
        return pool

    @cached_property
    def out(self) -> tuple[Tensor, Tensor]:
        """Buffers for what `decode_pages` writes, shared by all that decode the whole case."""
        import torch

        shape = self.case.shape
        size = (self.case.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        device = self.backend.device
        return (
            torch.empty(size, dtype=torch.bfloat16, device=device),
            torch.empty(size, dtype=torch.bfloat16, device=device),
        )

    # ---- what is right -------------------------------------------------------------------------
    def differing(self, k: Tensor, v: Tensor) -> str:
        """Say where decoded pages, in the case's order, differ from its values; "" nowhere."""
        return differing(k, self.k) or differing(v, self.v, "v")

    @cached_property
    def reference(self) -> Reference:
        """Pages spread over the case, encoded by the reference backend."""
        import torch

        from zf_cute.reference import block_kinds, blocks, encode_pages, part_blocks

        layout, count = self.case.shape.layout, self.case.num_pages
        which = torch.arange(min(CHECKED_PAGES, count), device=self.backend.device)
        which = which * count // len(which)
        size = (count, layout.page_size, layout.num_kv_heads, layout.head_dim)
        k, v = self.k.view(size)[which], self.v.view(size)[which]
        spans, lengths = encode_pages(k, v, layout)
        bits = torch.cat([part_blocks(k, layout, "k"), part_blocks(v, layout, "v")])
        found = blocks.encode_blocks(bits.flatten(0, 2), layout.max_exceptions)[0]
        number = block_kinds(found).bincount(minlength=len(KINDS)).tolist()
        kinds = {kind.name: n for kind, n in zip(KINDS, number, strict=True)}
        return Reference(which, spans, lengths, kinds)

    def content_record(self) -> dict[str, Any]:
        """``content`` of a JSON record."""
        found, layout = self.reference, self.case.shape.layout
        aligned = (found.lengths + SPAN_ALIGNMENT - 1) // SPAN_ALIGNMENT * SPAN_ALIGNMENT
        raw = 2 * layout.page_values * len(found.which)
        return {
            "kv": self.kv,
            "source": contents.describe(self.kv, layout.head_dim),
            "checked_pages": len(found.which),
            "blocks": found.kinds,
            "stored_ratio": int(aligned.sum()) / raw,
        }


def differing(got: Tensor, want: Tensor, name: str = "k") -> str:
    """Say how many values differ in any bit; "" if none do.  Any shapes of as many values."""
    import torch

    ours, theirs = (x.reshape(-1).view(torch.int16) for x in (got, want))
    if torch.equal(ours, theirs):
        return ""
    number = int((ours != theirs).sum())
    return f"{number} of {len(ours)} values of {name} differ"


def refusals(pool: Pool) -> str:
    """Say what launches have refused since the state was last reset; "" if nothing."""
    counts = pool.state.refused.tolist()
    return f"refused: counters {counts}" if any(counts) else ""
