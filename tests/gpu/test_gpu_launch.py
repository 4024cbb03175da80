"""How kernels are launched: no wait, the right stream and device, no compile, little host time."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import pytest
import torch
from bits import mixed_values
from gpu.gpu_store import DEVICE, assert_holds, assert_same_bits, nan, slots_of
from store.small_store import assert_unchanged, snapshot
from torch import Tensor

from zf_cute import ArgumentError, KVShape, LayerPages, PageStore, UnsupportedError, launch
from zf_cute import compile as compiler

pytestmark = pytest.mark.gpu

SHAPE = KVShape(1, 2, 2, 64)


@pytest.fixture
def nothing_may_wait() -> Iterator[None]:
    """Torch raises for what waits for the device, from here to the end of the test."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def all_calls(store: PageStore, k: Tensor, v: Tensor, ids: Tensor) -> None:
    """Every call with tensors on the device, of the store and direct."""
    kv, state = store.layer(0), store.state(0)
    slots = slots_of(ids, 16)
    store.append(0, k, v, slots)
    store.seal(0, ids)
    store.read(0, ids)
    store.clear(0, ids)
    launch.append(kv, state, k, v, slots)
    launch.encode(kv, state, ids, destinations=state.homes[ids, :, 0].contiguous())
    launch.decode_pages(kv, state, ids)
    launch.clear(kv, state, ids)


# ---- nothing waits -----------------------------------------------------------------------------
def test_torch_sees_no_call_that_waits(made: Callable, request: pytest.FixtureRequest) -> None:
    """`set_sync_debug_mode("error")` around every call."""
    store = made(SHAPE, 8)
    k, v = (mixed_values((64, 2, 64), seed).to(DEVICE) for seed in (1, 2))
    ids = torch.tensor([6, 1, 0, 3], device=DEVICE)
    all_calls(store, k, v, ids)  # first calls compile, load and make tables
    request.getfixturevalue("nothing_may_wait")
    all_calls(store, k, v, ids)
    all_calls(store, k, v, ids.int())


def test_the_host_runs_ahead_of_the_device(made: Callable) -> None:
    """Whatever torch sees: behind half a second of work on the device, every call returns."""
    store = made(SHAPE, 8)
    k, v = (mixed_values((64, 2, 64), seed).to(DEVICE) for seed in (1, 2))
    ids = torch.tensor([6, 1, 0, 3], device=DEVICE)
    all_calls(store, k, v, ids)
    store.check()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles, at less than 2 GHz
    slept = torch.cuda.Event()
    slept.record()
    all_calls(store, k, v, ids)
    assert not slept.query(), "a call waited for the device, or all took half a second"
    torch.cuda.synchronize()


# ---- streams -----------------------------------------------------------------------------------
def test_the_current_stream_is_used(made: Callable) -> None:
    """On a side stream, rows that are there only after a long kernel are what is appended."""
    store = made(SHAPE, 8)
    values = [mixed_values((64, 2, 64), seed).to(DEVICE) for seed in (1, 2)]
    ids = torch.tensor([6, 1, 0, 3], device=DEVICE)
    all_calls(store, *values, ids)
    k, v, got = nan(64, 2, 64), nan(64, 2, 64), [nan(64, 2, 64), nan(64, 2, 64)]
    slots = torch.full((64,), -1, device=DEVICE)
    late = torch.full((4,), 7, device=DEVICE)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        k.copy_(values[0])
        v.copy_(values[1])
        late.copy_(ids)
        slots.copy_(slots_of(ids, 16))
        store.append(0, k, v, slots)
        store.seal(0, late)
        for to, x in zip(got, store.read(0, late), strict=True):
            to.copy_(x)
        k.fill_(torch.nan)  # not before append has read it
        v.fill_(torch.nan)
    side.synchronize()
    for name, out, want in zip("kv", got, values, strict=True):
        assert_same_bits(out, want, name)
    assert store.is_sealed(0, ids).all()


