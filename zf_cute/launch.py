"""Launch the page kernels on torch tensors, on torch's current stream.

Arguments are checked once, by shape, dtype, device and strides: on a GPU by the compiled kernel's
own entry, which takes less host time, and what it refuses is then said in words here.  Contents
stay on the device: nothing waits for it, and what a kernel finds wrong in slots, page ids or pages
it leaves alone and counts (`PageState.refused`; `PageStore.check` raises).  Writers trust the place
table and homes, which are a store's or a manager's own; `decode_pages` looks before it reads.

Calls can be captured in a CUDA graph, the first of a kernel in a process excepted: it compiles the
kernel or loads it from disk, and brings it to the GPU.  A kernel that CUDA does not start raises
LaunchError.

`PageStore` is built on these; call them directly to encode pages to a place of your own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from zf_cute.arguments import check_layer, check_page_ids, check_rows, check_slot_mapping
from zf_cute.checks import INDEX_DTYPES, check_aligned, check_like
from zf_cute.compile import compiled
from zf_cute.compile_key import CompileKey
from zf_cute.errors import ArgumentError, LaunchError, UnsupportedError
from zf_cute.kernels.policy import append_sharers, encode_warps
from zf_cute.pages import LayerPages, PageState
from zf_cute.reference.writing import raw_metadata
from zf_layouts import PageLayout


@cache
def unsupported(device: torch.device) -> str | None:
    """Why kernels cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return f"the kernels run on CUDA devices, not on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return (
            f"the kernels are compiled for SM90 (H100, H200); {torch.cuda.get_device_name(device)} "
            f"is SM{major}{minor}"
        )
    try:
        import cutlass  # noqa: F401
        import tvm_ffi  # noqa: F401
    except ImportError as error:
        return f"{error}: reinstall zf_cute; `zf-profile doctor` says what is missing"
    return None


@cache
def _kernel(
    device: torch.device,
    name: str,
    dtype: torch.dtype,
    head_dim: int = 0,
    rope: str = "",
    vectors: bool = True,
) -> Any:
    reason = unsupported(device)
    if reason:
        raise UnsupportedError(f"{reason}. Use PageStore(..., backend='reference').")
    return compiled(CompileKey(name, head_dim, rope, INDEX_DTYPES[dtype], vectors))


def _launch(kernel: Any, *args: Any) -> None:
    """Call a kernel; what TVM-FFI generates for it turns to the tensors' device and back."""
    try:
        kernel(*args)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{error}.  Pages and state must be of one layer of one store, and all tensors on its "
            "device"
        ) from error
    except Exception as error:
        raise LaunchError(
            f"a kernel did not start: {error}.  An earlier kernel's failure also shows here"
        ) from error


def _moves_16_bytes(x: Tensor) -> bool:
    """Whether rows are dense and every row starts at a multiple of 16 bytes."""
    token, head, dim = x.stride()
    return dim == 1 and not (token | head) & 7 and not x.data_ptr() & 15


