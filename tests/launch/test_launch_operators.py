"""The torch operators without a GPU: schemas, fakes, tracing, and what importing them needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bits import mixed_values, same_bits
from store.small_store import assert_unchanged, poisoned, snapshot
from torch import Tensor
from torch._subclasses import FakeTensorMode

from zf_cute import KVShape, PageStateError, PageStore, launch, operators
from zf_cute.kernels.refusals import Refusal

ROOT = Path(__file__).parents[2]
SHAPE = KVShape(1, 2, 2, 64, heads_per_span=1)
LAYOUT = (2, 64, 16, "half", 4, 1)
STATE = ("written", "sealed", "claimed", "homes", "refused")


@pytest.fixture
def store(cpu_operators: None) -> PageStore:
    """Eight pages of two spans, of which 6, 1, 0 and 3 are full."""
    store = poisoned(PageStore(SHAPE, 8, backend="kernels"))
    store.append(0, *values(), slots_of(IDS))
    return store


IDS = torch.tensor([6, 1, 0, 3])


def slots_of(ids: Tensor) -> Tensor:
    """Every slot of some pages."""
    return (ids[:, None] * 16 + torch.arange(16)).flatten()


def values() -> tuple[Tensor, Tensor]:
    """K and V of four pages, without NaN: opcheck takes that for a difference."""
    return mixed_values((64, 2, 64), 1, raw=False), mixed_values((64, 2, 64), 2, raw=False)


def state_args(store: PageStore) -> tuple[Tensor, ...]:
    """The tensors of layer 0 as operators take them."""
    state = store.state(0)
    return store.pool, store.places[0], *(getattr(state, name) for name in STATE)


# ---- schemas and fakes -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("op", "changed", "returns"),
    [
        ("append", {"pool", "written", "refused"}, []),
        ("encode", {"pool", "places", "sealed", "claimed", "refused"}, ["Tensor"]),
        ("decode_pages", {"refused"}, ["Tensor", "Tensor"]),
        ("clear", {"pool", "places", "written", "sealed", "claimed", "refused"}, []),
    ],
)
def test_schemas(op: str, changed: set[str], returns: list[str]) -> None:
    """What an operator may change is marked, and nothing it returns is a view of what it takes.

    The layout's numbers come last, so that no call has to name them.
    """
    schema = getattr(torch.ops.zf_cute, op).default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == changed
    assert [str(r.type) for r in schema.returns] == returns
    assert all(r.alias_info is None for r in schema.returns)
    names = [a.name for a in schema.arguments]
    assert names[:7] == ["pool", "places", *STATE]
    assert names[-6:] == list(SHAPE.layout.__dataclass_fields__)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_fakes(index: torch.dtype) -> None:
    """Shapes, dtypes and devices of what comes back, for CUDA tensors that are nowhere."""
    with FakeTensorMode():
        pages = torch.empty(3, dtype=index, device="cuda")
        places = torch.empty(8, 2, 2, dtype=torch.int32, device="cuda")
        pool = torch.empty(8 * SHAPE.layout.page_stride, dtype=torch.uint8, device="cuda")
        state = (
            torch.empty(8, dtype=torch.int64, device="cuda"),
            torch.empty(8, 2, dtype=torch.int32, device="cuda"),
            torch.empty(8, dtype=torch.int32, device="cuda"),
            places.clone(),
            torch.empty(len(Refusal), dtype=torch.int32, device="cuda"),
        )
        x = torch.empty(7, 2, 64, dtype=torch.bfloat16, device="cuda")
        slots = torch.empty(7, dtype=index, device="cuda")
        ops = torch.ops.zf_cute
        assert ops.append(pool, places, *state, x, x, slots, *LAYOUT) is None
        assert ops.clear(pool, places, *state, pages, *LAYOUT) is None
        for destinations in (None, places[:3, :, 0].contiguous()):
            lengths = ops.encode(pool, places, *state, pages, destinations, *LAYOUT)
            assert (tuple(lengths.shape), lengths.dtype) == ((3, 2), torch.int32)
            assert lengths.device == pool.device
        k, v = ops.decode_pages(pool, places, *state, pages, *LAYOUT)
        for out in (k, v):
            assert (tuple(out.shape), out.dtype) == ((3, 16, 2, 64), torch.bfloat16)
            assert out.device == pool.device
            assert out.is_contiguous()


def test_layouts_pass_through() -> None:
    """Six numbers say all of a layout, and the same numbers give the same object."""
    for shape in (
        SHAPE,
        KVShape(1, 12, 12, 256, 64, "interleaved", 0),
        KVShape(3, 40, 8, 128, 32, "half", 2, 4),
    ):
        args = operators._layout_args(shape.layout)
        assert operators._layout(*args) == shape.layout
        assert operators._layout(*args) is operators._layout(*args)


@pytest.mark.parametrize("op", ["append", "encode", "encode_to", "decode_pages", "clear"])
def test_opcheck(store: PageStore, op: str) -> None:
    """Torch's own check of schema, fake and tracing, also with shapes that are symbols."""
    k, v = values()
    store.seal(0, IDS[3:])
    args: dict[str, tuple] = {
        "append": (*state_args(store), k[:40], v[:40], slots_of(IDS)[:40]),
        "encode": (*state_args(store), IDS[:3], None),
        "encode_to": (
            *state_args(store),
            IDS[:3],
            store.state(0).homes[[2, 4, 5], :, 0].contiguous(),
        ),
        "decode_pages": (*state_args(store), IDS),
        "clear": (*state_args(store), IDS),
    }
    before = snapshot(store)
    overload = getattr(torch.ops.zf_cute, op.removesuffix("_to")).default
    torch.library.opcheck(overload, (*args[op], *LAYOUT))
    assert_unchanged(store, before)