def test_two_stores_on_two_streams(made: Callable) -> None:
    """Each in its own order, at the same time."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    stores = [made(SHAPE, 64) for _ in streams]
    ids = [torch.randperm(64, device=DEVICE) for _ in streams]
    values = [[mixed_values((1024, 2, 64), 2 * i + j) for j in range(2)] for i in range(2)]
    rows = [[nan(1024, 2, 64) for _ in "kv"] for _ in streams]
    pinned = [[x.pin_memory() for x in kv] for kv in values]
    all_calls(stores[0], rows[0][0], rows[0][1], ids[0])
    torch.cuda.synchronize()
    got: list = [None, None]
    for turn in range(3):  # turns, so that each stream waits while the other is fed
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                if turn == 0:
                    for to, x in zip(rows[i], pinned[i], strict=True):
                        to.copy_(x, non_blocking=True)
                    stores[i].append(0, *rows[i], slots_of(ids[i], 16))
                elif turn == 1:
                    stores[i].seal(0, ids[i])
                else:
                    got[i] = stores[i].read(0, ids[i])
    torch.cuda.synchronize()
    for i in range(2):
        for name, out, want in zip("kv", got[i], values[i], strict=True):
            assert_same_bits(out, want, f"{name} of stream {i}")
        assert_holds(stores[i], 0, ids[i], *values[i])


# ---- devices -----------------------------------------------------------------------------------
def test_a_device_that_is_not_the_current_one() -> None:
    """The store's device is used and the current one stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: this test needs a second SM90 device")
    if torch.cuda.get_device_capability(1)[0] != 9:
        pytest.skip("no second SM90 device: device 1 is of another architecture")
    stores = [PageStore(SHAPE, 4, device=f"cuda:{i}", backend="kernels") for i in range(2)]
    k, v = (mixed_values((64, 2, 64), seed) for seed in (1, 2))
    for current in (0, 1):
        for i, store in enumerate(stores):
            with torch.cuda.device(current):
                ids = torch.tensor([3, 0, 1, 2], device=f"cuda:{i}")
                store.append(0, k.to(ids.device), v.to(ids.device), slots_of(ids, 16))
                store.seal(0, ids)
                got = store.read(0, ids)
                store.clear(0, [0, 1, 2, 3])
                assert torch.cuda.current_device() == current
            for out, want in zip(got, (k, v), strict=True):
                assert out.device == ids.device
                assert_same_bits(out, want, f"store of device {i}, current device {current}")
            store.check()
            other = ids.to(f"cuda:{1 - i}")
            with pytest.raises(ArgumentError, match=f"pages is on cuda:{1 - i} and the store on"):
                launch.encode(store.layer(0), store.state(0), other)
            store.clear(0, other)  # a store brings ids to its device


