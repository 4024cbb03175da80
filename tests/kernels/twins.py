"""Two stores with the same pages: interpreted PTX writes one, and the reference backend the other.

`Twins` starts both over NaN.  After each operation every byte of every tensor of the two must be
the same, so a kernel may write nothing but what it is for: not the rest of a page, not another
layer, not the slack behind a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from bits import from_patterns, same_bits
from kernels.simulated import SimulatedLayer, far, poison
from torch import Tensor

from zf_cute import KVShape, PageStore, reference
from zf_cute.kernels.refusals import Refusal
from zf_cute.reference import writing
from zf_cute.reference.pages import part_values
from zf_layouts.page import SPAN_ALIGNMENT

LAYER = 1  # of two: that of the other one nothing may change


class Twins:
    """The pages of one layer, twice.

    Parameters
    ----------
    heads, head_dim, page_size, rope, max_exceptions, heads_per_span
        The layout.
    pages : int
        Page ids of the store.
    moved : bool
        Pages lie at one another's homes, in odd order.
    pool_at : int
        Byte of a larger pool at which the store's begins.
    how
        Of `SimulatedLayer`.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        page_size: int = 16,
        rope: str = "half",
        *,
        max_exceptions: int = 4,
        heads_per_span: int = 0,
        pages: int = 3,
        moved: bool = False,
        pool_at: int = 0,
        **how: object,
    ) -> None:
        """Two layers of empty pages."""
        shape = KVShape(2, heads, heads, head_dim, page_size, rope, max_exceptions, heads_per_span)
        self.layout = shape.layout
        self.expected, self.store = PageStore(shape, pages), PageStore(shape, pages)
        self.want, self.want_state = self.expected.layer(LAYER), self.expected.state(LAYER)
        self.pool_at = pool_at
        for store in (self.expected, self.store):
            poison(store)
            if moved:
                # A home of a page's span is that of another page's other span.
                places = store.places[LAYER]
                places.copy_(places.flatten(0, 1).flip(0).roll(1, 0).view_as(places))
        far(self.store, pool_at)
        self.layer = SimulatedLayer(self.store, LAYER, pool_at=pool_at, **how)

    # ---- what is the case before ---------------------------------------------------------------
    def fill(self, pages: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Full raw pages of both stores, by the reference; k and v are [pages, ...]."""
        slots = self.slots_of(pages)
        writing.append(self.want, self.want_state, k.flatten(0, 1), v.flatten(0, 1), slots)
        self.store.pool.copy_(self.expected.pool)
        self.store._written.copy_(self.expected._written)

    def fill_blocks(self, page: int, blocks: Sequence) -> None:
        """A full raw page that holds these blocks of 512 patterns, in order of their bytes.

        The rest of the page is the last block, again and again.
        """
        layout = self.layout
        shape = (1, layout.num_kv_heads, 2, layout.blocks_per_part)
        count = shape[1] * shape[2] * shape[3]
        assert 0 < len(blocks) <= count, f"{len(blocks)} blocks in a page of {count}"
        padded = [*blocks, *[blocks[-1]] * (count - len(blocks))]
        bits = torch.stack([torch.as_tensor(block).to(torch.int32) for block in padded])
        bits = bits.view(*shape, -1)
        self.fill(
            [page], part_values(bits[:, :, 0], layout, "k"), part_values(bits[:, :, 1], layout, "v")
        )

    def seal(self, pages: Sequence[int]) -> None:
        """Seal pages of both stores in place, by the reference."""
        self.expected.seal(LAYER, pages)
        for name in ("pool", "_sealed"):
            getattr(self.store, name).copy_(getattr(self.expected, name))
        self.store.places[..., 1] = self.expected.places[..., 1]

    def slots_of(self, pages: Iterable[int]) -> Tensor:
        """All slots of some pages, in order."""
        size = self.layout.page_size
        return torch.cat([page * size + torch.arange(size) for page in pages])

    # ---- what is done to both, each its way ----------------------------------------------------
    def append(self, k: Tensor, v: Tensor, slots: Tensor, refused: Tensor | None = None, **how):
        """Append; the reference leaves out the rows that are `refused`."""
        self.layer.append(k, v, slots, **how)
        kept = slots.long() if refused is None else slots.long().masked_fill(refused, -1)
        writing.append(self.want, self.want_state, k, v, kept)
        self.check()

    def encode(
        self,
        pages: Sequence[int],
        destinations: Tensor | None = None,
        *,
        refused: Sequence[bool] | None = None,
        index: torch.dtype = torch.int64,
    ) -> Tensor:
        """Encode; the reference leaves out the items that are `refused`.  Returns the lengths.

        `destinations` are places in the store's own pool.
        """
        layout = self.layout
        ids = torch.tensor(pages, dtype=torch.int64)
        to = None if destinations is None else self.far(destinations)
        lengths = self.layer.encode(ids.to(index), to)
        want = torch.zeros_like(lengths)
        for item, page in enumerate(pages):
            if refused is not None and refused[item]:
                continue
            k, v = reference.decode_pages(self.want, torch.tensor([page]))
            spans, nbytes = reference.encode_pages(k, v, layout)
            places = self.want.places[page]
            for span in range(layout.spans):
                if destinations is not None:
                    places[span, 0] = destinations[item, span]
                at, n = int(places[span, 0]) * SPAN_ALIGNMENT, int(nbytes[0, span])
                self.want.pool[at : at + n] = spans[0, span, :n]
                places[span, 1] = n
            self.want_state.sealed[page] = 1
            self.want_state.claimed[page] = item + 1
            want[item] = nbytes[0].to(torch.int32)
        assert torch.equal(lengths, want)
        self.check()
        return lengths

    def decode(self, pages: Sequence[int], index: torch.dtype = torch.int64) -> None:
        """Decode; every bit as the reference does, and nothing is written."""
        k, v = self.layer.decode_pages(torch.tensor(pages).to(index))
        want_k, want_v = reference.decode_pages(self.want, torch.tensor(pages))
        assert same_bits(k, want_k)
        assert same_bits(v, want_v)
        self.check()

    def clear(self, pages: Sequence[int], index: torch.dtype = torch.int64) -> None:
        """Clear; ids out of range are left out by the reference."""
        self.layer.clear(torch.tensor(pages).to(index))
        inside = [page for page in pages if 0 <= page < self.store.num_pages]
        writing.clear(self.want, self.want_state, torch.tensor(inside, dtype=torch.int64))
        self.check()

    def refuses(self, **counts: int) -> None:
        """What was refused since the last check, by name, and nothing else."""
        got = {
            refusal.name: n
            for refusal, n in zip(Refusal, self.store._refused.tolist(), strict=True)
            if n
        }
        assert got == counts
        self.store._refused.zero_()

    # ---- what must be the case after -----------------------------------------------------------
    def check(self) -> None:
        """All tensors of the stores are the same, bit for bit."""
        where = torch.nonzero(self.store.pool != self.expected.pool).flatten()
        assert not len(where), f"{len(where)} bytes of the pool differ, the first at {where[0]}"
        places = self.expected.places.clone()
        places[..., 0] = self.far(places[..., 0])
        assert torch.equal(self.store.places, places)
        for name in ("_written", "_sealed", "_claimed"):
            assert torch.equal(getattr(self.store, name), getattr(self.expected, name)), name

    def far(self, start: Tensor) -> Tensor:
        """Starts of spans in the expected store's pool, as the kernels have them."""
        return ((start.long() & 0xFFFFFFFF) + self.pool_at // SPAN_ALIGNMENT).to(torch.int32)


def distinct_rows(rows: int, heads: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[rows, heads, head_dim] K and V of random bits: no two values are alike but by chance."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 16, (2, rows, heads, head_dim), generator=generator)
    k, v = (from_patterns(x) for x in bits)
    return k, v
