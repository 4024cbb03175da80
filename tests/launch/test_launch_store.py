"""PageStore over what stands in for kernels: backends, page ids, counts of refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from bits import same_bits
from store.small_store import (
    PAGES,
    SHAPE,
    assert_holds,
    assert_unchanged,
    fill,
    poisoned,
    snapshot,
    tokens,
)

from zf_cute import ArgumentError, PageStateError, PageStore, UnsupportedError, launch, operators
from zf_cute import store as store_module
from zf_cute.kernels.refusals import Refusal

CUDA = torch.device("cuda:0")


# ---- which backend -----------------------------------------------------------------------------
def test_cpu_stores_are_of_the_reference() -> None:
    for backend in ("auto", "reference"):
        assert PageStore(SHAPE, 1, backend=backend).backend == "reference"
    assert PageStore(SHAPE, 1).backend == "reference"
    with pytest.raises(UnsupportedError) as caught:
        PageStore(SHAPE, 1, backend="kernels")
    assert str(caught.value) == (
        "backend='kernels': the kernels run on CUDA devices, not on cpu. Use 'auto' or 'reference'."
    )


@pytest.mark.parametrize("backend", ["cuda", "Auto", "", None, 1, torch])
def test_unknown_backends(backend: object) -> None:
    with pytest.raises(UnsupportedError, match="choose 'auto', 'kernels' or 'reference'"):
        PageStore(SHAPE, 1, backend=backend)


def test_backends_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run they are chosen; elsewhere "auto" falls back and "kernels" says why not."""
    monkeypatch.setattr(launch, "unsupported", lambda device: None)
    chosen = [store_module._choose(name, CUDA) for name in ("auto", "kernels", "reference")]
    assert chosen == ["kernels", "kernels", "reference"]
    assert store_module._choose("auto", torch.device("cpu")) == "reference"
    monkeypatch.setattr(launch, "unsupported", lambda device: "some GPU is SM80")
    assert store_module._choose("auto", CUDA) == "reference"
    assert store_module._choose("reference", CUDA) == "reference"
    with pytest.raises(UnsupportedError, match=r"backend='kernels': some GPU is SM80\. Use 'auto'"):
        store_module._choose("kernels", CUDA)


def test_operators_are_called_while_torch_compile_traces(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store._kernels is launch
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert store._kernels is operators


# ---- the same as the reference -----------------------------------------------------------------
def test_the_life_of_pages(store: PageStore) -> None:
    """Appended, sealed, read, cleared and filled again: both backends hold the same."""
    other = poisoned(PageStore(SHAPE, PAGES, backend="reference"))
    for each in (store, other):
        fill(each, 1, range(PAGES), 1)
        each.seal(1, torch.tensor([4, 0, 3]))
        each.clear(1, [3, 5])
        fill(each, 1, [3], 2)
        each.check()
    assert torch.equal(store.places, other.places)
    assert store.seal(1, [1, 3]).tolist() == other.seal(1, [1, 3]).tolist()
    for got, want in zip(store.read(1, range(5)), other.read(1, range(5)), strict=True):
        assert same_bits(got, want)
    for name in ("page_bytes", "is_sealed", "descriptors"):
        ours, theirs = (getattr(x, name)(1, torch.arange(PAGES)) for x in (store, other))
        assert torch.equal(ours, theirs)


# ---- page ids ----------------------------------------------------------------------------------
PAGE_CALLS = ["seal", "clear", "read", "descriptors", "page_bytes", "is_sealed"]


@pytest.mark.parametrize("call", PAGE_CALLS)
@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([2, PAGES], r"page 6 is outside 0\.\.5 of layer 0"),
        ((2, -1), r"page -1 is outside 0\.\.5"),
        (PAGES, "page 6 is outside"),
        (np.arange(4, 8), "page 6 is outside"),
        ([10**30], "page 1000000000000000000000000000000 is outside"),
        ([2, True], "pages must be ints"),
        ([2.0], "pages must be ints"),
        ("2", "pages must be ints"),
        (torch.tensor([2], dtype=torch.int16), "pages is torch.int16; int32 or int64"),
        (torch.tensor([2.0]), "pages is torch.float32; int32 or int64"),
    ],
)
def test_ids_on_the_host_are_checked_there(
    used: PageStore, call: str, pages: object, message: str
) -> None:
    """Lists, ints and arrays: looking at them waits for no kernel, so they raise at once."""
    before = snapshot(used)
    with pytest.raises(ArgumentError, match=message):
        getattr(used, call)(0, pages)
    assert_unchanged(used, before)