# ---- compiling ---------------------------------------------------------------------------------
def test_no_call_compiles_again(made: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch sizes, strides, ids, numbers of heads and page sizes are no reason for a new kernel."""
    stores = [made(KVShape(1, heads, heads, 64, size), 80) for heads, size in ((2, 16), (3, 32))]
    k, v = (mixed_values((1040, 3, 80), seed).to(DEVICE) for seed in (1, 2))

    def views(heads: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Rows of both kinds: those that move 16 bytes at a time, and those that do not."""
        dense = tuple(x[:count, :heads, :64].contiguous() for x in (k, v))
        wide = tuple(x[: 2 * count : 2, :heads, 3:67] for x in (k, v))
        return [dense, wide, (dense[0], wide[1])]

    def use(store: PageStore, count: int, index: torch.dtype) -> None:
        pages = -(-count // store.shape.page_size)
        slots = torch.arange(count, dtype=index, device=DEVICE)
        ids = torch.arange(pages, dtype=index, device=DEVICE)
        for rows in views(store.shape.num_kv_heads, count):
            store.append(0, *rows, slots)
        if count % store.shape.page_size == 0:
            store.seal(0, ids)
        store.read(0, ids)
        store.clear(0, ids)

    for index in (torch.int32, torch.int64):
        use(stores[0], 16, index)
    known = dict(compiler._table)
    cached = launch._kernel.cache_info().currsize

    def compiles(key: object) -> None:
        raise AssertionError(f"{key} is compiled or loaded again")

    monkeypatch.setattr(compiler, "_first", compiles)
    for store in stores:
        for index in (torch.int32, torch.int64):
            for count in (1, 2, 3, 15, 16, 17, 32, 33, 96, 500):
                use(store, count, index)
    assert launch._kernel.cache_info().currsize == cached
    launch._kernel.cache_clear()
    use(stores[1], 64, torch.int64)  # and the table has them all
    assert compiler._table == known


def test_host_time_of_a_decode_step(made: Callable) -> None:
    """Appending 64 rows takes at most 15 us of host time, by the median of 500 calls.

    The bound here is 25 us: machines that run tests are shared, and of different speeds.
    """
    store = made(KVShape(1, 8, 8, 128), 64)
    kv, state = store.layer(0), store.state(0)
    k, v = (torch.randn(64, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
    slots = torch.randperm(64, device=DEVICE) * 16
    for _ in range(20):
        launch.append(kv, state, k, v, slots)
    torch.cuda.synchronize()
    times = []
    for _ in range(500):
        start = time.perf_counter_ns()
        launch.append(kv, state, k, v, slots)
        times.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    times.sort()
    assert median(times) <= 25_000, f"median {median(times)} ns, fastest tenth {times[50]} ns"


# ---- arguments ---------------------------------------------------------------------------------
def test_rows_that_require_gradients(made: Callable) -> None:
    """K and V straight from a projection under autograd, or a parameter: values are what counts."""
    store = made(SHAPE, 4)
    k, v = (mixed_values((32, 2, 64), seed) for seed in (1, 2))
    grad = k.to(DEVICE).requires_grad_()
    parameter = torch.nn.Parameter(v.to(DEVICE))
    slots = torch.arange(16, 48, device=DEVICE)
    store.append(0, grad, parameter, slots)
    assert_holds(store, 0, torch.tensor([1, 2]), k, v)
    launch.append(store.layer(0), store.state(0), grad.clone(), parameter, slots)
    with torch.inference_mode():
        store.seal(0, torch.tensor([1, 2], device=DEVICE))
        x, y = k.to(DEVICE).clone(), v.to(DEVICE).clone()  # inference tensors
        store.append(0, x, y, slots_of(torch.tensor([0, 3], device=DEVICE), 16))
    assert_holds(store, 0, torch.tensor([1, 2]), k, v)
    assert_holds(store, 0, torch.tensor([0, 3]), k, v)


def test_tensors_that_do_not_fit_together(made: Callable) -> None:
    """A state of other pages: nothing runs, and the message says what.

    What no state can be is refused when one is made.
    """
    store, other = made(SHAPE, 8), made(SHAPE, 4)
    kv, state = store.layer(0), store.state(0)
    x = torch.zeros(16, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    slots, ids = torch.arange(16, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    before = snapshot(store)
    for call in (
        lambda: launch.append(kv, other.state(0), x, x, slots),
        lambda: launch.encode(kv, other.state(0), ids),
        lambda: launch.clear(kv, other.state(0), ids),
    ):
        with pytest.raises(ArgumentError, match=r"on argument #\d.*Pages and state must be of one"):
            call()
    for refused in (state.refused[:3], state.refused.cpu(), state.refused.long()):
        with pytest.raises(
            ArgumentError, match=r"^refused must be contiguous torch\.int32 of shap"
        ):
            replace(state, refused=refused)
    assert_unchanged(store, before)


def test_tables_that_begin_askew(made: Callable) -> None:
    """Places and homes are read as wholes of 8 bytes: others are refused, not launched on."""
    store = made(SHAPE, 8)
    kv, state = store.layer(0), store.state(0)
    flat = torch.zeros(17, dtype=torch.int32, device=DEVICE)[1:].view(8, 1, 2)
    said = "must start at a multiple of 8 bytes; it starts 4 bytes past one"
    with pytest.raises(ArgumentError, match=f"^places {said}$"):
        replace(kv, places=flat)
    with pytest.raises(ArgumentError, match=f"^homes {said}$"):
        replace(state, homes=flat)


def test_slots_stay_below_2_to_the_31(made: Callable) -> None:
    """Kernels count slots in 32 bits."""
    layout = KVShape(1, 2, 2, 64, 64).layout
    pool = made(SHAPE, 1).pool
    places = torch.empty(1 << 25, 1, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(UnsupportedError, match=r"^33554432 pages of 64 tokens: .*2\*\*31"):
        LayerPages(pool, places, layout)
    assert LayerPages(pool, places[1:], layout).num_pages == (1 << 25) - 1


def test_questions_look_at_ids_on_the_device(made: Callable) -> None:
    """No kernel answers them, so that none would count a wrong id: -1 is not the last page."""
    store = made(SHAPE, 8)
    for page in (8, -1, 1 << 32):
        ids = torch.tensor([2, page], device=DEVICE)
        for call in (store.is_sealed, store.page_bytes, store.descriptors):
            with pytest.raises(ArgumentError, match=rf"page {page} is outside 0\.\.7 of layer 0"):
                call(0, ids)


def test_an_id_twice_in_a_list_or_on_the_host(made: Callable) -> None:
    """What is not on the device is looked at on the host, and nothing is sealed."""
    store = made(SHAPE, 8)
    k, v = (mixed_values((32, 2, 64), seed).to(DEVICE) for seed in (1, 2))
    store.append(0, k, v, torch.arange(32, device=DEVICE))
    for ids in ([1, 0, 1], torch.tensor([1, 0, 1]), torch.tensor([1, 1], dtype=torch.int32)):
        with pytest.raises(ArgumentError, match="pages holds 1 more than once"):
            store.seal(0, ids)
    assert not store.is_sealed(0, range(8)).any()
    assert (store.seal(0, torch.tensor([1, 0])) > 0).all()


@pytest.mark.parametrize(
    "through", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_copied_store_is_of_one_piece(made: Callable, through: Callable) -> None:
    """What kernels do through the copy's views shows in the copy, and in it alone."""
    store = made(SHAPE, 8)
    k, v = (mixed_values((64, 2, 64), seed) for seed in (1, 2))
    ids = torch.tensor([6, 1, 0, 3], device=DEVICE)
    store.append(0, k[:32].to(DEVICE), v[:32].to(DEVICE), slots_of(ids[:2], 16))
    store.seal(0, ids[:1])
    copied: PageStore = through(store)
    copied.append(0, k[32:].to(DEVICE), v[32:].to(DEVICE), slots_of(ids[2:], 16))
    sizes = copied.seal(0, ids[1:])
    assert torch.equal(copied.page_bytes(0, ids[1:]), sizes)
    assert copied.is_sealed(0, range(8)).tolist() == [p in (0, 1, 3, 6) for p in range(8)]
    assert_holds(copied, 0, ids, k, v)
    copied.check()
    assert store.is_sealed(0, range(8)).tolist() == [p == 6 for p in range(8)]
    assert_holds(store, 0, ids[:2], k[:32], v[:32])


@pytest.mark.parametrize("name", ["k", "v"])
def test_outputs_that_do_not_fit(made: Callable, name: str) -> None:
    """Wrong device, alignment and gaps are named; nothing is written."""
    store = made(SHAPE, 2)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    shape = (1, 16, 2, 64)
    for out, said in (
        (torch.zeros(shape, dtype=torch.bfloat16), "on cpu"),
        (nan(1, 2, 16, 64).transpose(1, 2), r"strides \[2048, 64, 1024, 1\]"),
        (nan(2048 + 8)[1:2049].view(shape), "2 bytes past one"),
    ):
        with pytest.raises(ArgumentError, match=f"{name} must .*{said}"):
            launch.decode_pages(store.layer(0), store.state(0), ids, **{name: out})


def test_outputs_that_are_one(made: Callable) -> None:
    """K and V in the same memory."""
    store = made(SHAPE, 2)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out = nan(1, 16, 2, 64)
    with pytest.raises(ArgumentError, match="k and v are the same memory"):
        launch.decode_pages(store.layer(0), store.state(0), ids, k=out, v=out.view(1, 16, 2, 64))
    assert out.isnan().all()