# ---- calls -------------------------------------------------------------------------------------
def test_operators_take_what_launches_take(cpu_operators: None) -> None:
    """The same calls on two stores leave the same bytes, and return the same."""
    k, v = values()
    stores = [poisoned(PageStore(SHAPE, 8, backend="kernels")) for _ in range(2)]
    returned = []
    for call, store in zip((launch, operators), stores, strict=True):
        kv, state = store.layer(0), store.state(0)
        call.append(kv, state, k, v, slots_of(IDS))
        to = state.homes[[2, 4], :, 0].contiguous()
        returned.append(
            [
                call.encode(kv, state, IDS[:2]),
                call.encode(kv, state, IDS[2:], destinations=to),
                *call.decode_pages(kv, state, IDS),
                *call.decode_pages(kv, state, IDS + 8),
            ]
        )
        call.clear(kv, state, IDS[1:3])
    for ours, theirs in zip(*returned, strict=True):
        assert torch.equal(ours, theirs)
    assert_unchanged(stores[1], snapshot(stores[0]))
    with pytest.raises(PageStateError, match="refused 4 page ids out of range"):
        stores[1].check()


def test_a_compiled_step_of_a_store(store: PageStore) -> None:
    """A PageStore's append, seal, read and clear in one graph of torch.compile, without a break."""
    k, v = values()

    def step(slots: Tensor, full: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        store.append(0, k, v, slots - 1)
        sizes = store.seal(0, full - 1)
        got_k, got_v = store.read(0, ids - 1)
        store.clear(0, full - 1)
        return got_k, got_v, sizes + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for order in (IDS, IDS.flip(0)):
        got_k, got_v, sizes = compiled(slots_of(order) + 1, order[:2] + 1, order.flip(0) + 1)
        for got, want in ((got_k, k), (got_v, v)):
            assert same_bits(got, want.view(4, 16, 2, 64).flip(0).flatten(0, 1))
        assert (sizes > 1).all()
        assert not store.is_sealed(0, range(8)).any()
        assert (store.state(0).written[order] != 0).tolist() == [False, False, True, True]
    store.check()


# ---- what must be installed --------------------------------------------------------------------
def test_imports_without_the_compiler() -> None:
    """Without cutlass and TVM-FFI a store works on the CPU, and says what kernels would need."""
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "layouts")!r}]
sys.modules["cutlass"] = sys.modules["tvm_ffi"] = None
import torch, zf_cute
from zf_cute import launch, operators
store = zf_cute.PageStore(zf_cute.KVShape(1, 2, 2, 64), 2)
x = torch.ones(16, 2, 64, dtype=torch.bfloat16)
store.append(0, x, x, torch.arange(16))
store.seal(0, [0])
assert torch.equal(store.read(0, 0)[0], x)
torch.cuda.get_device_capability = lambda device: (9, 0)
print(launch.unsupported(torch.device("cuda:0")))
print(torch.ops.zf_cute.append.default._schema.name)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    reason, name = run.stdout.splitlines()
    assert "cutlass" in reason
    assert "doctor" in reason
    assert name == "zf_cute::append"
