"""Which kernel a call asks for and with what, on which device, and what an error becomes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from bits import mixed_values
from torch import Tensor

from zf_cute import ArgumentError, KVShape, LaunchError, PageStore, UnsupportedError, launch
from zf_cute.compile_cache import VARIABLE
from zf_cute.kernels import policy

SHAPE = KVShape(1, 6, 6, 128, 32, "interleaved", 3, heads_per_span=2)


@pytest.fixture
def store() -> PageStore:
    """Three spans a page, and no parameter at its default."""
    return PageStore(SHAPE, 4)


# ---- variants ----------------------------------------------------------------------------------
def rows(count: int, dim: int = 128) -> Tensor:
    """Rows of six heads."""
    return torch.zeros(count, 6, dim, dtype=torch.bfloat16)


def test_what_append_is_called_with(store: PageStore, launched: list) -> None:
    kv, state = store.layer(0), store.state(0)
    k, v, slots = rows(40), rows(40), torch.arange(40, dtype=torch.int32)
    launch.append(kv, state, k, v, slots)
    ((variant, args),) = launched
    assert variant == ("append", torch.int32, 128, "interleaved", True)
    tensors = (kv.pool, kv.places, state.written, state.sealed, state.refused, k, v, slots)
    assert all(given is tensor for given, tensor in zip(args, tensors, strict=False))
    layout = SHAPE.layout
    assert args[8:] == (32, 2, layout.head_metadata_bytes, 16)


@pytest.mark.parametrize(("count", "sharers"), [(1, 16), (85 * 16, 16), (85 * 16 + 1, 1)])
def test_single_rows_get_warps_while_there_are_few(
    store: PageStore, launched: list, count: int, sharers: int
) -> None:
    """Up to 512 windows of 16 rows, times heads: 85 windows of six heads, and not 86."""
    launch.append(store.layer(0), store.state(0), rows(count), rows(count), torch.arange(count))
    assert launched[0][1][-1] == sharers


ALIGNED: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: rows(4),
    "a slice of fused rows": lambda: rows(12).view(4, 3, 6, 128)[:, 1],
    "every other row": lambda: rows(8)[::2],
    "heads reversed in memory": lambda: rows(4).view(6, 4, 128).transpose(0, 1),
    "one row for all": lambda: rows(1).expand(4, -1, -1),
}
UNALIGNED: dict[str, Callable[[], Tensor]] = {
    "dims apart": lambda: rows(4, 256)[..., ::2],
    "dims first": lambda: rows(4).view(128, 6, 4).permute(2, 1, 0),
    "rows of 129": lambda: rows(4, 129)[..., :128],
    "from a byte that is no multiple of 16": lambda: rows(4, 136)[..., 4:132],
}


@pytest.mark.parametrize("k", [*ALIGNED, *UNALIGNED])
@pytest.mark.parametrize("v", ["contiguous", "rows of 129"])
def test_when_rows_move_16_bytes_at_a_time(
    store: PageStore, launched: list, k: str, v: str
) -> None:
    """Only if the rows of both are dense and aligned; otherwise a kernel that takes any."""
    made = {**ALIGNED, **UNALIGNED}
    launch.append(store.layer(0), store.state(0), made[k](), made[v](), torch.arange(4))
    assert launched[0][0][-1] == (k in ALIGNED and v in ALIGNED)


def test_what_the_others_are_called_with(store: PageStore, launched: list) -> None:
    kv, state, layout = store.layer(0), store.state(0), SHAPE.layout
    pages = torch.tensor([2, 0])
    lengths = launch.encode(kv, state, pages)
    assert (lengths.shape, lengths.dtype) == ((2, 3), torch.int32)
    to, mine = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    assert launch.encode(kv, state, pages.int(), destinations=to, lengths=mine) is mine
    k, v = launch.decode_pages(kv, state, pages)
    assert k.shape == v.shape == (2, 32, 6, 128)
    own = torch.zeros_like(k), torch.zeros_like(v)
    got = launch.decode_pages(kv, state, pages.int(), k=own[0], v=own[1])
    assert got[0] is own[0]
    assert got[1] is own[1]
    launch.clear(kv, state, pages)

    assert [variant[:4] for variant, _ in launched] == [
        ("encode", torch.int64, 0, ""),
        ("encode", torch.int32, 0, ""),
        ("decode_pages", torch.int64, 128, "interleaved"),
        ("decode_pages", torch.int32, 128, "interleaved"),
        ("clear", torch.int64, 0, ""),
    ]
    args = [args for _, args in launched]
    tensors = (kv.pool, kv.places, state.written, state.sealed, state.claimed, state.refused)
    for encode in args[:2]:
        assert all(x is y for x, y in zip(encode, tensors, strict=False))
    assert args[0][7] is args[0][8] is lengths  # in place: destinations are not read
    numbers = (32, 2, 3, layout.head_metadata_bytes, 3, 8, kv.pool.numel())  # 8 blocks a part
    assert args[0][9:] == (1, *numbers)
    assert args[1][7] is to
    assert args[1][8] is mine
    assert args[1][9:] == (0, *numbers)
    for decode in args[2:4]:
        assert decode[2] is state.refused
        assert decode[6:] == (2, 3, layout.head_metadata_bytes, 3, kv.pool.numel())
    tensors = (kv.pool, kv.places, state.homes, *tensors[2:])
    assert all(x is y for x, y in zip(args[4], tensors, strict=False))
    assert bytes(args[4][7].tolist()) == layout.raw_metadata()


def test_nothing_is_launched_for_nothing(store: PageStore, launched: list) -> None:
    kv, state, none = store.layer(0), store.state(0), torch.empty(0, dtype=torch.int64)
    launch.append(kv, state, rows(0), rows(0), none)
    assert launch.encode(kv, state, none).shape == (0, 3)
    assert launch.decode_pages(kv, state, none)[0].shape == (0, 32, 6, 128)
    launch.clear(kv, state, none)
    assert launched == []


def test_ids_with_gaps_are_made_dense(store: PageStore, launched: list) -> None:
    """The kernels take dense ids; slots are read with any stride."""
    wide = torch.arange(8).view(4, 2)
    launch.encode(store.layer(0), store.state(0), wide[:, 0])
    launch.decode_pages(store.layer(0), store.state(0), wide[:, 0])
    launch.clear(store.layer(0), store.state(0), wide[:, 0])
    for (_, args), at in zip(launched, (6, 3, 8), strict=True):
        assert args[at].is_contiguous()
        assert args[at].tolist() == [0, 2, 4, 6]
    launch.append(store.layer(0), store.state(0), rows(4), rows(4), wide[:, 1])
    assert launched[-1][1][7].stride() == (2,)


def test_few_variants_serve_all_batches(store: PageStore, launched: list) -> None:
    """Batch sizes, strides, and numbers of heads and pages ask for no kernel of their own."""
    for heads, size in ((6, 32), (3, 16), (40, 64)):
        other = PageStore(KVShape(1, heads, heads, 128, size, "interleaved"), 40)
        kv, state = other.layer(0), other.state(0)
        for count in (1, 2, 16, 17, 33, 500):
            x = torch.zeros(count, heads, 128, dtype=torch.bfloat16)
            launch.append(kv, state, x, x, torch.arange(count))
            launch.append(kv, state, x.expand(count, -1, -1), x, torch.arange(count))
            for pages in (torch.arange(count), torch.arange(2 * count)[::2]):
                launch.encode(kv, state, pages)
                launch.decode_pages(kv, state, pages[:3])
                launch.clear(kv, state, pages)
    assert {variant for variant, _ in launched} == {
        ("append", torch.int64, 128, "interleaved", True),
        ("encode", torch.int64, 0, "", True),
        ("decode_pages", torch.int64, 128, "interleaved", True),
        ("clear", torch.int64, 0, "", True),
    }


# ---- devices -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("capability", "said"), [((8, 0), "SM80"), ((10, 0), "SM100"), ((12, 1), "SM121")]
)
def test_devices_of_other_architectures(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], said: str
) -> None:
    """Named, with their architecture and the one that is supported."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    reason = launch.unsupported.__wrapped__(torch.device("cuda:0"))
    assert reason == f"the kernels are compiled for SM90 (H100, H200); Some GPU is {said}"


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """An SM90 device and no compiler: the message says what is missing and who knows more."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("cutlass", "tvm_ffi"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
    reason = launch.unsupported.__wrapped__(torch.device("cuda:0"))
    assert missing in reason
    assert "'zf-profile doctor'" in reason.replace("`", "'")


# ---- errors ------------------------------------------------------------------------------------
ARGUMENT = "Pages and state must be of one layer of one store, and all tensors on its device"


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (ValueError("Mismatched sealed.shape[0] on argument #3"), ArgumentError, ARGUMENT),
        (TypeError("Mismatched type on argument #5, expected Tensor"), ArgumentError, ARGUMENT),
        (
            RuntimeError("CUDA Error: invalid configuration argument"),
            LaunchError,
            "a kernel did not start: .* An earlier kernel's failure also shows here",
        ),
    ],
)
def test_errors_of_a_launch(
    store: PageStore,
    runs_here: None,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    error: type[Exception],
    said: str,
) -> None:
    """TVM-FFI compares all tensors before anything runs; CUDA refuses a launch as a whole."""

    def kernel(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(launch, "_kernel", lambda *variant: kernel)
    with pytest.raises(error, match=said) as caught:
        launch.clear(store.layer(0), store.state(0), torch.arange(2))
    assert str(raised) in str(caught.value)
    assert caught.value.__cause__ is raised


def test_a_kernel_checks_its_tensors_itself(
    store: PageStore, runs_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real kernel, handed CPU tensors: its own check names the argument before CUDA is asked."""
    monkeypatch.setenv(VARIABLE, "off")  # this test leaves nothing behind
    with pytest.raises(ArgumentError, match=r"argument #\d.*pool: Tensor.*homes: Tensor"):
        launch.clear(store.layer(0), store.state(0), torch.arange(2))


