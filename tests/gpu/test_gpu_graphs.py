"""CUDA graphs: captured once, replayed while slots, page ids, places and states change in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from bits import from_patterns, mixed_values
from gpu.gpu_store import DEVICE, assert_holds, assert_same_bits, nan, slots_of
from store.small_store import NAN

from zf_cute import KVShape, PageStore, launch, reference

pytestmark = pytest.mark.gpu

SHAPE = KVShape(1, 2, 2, 64, heads_per_span=1)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Graph of some work, captured on a stream of its own; an empty one is an error."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Gg]raph is empty.*")
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            work()
    return graph


def load_kernels(make: Callable) -> None:
    """Run every variant once: a kernel's code goes to the GPU at its first launch."""
    store = make(SHAPE, 1)
    x = torch.zeros(16, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    for index in (torch.int32, torch.int64):
        page = torch.zeros(1, dtype=index, device=DEVICE)
        store.append(0, x, x, torch.arange(16, dtype=index, device=DEVICE))
        store.seal(0, page)
        store.read(0, page)
        store.clear(0, page)


class Sequences:
    """Sequences that grow a token a step: their pages, and what these hold, kept on the host."""

    def __init__(self, lengths: list[int], num_pages: int) -> None:
        """Sequences of these lengths, their tokens still to be appended."""
        self.free = torch.randperm(num_pages).tolist()
        self.pages: list[list[int]] = [[] for _ in lengths]
        self.lengths = [0 for _ in lengths]
        patterns = torch.full((num_pages, 16, 2, 64), NAN)
        self.k, self.v = from_patterns(patterns), from_patterns(patterns)
        self.first = [
            slot for i, n in enumerate(lengths) for slot in (self.grow(i) for _ in range(n))
        ]

    def grow(self, sequence: int) -> int:
        """Slot of a sequence's next token."""
        page, offset = divmod(self.lengths[sequence], 16)
        if page == len(self.pages[sequence]):
            self.pages[sequence].append(self.free.pop())
        self.lengths[sequence] += 1
        return self.pages[sequence][page] * 16 + offset

    def write(self, slots: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep what was appended."""
        self.k.view(-1, 2, 64)[slots], self.v.view(-1, 2, 64)[slots] = k, v

    def full_pages(self) -> list[int]:
        """Pages that take no more tokens."""
        both = zip(self.pages, self.lengths, strict=True)
        return [page for pages, length in both for page in pages[: length // 16]]


def test_decode_steps_with_seals_and_moves_between_replays(made: Callable) -> None:
    """One graph appends a token to each sequence and reads pages, one seals two pages.

    Between replays sequences enter new pages, full pages are sealed, one in place and one to the
    home of a free page, and a sequence ends: its pages are cleared and used by others.  Every
    output is NaN before every replay.
    """
    load_kernels(made)
    store: PageStore = made(SHAPE, 40)
    kv, state = store.layer(0), store.state(0)
    sequences = Sequences([0, 5, 13], 40)
    k, v = (mixed_values((256, 2, 64), seed) for seed in (1, 2))
    first = len(sequences.first)
    store.append(
        0, k[:first].to(DEVICE), v[:first].to(DEVICE), torch.tensor(sequences.first, device=DEVICE)
    )
    sequences.write(sequences.first, k[:first], v[:first])

    step_k, step_v = nan(3, 2, 64), nan(3, 2, 64)
    slots = torch.full((3,), -1, dtype=torch.int64, device=DEVICE)
    ids = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    out_k, out_v = nan(6, 16, 2, 64), nan(6, 16, 2, 64)
    sealing = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    to = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((2, 2), -1, dtype=torch.int32, device=DEVICE)

    def decode_step() -> None:
        launch.append(kv, state, step_k, step_v, slots)
        launch.decode_pages(kv, state, ids, k=out_k, v=out_v)

    def seal_two() -> None:
        launch.encode(kv, state, sealing, destinations=to, lengths=lengths)

    before = store.pool.clone()
    step, seal = captured(decode_step), captured(seal_two)
    torch.cuda.synchronize()
    assert torch.equal(store.pool, before), "capturing has run something"
    assert (lengths == -1).all()
    assert out_k.isnan().all()

    used, sealed, moved = first, set(), 0
    for number in range(60):
        growing = [sequences.grow(i) for i in range(3)]
        rows = slice(used, used + 3)
        used += 3
        sequences.write(growing, k[rows], v[rows])
        last = [pages[-1] for pages in sequences.pages]
        full = sequences.full_pages()
        others = [full[number % len(full)], full[-1]] if full else [last[0], last[1]]
        read = [*last, *others, sequences.free[0]]
        step_k.copy_(k[rows])
        step_v.copy_(v[rows])
        slots.copy_(torch.tensor(growing))
        ids.copy_(torch.tensor(read))
        out_k.fill_(torch.nan)
        out_v.fill_(torch.nan)
        step.replay()
        # The last page read is free: it may hold what another sequence left there.
        for name, got, want in (("k", out_k, sequences.k), ("v", out_v, sequences.v)):
            assert_same_bits(got[:5], want[read[:5]], f"{name} of step {number}, pages {read[:5]}")

        ready = [page for page in full if page not in sealed][:2]
        if len(ready) == 2:
            home = sequences.free.pop(0)  # never to be used again: a page has moved there
            sealing.copy_(torch.tensor(ready))
            to[0] = state.homes[ready[0], :, 0]
            to[1] = state.homes[home, :, 0]
            lengths.fill_(-1)
            seal.replay()
            _, want = reference.encode_pages(sequences.k[ready], sequences.v[ready], SHAPE.layout)
            assert_same_bits(lengths, want.int(), f"lengths of pages {ready} after step {number}")
            assert torch.equal(kv.places[ready, :, 0], to)
            sealed.update(ready)
            moved += 1
        if number == 35:  # a sequence ends, and another begins
            gone, sequences.pages[1] = sequences.pages[1], []
            sequences.lengths[1] = 0
            store.clear(0, torch.tensor(gone, device=DEVICE))
            sequences.free += gone
            sealed -= set(gone)
            # Their slots still hold the old tokens; what is compared here is NaN.
            nans = from_patterns(torch.full((len(gone), 16, 2, 64), NAN))
            sequences.k[gone], sequences.v[gone] = nans, nans
            homes = store.pool.view(40, 2, -1)[:, :, SHAPE.layout.metadata_bytes :]
            for page in gone:
                homes[page].view(torch.int16).fill_(NAN)
    assert moved >= 4
    held = [page for pages in sequences.pages for page in pages]
    assert_holds(
        store,
        0,
        torch.tensor(held),
        sequences.k[held].flatten(0, 1),
        sequences.v[held].flatten(0, 1),
    )


def test_the_store_itself_is_captured(made: Callable) -> None:
    """A PageStore's append, seal and read in one graph; outputs come from the graph's pool."""
    load_kernels(made)
    store: PageStore = made(SHAPE, 8)
    k, v = nan(16, 2, 64), nan(16, 2, 64)
    slots = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    page = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out: list[torch.Tensor] = []

    def work() -> None:
        store.append(0, k, v, slots)
        out.append(store.seal(0, page))
        out.extend(store.read(0, page))

    graph = captured(work)
    for number, target in enumerate((5, 0, 7)):
        new = [mixed_values((16, 2, 64), 10 * number + i) for i in range(2)]
        k.copy_(new[0])
        v.copy_(new[1])
        page.fill_(target)
        slots.copy_(torch.arange(16) + 16 * target)
        out[0].fill_(-1)
        out[1].fill_(torch.nan)
        out[2].fill_(torch.nan)
        graph.replay()
        assert out[0].tolist() == store.page_bytes(0, target).tolist()
        assert_same_bits(out[1], new[0], f"k of replay {number}")
        assert_same_bits(out[2], new[1], f"v of replay {number}")
    assert store.is_sealed(0, range(8)).tolist() == [p in (0, 5, 7) for p in range(8)]


def test_clear_is_captured(made: Callable) -> None:
    """Pages change with the ids, replay by replay."""
    load_kernels(made)
    store: PageStore = made(SHAPE, 8)
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    graph = captured(lambda: store.clear(0, ids))
    k, v = (mixed_values((128, 2, 64), seed) for seed in (1, 2))
    store.append(0, k.to(DEVICE), v.to(DEVICE), slots_of(torch.arange(8, device=DEVICE), 16))
    store.seal(0, torch.arange(8, device=DEVICE))
    for pages in ((3, 6), (0, 7)):
        ids.copy_(torch.tensor(pages))
        graph.replay()
    left = [1, 2, 4, 5]
    assert store.is_sealed(0, range(8)).tolist() == [p in left for p in range(8)]
    assert_holds(
        store,
        0,
        torch.tensor(left),
        k.view(8, 16, 2, 64)[left].flatten(0, 1),
        v.view(8, 16, 2, 64)[left].flatten(0, 1),
    )
