"""Argument checks of `zf_cute.launch`: messages say which, what it was, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from store.small_store import PAGES, SHAPE, assert_unchanged, poisoned, snapshot, tokens
from torch import Tensor

from zf_cute import ArgumentError, KVShape, PageStore, UnsupportedError, launch, operators

K, V = tokens(2, 1)
SLOTS = torch.arange(2)
PLACED = torch.zeros(2, 1, dtype=torch.int32)  # a place for the one span of each of two pages
OUT = torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16)


@pytest.fixture
def store() -> PageStore:
    """Two layers of six empty pages; a page has one span of two heads."""
    return poisoned(PageStore(SHAPE, PAGES))


def refuses(
    store: PageStore, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    """The call raises this, and changes nothing."""
    before = snapshot(store)
    with pytest.raises(error, match=message):
        call()
    assert_unchanged(store, before)


# ---- append ------------------------------------------------------------------------------------
APPEND = {
    "k is a list": ("k", K.tolist(), "k is a list; a torch tensor is wanted"),
    "v is None": ("v", None, "v is a NoneType; a torch tensor"),
    "k is numpy": ("k", K.float().numpy(), "k is a ndarray; a torch tensor"),
    "k is float16": ("k", K.half(), "k is float16: the format is lossless for bfloat16 alone"),
    "v is float32": ("v", V.float(), "v is float32: .*a cast would change the cache"),
    "k is int16": ("k", K.view(torch.int16), "k is int16"),
    "k has rank 2": ("k", K[0], r"k has shape \(2, 64\); \[tokens, 2, 64\] is wanted"),
    "v has rank 4": ("v", V[None], r"v has shape \(1, 2, 2, 64\); \[tokens, 2, 64\] is wanted"),
    "k has too few heads": ("k", K[:, :1], r"k has shape \(2, 1, 64\); \[tokens, 2, 64\]"),
    "v has a short head_dim": ("v", V[..., :32], r"v has shape \(2, 2, 32\)"),
    "k is elsewhere": ("k", K.to("meta"), "k is on meta and the store on cpu"),
    "v is elsewhere": ("v", V.to("meta"), "v is on meta and the store on cpu"),
    "k and v differ": ("v", V[:1], "k has 2 tokens and v 1"),
    "slots is a list": ("slot_mapping", [0, 1], "slot_mapping is a list; a torch tensor"),
    "slots is int16": ("slot_mapping", SLOTS.short(), "torch.int16; int32 or int64 is wanted"),
    "slots is float": ("slot_mapping", SLOTS.float(), "slot_mapping is torch.float32"),
    "slots is bool": ("slot_mapping", SLOTS.bool(), "slot_mapping is torch.bool"),
    "slots has rank 2": ("slot_mapping", SLOTS[None], r"slot_mapping has shape \(1, 2\)"),
    "slots has rank 0": ("slot_mapping", SLOTS[0], r"shape \(\); one slot for each of the 2 tok"),
    "slots is short": ("slot_mapping", SLOTS[:1], r"shape \(1,\); one slot for each of the 2 tok"),
    "slots is elsewhere": ("slot_mapping", SLOTS.to("meta"), "slot_mapping is on meta"),
}


@pytest.mark.parametrize("case", APPEND)
def test_append(store: PageStore, case: str) -> None:
    name, value, message = APPEND[case]
    args = {"k": K, "v": V, "slot_mapping": SLOTS, name: value}
    is_dtype = message.startswith(("k is float16", "v is float32", "k is int16"))
    error = UnsupportedError if is_dtype else ArgumentError
    refuses(store, lambda: launch.append(store.layer(0), store.state(0), **args), error, message)


# ---- page ids ----------------------------------------------------------------------------------
PAGE_IDS = {
    "a list": ([0, 1], "pages is a list; a torch tensor is wanted"),
    "an int": (0, "pages is a int; a torch tensor is wanted"),
    "int16": (SLOTS.short(), "pages is torch.int16; int32 or int64 is wanted"),
    "uint8": (SLOTS.byte(), "pages is torch.uint8; int32 or int64 is wanted"),
    "float": (SLOTS.float(), "pages is torch.float32; int32 or int64 is wanted"),
    "bool": (SLOTS.bool(), "pages is torch.bool"),
    "rank 2": (SLOTS[None], "pages has 2 dimensions; one is wanted"),
    "rank 0": (SLOTS[0], "pages has 0 dimensions; one is wanted"),
    "elsewhere": (SLOTS.to("meta"), "pages is on meta and the store on cpu"),
}
CALLS: dict[str, Callable[[PageStore, object], object]] = {
    "encode": lambda store, pages: launch.encode(store.layer(0), store.state(0), pages),
    "decode_pages": lambda store, pages: launch.decode_pages(store.layer(0), store.state(0), pages),
    "clear": lambda store, pages: launch.clear(store.layer(0), store.state(0), pages),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", PAGE_IDS)
def test_page_ids(store: PageStore, call: str, case: str) -> None:
    pages, message = PAGE_IDS[case]
    refuses(store, lambda: CALLS[call](store, pages), ArgumentError, message)


# ---- what encode and decode write --------------------------------------------------------------
WANTED = r"{name} must be contiguous torch.int32 of shape \[2, 1\] on cpu; it is "
SPANS = {
    "a list": ([[0], [0]], "{name} is a list; a torch tensor is wanted"),
    "int64": (PLACED.long(), WANTED + r"torch.int64 of shape \[2, 1\] on cpu$"),
    "uint32": (PLACED.view(torch.uint32), WANTED + "torch.uint32 of shape"),
    "flat": (PLACED.flatten(), WANTED + r"torch.int32 of shape \[2\] on cpu$"),
    "three pages": (torch.cat([PLACED, PLACED[:1]]), WANTED + r"torch.int32 of shape \[3, 1\]"),
    "two spans": (PLACED.expand(2, 2), WANTED + r"torch.int32 of shape \[2, 2\] on cpu with str"),
    "gaps": (
        PLACED.repeat(2, 2)[::2, :1],
        WANTED + r".* of shape \[2, 1\].* with strides \[4, 1\]$",
    ),
    "elsewhere": (PLACED.to("meta"), WANTED + r"torch.int32 of shape \[2, 1\] on meta$"),
}


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("name", ["destinations", "lengths"])
@pytest.mark.parametrize("case", SPANS)
def test_places_and_lengths(store: PageStore, name: str, case: str) -> None:
    value, message = SPANS[case]
    call = lambda: launch.encode(store.layer(0), store.state(0), SLOTS, **{name: value})  # noqa: E731
    refuses(store, call, ArgumentError, message.format(name=name))


def _shifted(x: Tensor) -> Tensor:
    """The same values from an address that is 2 past a multiple of 16."""
    flat = torch.empty(x.numel() + 16, dtype=x.dtype)
    first = (2 - flat.data_ptr()) % 16 // 2
    return flat[first : first + x.numel()].view(x.shape).copy_(x)


OUTPUT = r"{name} must be contiguous torch.bfloat16 of shape \[2, 16, 2, 64\] on cpu; it is "
OUTPUTS = {
    "a list": ([], "{name} is a list; a torch tensor is wanted"),
    "float16": (OUT.half(), OUTPUT + "torch.float16 of shape"),
    "one page": (OUT[:1], OUTPUT + r"torch.bfloat16 of shape \[1, 16, 2, 64\]"),
    "rows": (OUT.flatten(0, 1), OUTPUT + r"torch.bfloat16 of shape \[32, 2, 64\]"),
    "gaps": (OUT.repeat(2, 1, 1, 1)[::2], OUTPUT + r".* with strides \[4096, 128, 64, 1\]"),
    "heads first": (OUT.view(2, 2, 16, 64).transpose(1, 2), OUTPUT + ".* with strides"),
    "elsewhere": (OUT.to("meta"), OUTPUT + r".* on meta$"),
    "misaligned": (
        _shifted(OUT),
        "{name} must start at a multiple of 16 bytes; it starts 2 bytes past one",
    ),
}


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs(store: PageStore, name: str, case: str) -> None:
    value, message = OUTPUTS[case]
    call = lambda: launch.decode_pages(  # noqa: E731
        store.layer(0), store.state(0), SLOTS, **{name: value}
    )
    refuses(store, call, ArgumentError, message.format(name=name))


@pytest.mark.usefixtures("runs_here")
def test_outputs_that_are_one(store: PageStore) -> None:
    """K and V in the same memory: one would be written over the other."""
    for v in (OUT, OUT.view(OUT.shape)):
        call = lambda v=v: launch.decode_pages(  # noqa: E731
            store.layer(0), store.state(0), SLOTS, k=OUT, v=v
        )
        refuses(store, call, ArgumentError, "k and v are the same memory")
    none = OUT[:0]  # no memory at all
    launch.decode_pages(store.layer(0), store.state(0), SLOTS[:0], k=none, v=none)


# ---- devices -----------------------------------------------------------------------------------
@pytest.mark.parametrize("call", ["append", *CALLS])
def test_cpu_tensors_are_told_of_the_reference(store: PageStore, call: str) -> None:
    """Good arguments on a device that runs no kernels."""
    calls = {**CALLS, "append": lambda s, p: launch.append(s.layer(0), s.state(0), K, V, p)}
    message = re.escape(
        "the kernels run on CUDA devices, not on cpu. Use PageStore(..., backend='reference')."
    )
    refuses(store, lambda: calls[call](store, SLOTS), UnsupportedError, f"^{message}$")


def test_nothing_to_do_still_needs_a_device(store: PageStore) -> None:
    """An empty batch is no way around: code that works here works with a batch."""
    none = SLOTS[:0]
    for call in CALLS.values():
        with pytest.raises(UnsupportedError, match="not on cpu"):
            call(store, none)
    with pytest.raises(UnsupportedError, match="not on cpu"):
        launch.append(store.layer(0), store.state(0), K[:0], V[:0], none)


def test_shapes_of_the_layer_are_what_counts() -> None:
    """The wanted shape in messages is that of the store's own layout."""
    store = PageStore(KVShape(1, 6, 6, 128, 32), 2)
    with pytest.raises(
        ArgumentError, match=r"k has shape \(2, 2, 64\); \[tokens, 6, 128\] is want"
    ):
        launch.append(store.layer(0), store.state(0), K, V, SLOTS)


# ---- layers ------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", ["append", *CALLS])
def test_what_is_no_layer_is_named(store: PageStore, call: str) -> None:
    """A store for its layer, pages and state swapped."""
    kv, state = store.layer(0), store.state(0)
    rest = (K, V, SLOTS) if call == "append" else (SLOTS,)
    for module in (launch, operators):
        function = getattr(module, call)
        for args, message in (
            ((store, state), r"kv is a PageStore; LayerPages is wanted: store.layer\(i\)"),
            ((state, kv), "kv is a PageState"),
            ((kv, None), r"state is a NoneType; PageState is wanted: store.state\(i\)"),
        ):
            refuses(store, lambda f=function, a=args: f(*a, *rest), ArgumentError, message)