def append(kv: LayerPages, state: PageState, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write new tokens into raw pages.

    Parameters
    ----------
    kv, state : LayerPages, PageState
        The layer.
    k, v : Tensor
        [tokens, num_kv_heads, head_dim] bfloat16, any strides; dense rows that start at multiples
        of 16 bytes are read fastest.
    slot_mapping : Tensor
        [tokens] int32 or int64: ``page * page_size + offset``, or -1 for a token to skip.  Slots
        out of range or in sealed pages are left out and counted.  Each slot at most once: where one
        is given twice, any of its values may be either row's.

    Raises
    ------
    UnsupportedError
        If the device cannot run the kernels, or k or v is not bfloat16.
    ArgumentError
        If a shape, dtype or device does not fit.
    """
    check_layer(kv, state)
    layout, pool = kv.layout, kv.pool
    if not (pool.is_cuda and _are_rows(layout, k, v, slot_mapping)):
        _check_append(kv, k, v, slot_mapping)
    tokens, heads, head_dim = k.shape
    device = pool.device
    vectors = _moves_16_bytes(k) and _moves_16_bytes(v)
    kernel = _kernel(device, "append", slot_mapping.dtype, head_dim, layout.rope, vectors)
    if not tokens:
        _check_append(kv, k, v, slot_mapping)
        return
    try:
        _launch(
            kernel,
            kv.pool,
            kv.places,
            state.written,
            state.sealed,
            state.refused,
            k,
            v,
            slot_mapping,
            layout.page_size,
            layout.heads_per_span,
            layout.head_metadata_bytes,
            append_sharers(tokens, heads),
        )
    except ArgumentError:
        _check_append(kv, k, v, slot_mapping)
        raise


def _are_rows(layout: PageLayout, k: object, v: object, slot_mapping: object) -> bool:
    """Whether these choose a kernel: the rest of the checks is the kernel's."""
    if not (isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(slot_mapping, Tensor)):
        return False
    if not (k.dim() == v.dim() == 3 and slot_mapping.dtype in INDEX_DTYPES):
        return False
    _, heads, head_dim = k.shape
    return heads == layout.num_kv_heads and head_dim == layout.head_dim


def _check_append(kv: LayerPages, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    check_slot_mapping(kv, slot_mapping, check_rows(kv, k, v)[0])


def encode(
    kv: LayerPages,
    state: PageState,
    pages: Tensor,
    *,
    destinations: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Encode full raw pages, losslessly; their places change with it.

    Parameters
    ----------
    kv, state : LayerPages, PageState
        The layer.
    pages : Tensor
        [n] int32 or int64 page ids.  One that is out of range, not full, sealed already or given
        twice is left as it is and counted; of an id given twice either item seals the whole page.
    destinations : Tensor, optional
        [n, spans] int32, read as u32: where each sealed span goes, in units of 128 bytes from the
        pool's first byte, with room for ``layout.raw_span_bytes`` inside the pool.  In place by
        default.  Room must not overlap another span, nor the span's own raw bytes except exactly in
        place: that is not noticed.  The raw bytes stay where they were until something else is
        written there; `clear` brings a page home to them.
    lengths : Tensor, optional
        [n, spans] int32, written and returned if given.

    Returns
    -------
    Tensor
        [n, spans] int32: bytes of each sealed span, 0 where nothing was done.  On the device: copy
        it to pinned memory and wait for an event, and the stream never stalls.

    Raises
    ------
    UnsupportedError
        If the device cannot run the kernels.
    ArgumentError
        If a shape, dtype or device does not fit.

    References
    ----------
    layouts/FORMAT.md, sections 3 to 6.
    """
    check_layer(kv, state)
    layout, pool = kv.layout, kv.pool
    if not (pool.is_cuda and _are_ids(pages)):
        _check_encode(kv, pages, destinations, lengths)
    device = pool.device
    kernel = _kernel(device, "encode", pages.dtype)
    items, spans = pages.shape[0], layout.spans
    if lengths is None:
        lengths = torch.empty((items, spans), dtype=torch.int32, device=device)
    if not items:
        _check_encode(kv, pages, destinations, lengths)
        return lengths
    try:
        _launch(
            kernel,
            pool,
            kv.places,
            state.written,
            state.sealed,
            state.claimed,
            state.refused,
            pages.contiguous(),
            lengths if destinations is None else destinations,
            lengths,
            int(destinations is None),
            layout.page_size,
            layout.heads_per_span,
            layout.blocks_per_part.bit_length() - 1,
            layout.head_metadata_bytes,
            layout.max_exceptions,
            encode_warps(layout.heads_per_span * 2 * layout.blocks_per_part, items * spans),
            pool.numel(),
        )
    except ArgumentError:
        _check_encode(kv, pages, destinations, lengths)
        raise
    return lengths


def _are_ids(pages: object) -> bool:
    """Whether these choose a kernel: the rest of the checks is the kernel's."""
    return isinstance(pages, Tensor) and pages.dim() == 1 and pages.dtype in INDEX_DTYPES


def _check_encode(
    kv: LayerPages, pages: Tensor, destinations: Tensor | None, lengths: Tensor | None
) -> None:
    check_page_ids(kv, pages)
    shape = (pages.shape[0], kv.layout.spans)
    for name, x in (("destinations", destinations), ("lengths", lengths)):
        if x is not None:
            check_like(name, x, torch.int32, shape, kv.pool.device)


def decode_pages(
    kv: LayerPages,
    state: PageState,
    pages: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode pages, raw or sealed, to ordinary keys and values.

    Parameters
    ----------
    kv, state : LayerPages, PageState
        The layer.
    pages : Tensor
        [n] int32 or int64 page ids; may repeat.  One that is out of range gives zeros and is
        counted.
    k, v : Tensor, optional
        [n, page_size, num_kv_heads, head_dim] bfloat16, contiguous: written and returned if given.

    Returns
    -------
    k, v : Tensor
        [n, page_size, num_kv_heads, head_dim] bfloat16.  Slots never written hold anything; parts
        that no writer makes come out as zeros and are counted, but exception entries are not looked
        into.

    Raises
    ------
    UnsupportedError
        If the device cannot run the kernels.
    ArgumentError
        If a shape, dtype or device does not fit.
    """
    check_layer(kv, state)
    layout, pool = kv.layout, kv.pool
    if not (pool.is_cuda and _are_ids(pages)):
        check_page_ids(kv, pages)
    device = pool.device
    kernel = _kernel(device, "decode_pages", pages.dtype, layout.head_dim, layout.rope)
    shape = (pages.shape[0], layout.page_size, layout.num_kv_heads, layout.head_dim)
    if k is None:
        k = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if v is None:
        v = torch.empty(shape, dtype=torch.bfloat16, device=device)
    tensors = isinstance(k, Tensor) and isinstance(v, Tensor)
    if not (pool.is_cuda and tensors and k.data_ptr() != v.data_ptr() and shape[0]):
        _check_decode(kv, pages, shape, k, v)
    if not shape[0]:
        return k, v
    try:
        _launch(
            kernel,
            pool,
            kv.places,
            state.refused,
            pages.contiguous(),
            k,
            v,
            layout.heads_per_span,
            layout.blocks_per_part.bit_length() - 1,
            layout.head_metadata_bytes,
            layout.max_exceptions,
            pool.numel(),
        )
    except ArgumentError:
        _check_decode(kv, pages, shape, k, v)
        raise
    return k, v


def _check_decode(
    kv: LayerPages, pages: Tensor, shape: tuple[int, ...], k: Tensor, v: Tensor
) -> None:
    check_page_ids(kv, pages)
    for name, x in (("k", k), ("v", v)):
        check_like(name, x, torch.bfloat16, shape, kv.pool.device)
        check_aligned(name, x, 16)
    if shape[0] and k.data_ptr() == v.data_ptr():
        raise ArgumentError("k and v are the same memory")


def clear(kv: LayerPages, state: PageState, pages: Tensor) -> None:
    """Make pages raw and empty again, at their homes.

    Parameters
    ----------
    kv, state : LayerPages, PageState
        The layer.
    pages : Tensor
        [n] int32 or int64 page ids; one that is out of range is counted.

    Raises
    ------
    UnsupportedError
        If the device cannot run the kernels.
    ArgumentError
        If a shape, dtype or device does not fit.
    """
    check_layer(kv, state)
    check_page_ids(kv, pages)
    device = kv.pool.device
    kernel = _kernel(device, "clear", pages.dtype)
    if pages.shape[0]:
        _launch(
            kernel,
            kv.pool,
            kv.places,
            state.homes,
            state.written,
            state.sealed,
            state.claimed,
            state.refused,
            raw_metadata(kv.layout, device),
            pages.contiguous(),
        )
