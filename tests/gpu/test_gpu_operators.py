"""The torch operators on the device: the same as direct launches, traced, compiled and captured."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from bits import mixed_values
from gpu.gpu_store import DEVICE, assert_holds, assert_same_bits, nan, slots_of
from store.small_store import assert_unchanged, snapshot
from torch import Tensor

from zf_cute import KVShape, PageStateError, PageStore, launch, operators

pytestmark = pytest.mark.gpu

SHAPE = KVShape(1, 2, 2, 64, heads_per_span=1)
LAYOUT = (2, 64, 16, "half", 4, 1)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K and V of four pages, their ids and their slots."""
    k, v = (mixed_values((64, 2, 64), seed).to(DEVICE) for seed in (1, 2))
    ids = torch.tensor([6, 1, 0, 3], device=DEVICE)
    return k, v, ids, slots_of(ids, 16)


def state_args(store: PageStore) -> tuple[Tensor, ...]:
    """The tensors of layer 0 as operators take them."""
    state = store.state(0)
    of_pages = (state.written, state.sealed, state.claimed, state.homes)
    return store.pool, store.places[0], *of_pages, state.refused


def test_operators_do_what_launches_do(made: Callable, rows: tuple) -> None:
    """The same calls on two stores leave the same bytes, and return the same."""
    k, v, ids, slots = rows
    ours, theirs = made(SHAPE, 8), made(SHAPE, 8)
    for call, store in ((operators, ours), (launch, theirs)):
        kv, state = store.layer(0), store.state(0)
        call.append(kv, state, k, v, slots)
        to = state.homes[[2, 4], :, 0].contiguous()
        got = [
            call.encode(kv, state, ids[:2]),
            call.encode(kv, state, ids[2:], destinations=to),
            *call.decode_pages(kv, state, ids),
        ]
        call.clear(kv, state, ids[1:3])
        call.append(kv, state, v[:16], k[:16], slots[16:32])
        if store is ours:
            mine = got
    for a, b in zip(mine, got, strict=True):
        assert_same_bits(a, b, "what is returned")
    assert_unchanged(ours, snapshot(theirs))
    # Refusals are counted through operators as well.
    operators.decode_pages(ours.layer(0), ours.state(0), ids + 8)
    with pytest.raises(PageStateError, match="refused 4 page ids out of range: "):
        ours.check()


@pytest.mark.parametrize("op", ["append", "encode", "encode_to", "decode_pages", "clear"])
def test_opcheck(made: Callable, rows: tuple, op: str) -> None:
    """What an operator says it changes is what it changes, and its fake is like it.

    `test_autograd_registration` looks at nothing here: no tensor requires gradients, as none of
    these operators has any.  No value is NaN: opcheck takes that for a difference.
    """
    _, _, ids, slots = rows
    k, v = (mixed_values((64, 2, 64), seed, raw=False).to(DEVICE) for seed in (3, 4))
    store = made(SHAPE, 8)
    store.append(0, k, v, slots)
    store.seal(0, ids[3:])
    args: dict[str, tuple] = {
        "append": (*state_args(store), k[:40], v[:40], slots[:40]),
        "encode": (*state_args(store), ids[:3], None),
        "encode_to": (
            *state_args(store),
            ids[:3],
            store.state(0).homes[[2, 4, 5], :, 0].contiguous(),
        ),
        "decode_pages": (*state_args(store), ids),
        "clear": (*state_args(store), ids),
    }
    before = snapshot(store)
    overload = getattr(torch.ops.zf_cute, op.removesuffix("_to")).default
    torch.library.opcheck(overload, (*args[op], *LAYOUT))
    assert_unchanged(store, before)  # opcheck works on copies