def test_compile_errors_come_before_the_launch(
    store: PageStore, runs_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UnsupportedError is a ValueError too, and is not taken for one of TVM-FFI's."""

    def kernel(*variant: Any) -> None:
        raise UnsupportedError("the compiler is missing: install it")

    monkeypatch.setattr(launch, "_kernel", kernel)
    x = mixed_values((16, 6, 128), 1)
    with pytest.raises(UnsupportedError, match=r"^the compiler is missing: install it$"):
        launch.append(store.layer(0), store.state(0), x, x, torch.arange(16))


# ---- how many warps ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "few", "many"),
    [(4, 1, 1), (8, 2, 1), (16, 4, 1), (32, 8, 2), (64, 16, 4), (1024, 16, 4)],
)
def test_warps_that_encode_a_span(blocks: int, few: int, many: int) -> None:
    """Few spans are done soon, many at a high rate."""
    assert policy.encode_warps(blocks, policy.FEW_SPANS) == few
    assert policy.encode_warps(blocks, policy.FEW_SPANS + 1) == many


def test_warps_that_share_rows() -> None:
    """A window that is begun counts as one; heads multiply them."""
    most = policy.FEW_WINDOWS
    for rows_, heads, sharers in (
        (1, 1, 16),
        (16 * most, 1, 16),
        (16 * most + 1, 1, 1),
        (16, most, 16),
        (17, most, 1),
        (1, most + 1, 1),
    ):
        assert policy.append_sharers(rows_, heads) == sharers