@pytest.mark.parametrize("kind", [list, tuple, np.array, iter])
def test_an_id_twice_in_a_list_is_refused_on_the_host(used: PageStore, kind: Callable) -> None:
    """Also of an iterator, which can be looked at only once."""
    before = snapshot(used)
    with pytest.raises(ArgumentError, match="pages holds 2 more than once"):
        used.seal(0, kind([2, 4, 2]))
    assert_unchanged(used, before)


@pytest.fixture
def given(used: PageStore, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Ids that reach the kernels."""
    seen: list[torch.Tensor] = []

    def noting(name: str) -> Callable:
        function = getattr(launch, name)

        def call(kv: object, *args: object, **options: object) -> object:
            seen.append(args[-1])
            return function(kv, *args, **options)

        return call

    for name in ("encode", "decode_pages", "clear"):
        monkeypatch.setattr(launch, name, noting(name))
    return seen


def test_ids_on_the_device_are_passed_on_as_they_are(
    used: PageStore, given: list[torch.Tensor]
) -> None:
    """Not copied, not converted, not looked at: the kernels see the caller's own memory."""
    ids = torch.tensor([2, 99, 2], dtype=torch.int32)
    sizes = used.seal(0, ids)
    used.read(0, ids)
    used.clear(0, ids[1:])
    assert [x.data_ptr() for x in given] == [ids.data_ptr(), ids.data_ptr(), ids[1:].data_ptr()]
    assert {x.dtype for x in given} == {torch.int32}
    # What is wrong with them is counted, and nothing is returned for it.
    assert sizes[1:].tolist() == [0, 0]
    assert sizes[0] > 0
    with pytest.raises(PageStateError, match=r"refused 3 page ids out of range; 1 pages to seal"):
        used.check()


def test_ids_of_every_kind_reach_the_kernels_as_a_row(
    used: PageStore, given: list[torch.Tensor]
) -> None:
    kinds = (
        2,
        [2],
        (page for page in [2]),
        np.array([2]),
        np.int64(2),
        torch.tensor(2),
        torch.tensor([[2]]),
        torch.tensor([2], dtype=torch.int32),
    )
    for ids in kinds:
        used.read(0, ids)
    for x in given:
        assert x.tolist() == [2]
        assert x.dtype in (torch.int32, torch.int64)


def test_ids_on_another_device_are_checked_and_brought(
    used: PageStore, given: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying them waits anyway.  The CPU by another name is the other device here."""
    monkeypatch.setattr(used, "device", torch.device("cpu:0"))
    assert torch.tensor([2]).device != used.device
    ids = torch.tensor([2, 1], dtype=torch.int32)
    used.read(0, ids)
    assert given[-1].tolist() == [2, 1]
    for call in PAGE_CALLS:
        with pytest.raises(ArgumentError, match=r"page 6 is outside 0\.\.5 of layer 0"):
            getattr(used, call)(0, torch.tensor([2, 6]))
    assert len(given) == 1
    used.check()


def test_an_id_twice_on_another_device_is_refused_on_the_host(
    used: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a list: the ids are copied, so looking at them waits for nothing more."""
    monkeypatch.setattr(used, "device", torch.device("cpu:0"))
    before = snapshot(used)
    for ids in (torch.tensor([2, 4, 2]), torch.tensor([[2, 2]], dtype=torch.int32)):
        with pytest.raises(ArgumentError, match="pages holds 2 more than once"):
            used.seal(0, ids)
    assert_unchanged(used, before)
    used.check()
    assert used.seal(0, torch.tensor([2])).item() > 0


def test_no_pages_at_all(used: PageStore) -> None:
    """Of no type: an empty list is one of ids."""
    before = snapshot(used)
    for none in ([], (), torch.empty(0, dtype=torch.int32)):
        assert used.seal(0, none).shape == (0,)
        assert used.read(0, none)[0].shape == (0, 2, 64)
        assert used.is_sealed(0, none).shape == used.page_bytes(0, none).shape == (0,)
        used.clear(0, none)
    assert_unchanged(used, before)


@pytest.mark.parametrize("call", ["descriptors", "page_bytes", "is_sealed"])
@pytest.mark.parametrize("page", [PAGES, -1, 1 << 32])
def test_questions_look_at_ids_on_the_device(used: PageStore, call: str, page: int) -> None:
    """No kernel answers them, so that none would count a wrong id: -1 is not the last page."""
    with pytest.raises(ArgumentError, match=rf"page {page} is outside 0\.\.5 of layer 0"):
        getattr(used, call)(0, torch.tensor([2, page]))
    used.check()


@pytest.mark.parametrize("layer", [-1, 2, True, 0.0, "0", None])
def test_layers_are_checked_on_the_host(used: PageStore, layer: object) -> None:
    k, v = tokens(1, 3)
    before = snapshot(used)
    for call in (
        lambda: used.append(layer, k, v, torch.tensor([64])),
        lambda: used.seal(layer, torch.tensor([2])),
        lambda: used.read(layer, torch.tensor([2])),
        lambda: used.clear(layer, torch.tensor([2])),
        lambda: used.layer(layer),
        lambda: used.state(layer),
    ):
        with pytest.raises(ArgumentError, match="layer="):
            call()
    assert_unchanged(used, before)


# ---- what is refused ---------------------------------------------------------------------------
def test_what_kernels_refuse_is_raised_by_check(used: PageStore) -> None:
    """Every kind, counted; the rest of each call is done."""
    k, v = tokens(5, 3)
    used.append(0, k, v, torch.tensor([96, 3, -1, 70, 19]))
    assert used.seal(0, torch.tensor([0, 2, 5, 6])).gt(0).tolist() == [False, True, False, False]
    used.pool.view(2, PAGES, -1)[0, 1, 4] = 254
    got = used.read(0, torch.tensor([1, -1, 2]))
    assert (got[0][16:32].view(torch.int16) == 0).all()
    used.clear(0, torch.tensor([1, 1 << 40]))
    with pytest.raises(PageStateError) as caught:
        used.check()
    assert str(caught.value) == (
        "the kernels refused 1 rows with a slot out of range (-1 skips a row); "
        "2 rows with a slot in a sealed page; 3 page ids out of range; "
        "2 pages to seal that are not full, sealed already or given twice; "
        "1 parts of pages whose bytes no writer makes: nothing was written there, and what was "
        "read is zeros"
    )
    used.check()  # counted anew
    assert_holds(used, 0, torch.tensor([70]), k[3:4], v[3:4])


@pytest.mark.parametrize("refusal", list(Refusal))
def test_each_refusal_has_words(used: PageStore, refusal: Refusal) -> None:
    used._refused[refusal] = 7
    with pytest.raises(
        PageStateError, match=r"^the kernels refused 7 [\w ,()-]+: nothing was written there"
    ):
        used.check()
    assert not used._refused.any()
    used.check()


def test_destinations_are_raised_for_by_check(used: PageStore) -> None:
    """Direct launches on a store's pages count in the store."""
    to = torch.full((1, 1), -1, dtype=torch.int32)
    ids = torch.tensor([2])
    assert not launch.encode(used.layer(0), used.state(0), ids, destinations=to).any()
    with pytest.raises(
        PageStateError, match="refused 1 pages to seal with a destination outside the pool: noth"
    ):
        used.check()
    assert not used.is_sealed(0, 2).any()


def test_layers_count_together(used: PageStore) -> None:
    """One count for the store: `check` looks at it once, whatever layers refused."""
    assert used.state(0).refused is used.state(1).refused
    used.seal(1, torch.tensor([0]))
    used.seal(0, torch.tensor([0]))
    with pytest.raises(PageStateError, match="refused 2 pages to seal"):
        used.check()


def test_the_reference_has_nothing_to_check() -> None:
    """It raises at once instead, and counts nothing."""
    store = PageStore(SHAPE, PAGES)
    fill(store, 0, [0], 1)
    for call in (lambda: store.seal(0, [1]), lambda: store.seal(0, [9])):
        with pytest.raises((PageStateError, ArgumentError)):
            call()
    assert not store._refused.any()
    store.check()


@pytest.mark.parametrize(
    "through", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy]
)
def test_a_copied_store_is_of_one_piece(used: PageStore, through: Callable) -> None:
    """Kernels write through the layers' views: into the tensors that the store looks at."""
    made = through(used)
    assert made.backend == "kernels"
    k, v = fill(made, 0, [4], 41)
    assert made.seal(0, torch.tensor([4, 2, 2])).gt(0).tolist() == [True, True, False]
    assert made.is_sealed(0, range(PAGES)).tolist() == [True, True, True, False, True, False]
    assert torch.equal(made.places[0, :, 0, 1], made.layer(0).places[:, 0, 1])
    assert made.page_bytes(0, 4).item() < SHAPE.layout.raw_span_bytes
    assert_holds(made, 0, 64 + torch.arange(16), k, v)
    with pytest.raises(PageStateError, match="refused 1 pages to seal"):
        made.check()
    made.clear(0, torch.tensor([0]))
    assert not made.is_sealed(0, 0).any()
    shared = made.pool.data_ptr() == used.pool.data_ptr()
    assert used.is_sealed(0, 4).item() == shared  # only a shallow copy is the same store


def test_a_view_of_a_layer_is_made_once(store: PageStore) -> None:
    """Calls cost no construction: `layer` and `state` return the same objects each time."""
    assert store.layer(1) is store.layer(1)
    assert store.state(1) is store.state(1)
    assert store.state(1).layer == 1
    assert store.state(1).written.data_ptr() == store._written[1].data_ptr()