def a_backend(name: str) -> str:
    """A backend of torch.compile that can run here."""
    if name == "inductor":
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("no C compiler in PATH (cc, gcc or clang): inductor needs one")
        if find_spec("triton") is None:
            pytest.skip("triton is not installed: inductor needs it on a GPU")
    return name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_of_a_store(made: Callable, rows: tuple, backend: str) -> None:
    """append, seal and read of a PageStore in one graph, between other operations of torch.

    These are operations on integers: torch's own on BF16 would not keep the payload of a NaN.
    """
    k, v, ids, slots = rows
    store = made(SHAPE, 8)

    def step(
        k: Tensor, v: Tensor, slots: Tensor, full: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        store.append(0, k, v, slots - 1)
        sizes = store.seal(0, full - 1)
        got_k, got_v = store.read(0, ids - 1)
        return got_k, got_v, sizes + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=a_backend(backend))
    order = ids.flip(0)
    want_k, want_v = (x.view(4, 16, 2, 64).flip(0).flatten(0, 1) for x in (k, v))
    got_k, got_v, sizes = compiled(k, v, slots + 1, ids[:2] + 1, order + 1)
    assert_same_bits(got_k, want_k, "k")
    assert_same_bits(got_v, want_v, "v")
    assert torch.equal(sizes, store.page_bytes(0, ids[:2]) + 1)
    assert store.is_sealed(0, range(8)).tolist() == [p in (6, 1) for p in range(8)]
    assert_holds(store, 0, ids, k, v)
    # Again, with other pages: the graph holds views of the store, and nothing of what is in it.
    store.clear(0, ids)
    got_k, got_v, _ = compiled(k, v, slots_of(order, 16) + 1, ids[2:] + 1, order + 1)
    assert_same_bits(got_k, k, "k of the second call")
    assert_same_bits(got_v, v, "v of the second call")
    assert store.is_sealed(0, range(8)).tolist() == [p in (0, 3) for p in range(8)]


def test_compiled_operators(made: Callable, rows: tuple) -> None:
    """Each function of `zf_cute.operators` in one graph; shapes may change without another."""
    k, v, ids, slots = rows
    store = made(SHAPE, 8)
    kv, state = store.layer(0), store.state(0)

    def life(k: Tensor, v: Tensor, slots: Tensor, ids: Tensor, to: Tensor) -> tuple[Tensor, ...]:
        operators.append(kv, state, k, v, slots)
        raw = operators.decode_pages(kv, state, ids)
        lengths = operators.encode(kv, state, ids, destinations=to)
        sealed = operators.decode_pages(kv, state, ids)
        operators.clear(kv, state, ids)
        return (*raw, *sealed, lengths)

    torch._dynamo.reset()
    compiled = torch.compile(life, fullgraph=True, backend="aot_eager", dynamic=True)
    for pages in (4, 3, 2):
        some = slice(16 * pages)
        to = state.homes[[2, 4, 5, 7][:pages], :, 0].contiguous()
        got = compiled(k[some], v[some], slots[some], ids[:pages], to)
        want = [x[some].view(pages, 16, 2, 64) for x in (k, v)]
        for name, x, y in zip(("k", "v", "sealed k", "sealed v"), got, want * 2, strict=False):
            assert_same_bits(x, y, f"{name} of {pages} pages")
        assert (got[4] > 0).all()
        assert torch.equal(store.places[0], state.homes)
        assert not state.written.any()


def test_an_operator_in_a_cuda_graph(made: Callable, rows: tuple) -> None:
    """torch.ops calls are captured and replayed like direct launches."""
    k, v, ids, slots = rows
    store = made(SHAPE, 8)
    kv, state = store.layer(0), store.state(0)
    operators.append(kv, state, k, v, slots)  # kernels are loaded
    operators.encode(kv, state, ids)
    operators.decode_pages(kv, state, ids)
    operators.clear(kv, state, ids)
    static_k, static_v, page = nan(16, 2, 64), nan(16, 2, 64), ids[:1].clone()
    where = slots[:16].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operators.append(kv, state, static_k, static_v, where)
        lengths = operators.encode(kv, state, page)
        out = operators.decode_pages(kv, state, page)
    for number in range(4):
        rows_of = slice(16 * number, 16 * number + 16)
        static_k.copy_(k[rows_of])
        static_v.copy_(v[rows_of])
        where.copy_(slots[rows_of])
        page.copy_(ids[number : number + 1])
        for x in out:
            x.fill_(torch.nan)
        lengths.fill_(-1)
        graph.replay()
        assert_same_bits(out[0].flatten(0, 1), k[rows_of], f"k of replay {number}")
        assert_same_bits(out[1].flatten(0, 1), v[rows_of], f"v of replay {number}")
        assert torch.equal(lengths, store.places[0, ids[number : number + 1], :, 1])
    assert_holds(store, 0, ids, k, v)


def test_modes_in_which_engines_call(made: Callable, rows: tuple) -> None:
    """Under inference_mode and no_grad, and with rows that require gradients."""
    k, v, ids, slots = rows
    store = made(SHAPE, 8)
    kv, state = store.layer(0), store.state(0)
    with torch.inference_mode():
        operators.append(kv, state, k[:32], v[:32], slots[:32])
        operators.encode(kv, state, ids[:1])
        got = operators.decode_pages(kv, state, ids[:2])
    assert_same_bits(got[0].flatten(0, 1), k[:32], "k")
    with torch.no_grad():
        operators.append(kv, state, k[32:].clone().requires_grad_(), v[32:], slots[32:])
    assert_holds(store, 0, ids, k, v)
