"""PageStore: any sequence of operations against a dictionary of tokens."""

from __future__ import annotations

import dataclasses
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from bits import (
    same_bits,
)
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store.small_store import (
    PAGE,
    assert_unchanged,
    poisoned,
    snapshot,
    tokens,
)

from zf_cute import (
    KVShape,
    PageStateError,
    PageStore,
)


# ---- any sequence of operations ----------------------------------------------------------------
class AnySequence(RuleBasedStateMachine):
    """Random appends, seals, clears and reads against a dictionary of tokens."""

    shape = KVShape(2, 2, 2, 64, heads_per_span=1)
    pages = 3

    @initialize()
    def start(self) -> None:
        """Begin with an empty store over NaN."""
        self.store = poisoned(PageStore(self.shape, self.pages))
        self.held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.sealed: set[tuple[int, int]] = set()
        self.seed = 0

    def _count(self, layer: int, page: int) -> int:
        return sum((layer, page * PAGE + t) in self.held for t in range(PAGE))

    def _full(self) -> list[tuple[int, int]]:
        every = product(range(2), range(self.pages))
        return [at for at in every if self._count(*at) == PAGE and at not in self.sealed]

    @rule(layer=st.integers(0, 1), data=st.data(), whole=st.booleans())
    def append(self, layer: int, data: st.DataObject, whole: bool) -> None:
        """A whole page, or some slots of any pages, a few of them skipped."""
        if whole:
            page = data.draw(st.integers(0, self.pages - 1))
            slots = [page * PAGE + t for t in data.draw(st.permutations(range(PAGE)))]
        else:
            one = st.integers(0, self.pages * PAGE - 1)
            slots = data.draw(st.lists(one, max_size=20, unique=True))
            slots += [-1] * data.draw(st.integers(0, 2))
        self.seed += 1
        k, v = tokens(len(slots), self.seed)
        written = torch.tensor(slots, dtype=torch.int32)
        if any((layer, slot // PAGE) in self.sealed for slot in slots if slot >= 0):
            before = snapshot(self.store)
            with pytest.raises(PageStateError):
                self.store.append(layer, k, v, written)
            assert_unchanged(self.store, before)
            return
        self.store.append(layer, k, v, written)
        for i, slot in enumerate(slots):
            if slot >= 0:
                self.held[layer, slot] = k[i], v[i]

    @precondition(lambda self: self._full())
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """Some of the full pages of a layer."""
        layer, _ = data.draw(st.sampled_from(self._full()))
        full = [page for at, page in self._full() if at == layer]
        pages = data.draw(st.lists(st.sampled_from(full), min_size=1, unique=True))
        self.store.seal(layer, pages)
        self.sealed |= {(layer, p) for p in pages}

    @rule(layer=st.integers(0, 1), page=st.integers(0, 2))
    def seal_one_that_may_not_be(self, layer: int, page: int) -> None:
        """A page that is partial or sealed is refused."""
        if (layer, page) in self._full():
            return
        before = snapshot(self.store)
        with pytest.raises(PageStateError):
            self.store.seal(layer, page)
        assert_unchanged(self.store, before)

    @rule(layer=st.integers(0, 1), pages=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def clear(self, layer: int, pages: list[int]) -> None:
        """Any pages."""
        self.store.clear(layer, pages)
        for page in pages:
            self.sealed.discard((layer, page))
            for t in range(PAGE):
                self.held.pop((layer, page * PAGE + t), None)

    @invariant()
    def everything_reads_back(self) -> None:
        """All tokens of all layers, and the states."""
        for layer in range(2):
            sealed = [(layer, page) in self.sealed for page in range(self.pages)]
            assert self.store.is_sealed(layer, range(self.pages)).tolist() == sealed
            got_k, got_v = self.store.read(layer, range(self.pages))
            mine = [slot for at, slot in self.held if at == layer]
            if mine:
                assert same_bits(got_k[mine], torch.stack([self.held[layer, s][0] for s in mine]))
                assert same_bits(got_v[mine], torch.stack([self.held[layer, s][1] for s in mine]))


AnySequence.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestAnySequence = AnySequence.TestCase


def test_a_changed_shape_chooses_its_own_heads_per_span():
    """dataclasses.replace() must not carry over a choice made for other heads."""
    shape = dataclasses.replace(KVShape(1, 8, 8, 128), num_kv_heads=4, num_qo_heads=4)
    assert shape.layout.heads_per_span == 4
