"""The work of append, encode and decode_pages on a case."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zf_layouts.page import SPAN_ALIGNMENT
from zf_profile import bytes_model
from zf_profile.backend import Pool
from zf_profile.bed import Bed, differing, refusals
from zf_profile.work import Call, Work

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 100
"""Launches of a decode step in one graph, each with slots of its own."""


# ---- append ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Rows:
    """What one append is given."""

    k: Tensor
    v: Tensor
    slots: Tensor


def append_works(bed: Bed, variants: Collection[str]) -> list[Work]:
    """Appends into one pool, which never holds a sealed page: rows are written over and over."""
    pool = bed.pool()
    whole = _Rows(bed.k, bed.v, bed.slots)
    makers: dict[str, Callable[[], list[_Rows]]] = {
        "prefill": lambda: [whole],
        "unaligned": lambda: [_unaligned(bed)],
        "step-64": lambda: _steps(bed, 64),
        "step-256": lambda: _steps(bed, 256),
    }
    return [_append_work(bed, pool, variant, makers[variant]()) for variant in variants]


def _unaligned(bed: Bed) -> _Rows:
    """Prompts of 1 to 15 tokens less than the case's, so that hardly one starts at a tile."""
    import torch

    case, device = bed.case, bed.backend.device
    less = torch.arange(case.batch, device=device) * 7 % 15 + 1
    kept = torch.arange(case.kv_len, device=device) < (case.kv_len - less)[:, None]
    slots = bed.slots[kept.flatten()]
    # The first rows of the case serve: what they hold does not matter, where they start does.
    return _Rows(bed.k[: len(slots)], bed.v[: len(slots)], slots)


def _steps(bed: Bed, rows: int) -> list[_Rows]:
    """Decode steps: each row goes to another page, at any offset."""
    import torch

    case, device = bed.case, bed.backend.device
    rows = min(rows, case.num_pages)
    page_size, made = case.shape.page_size, []
    for _ in range(STEPS):
        pages = torch.randperm(case.num_pages, generator=bed.generator, device=device)[:rows]
        offsets = torch.randint(page_size, (rows,), generator=bed.generator, device=device)
        made.append(_Rows(bed.k[:rows], bed.v[:rows], pages * page_size + offsets))
    return made


def _append_work(bed: Bed, pool: Pool, variant: str, batches: list[_Rows]) -> Work:
    page_size, layout = bed.case.shape.page_size, bed.case.shape.layout
    rows = len(batches[0].slots)
    pages = len((batches[0].slots // page_size).unique())

    def call(some: _Rows) -> Call:
        return lambda ops: ops.append(pool.kv, pool.state, some.k, some.v, some.slots)

    return Work(
        "append",
        variant,
        f"{rows} rows into {pages} pages",
        [call(some) for some in batches],
        operator=call(batches[0]),
        wrong=lambda done: _append_wrong(bed, pool, batches[:done]),
        traffic=lambda: bytes_model.append(layout, rows, pages),
        poison=lambda: bed.poison(pool),
        settled=lambda: refusals(pool),
        bandwidth=len(batches) == 1,
    )


def _append_wrong(bed: Bed, pool: Pool, batches: list[_Rows]) -> str:
    """Every slot holds the row last written to it, or still the poison."""
    import torch

    shape, device = bed.case.shape, bed.backend.device
    every = torch.arange(bed.case.num_pages, device=device)
    got = bed.backend.launch.decode_pages(pool.kv, pool.state, every, k=bed.out[0], v=bed.out[1])
    want = torch.empty(
        bed.case.tokens, shape.num_kv_heads, shape.head_dim, dtype=torch.int16, device=device
    )
    for name, values in zip("kv", got, strict=True):
        want.fill_(-1)
        for some in batches:
            want[some.slots] = getattr(some, name).view(torch.int16)
        if wrong := differing(values, want, name):
            return wrong
    return refusals(pool)


# ---- encode ------------------------------------------------------------------------------------
def encode_works(bed: Bed, variants: Collection[str]) -> list[Work]:
    """Encodes of every page, each variant in a pool of its own."""
    return [_encode_work(bed, variant) for variant in variants]


def _encode_work(bed: Bed, variant: str) -> Work:
    import torch

    case, in_place = bed.case, variant == "in-place"
    layout, pages = case.shape.layout, bed.pages
    pool = bed.filled(spare_pages=0 if in_place else case.num_pages)
    destinations = None
    if not in_place:  # the homes of the spare pages
        destinations = pool.kv.places[pages + case.num_pages, :, 0].contiguous()
    lengths = torch.empty(
        case.num_pages, layout.spans, dtype=torch.int32, device=bed.backend.device
    )
    right: list[Tensor] = []

    def call(ops: Any) -> None:
        ops.encode(pool.kv, pool.state, pages, destinations=destinations, lengths=lengths)

    def operator(ops: Any) -> Any:
        return ops.encode(pool.kv, pool.state, pages, destinations=destinations)

    def adopt(result: Any) -> None:
        lengths.copy_(result)

    def poison() -> None:
        lengths.fill_(-1)
        if not in_place:
            bed.poison(pool, case.num_pages)

    def wrong(done: int) -> str:
        found = _encode_wrong(bed, pool, lengths, destinations)
        if not found:
            right[:] = [lengths.clone()]
        return found

    def settled() -> str:
        same = torch.equal(lengths, right[0])
        return refusals(pool) or ("" if same else "a timed launch gave other lengths")

    return Work(
        "encode",
        variant,
        f"{case.num_pages} pages",
        [call],
        operator=operator,
        wrong=wrong,
        traffic=lambda: bytes_model.encode(layout, right[0].flatten().tolist(), in_place=in_place),
        adopt=adopt,
        prepare=_restore(pool, with_bytes=in_place),
        poison=poison,
        settled=settled,
    )


def _restore(pool: Pool, *, with_bytes: bool) -> Callable[[], None]:
    """Return what brings a pool back to how it is now."""
    state = pool.state
    changing = [pool.kv.places, state.written, state.sealed, state.claimed, state.refused]
    if with_bytes:
        changing.append(pool.kv.pool)
    kept = [x.clone() for x in changing]

    def restore() -> None:
        for now, before in zip(changing, kept, strict=True):
            now.copy_(before)

    return restore


def _encode_wrong(bed: Bed, pool: Pool, lengths: Tensor, destinations: Tensor | None) -> str:
    """Lengths, places and bytes are the reference's on some pages, and all pages decode right."""
    import torch

    kv, want, pages = pool.kv, bed.reference, bed.pages
    if found := refusals(pool):
        return found
    unsealed = int((lengths <= 0).any(1).sum())
    if unsealed:
        return f"{unsealed} of {len(pages)} pages were not sealed"
    start, length = kv.places[pages].unbind(-1)
    if not torch.equal(length, lengths):
        return "places hold other lengths than were returned"
    if destinations is not None and not torch.equal(start, destinations):
        return "spans were not put where they were to go"
    if not torch.equal(lengths[want.which].long(), want.lengths):
        return "lengths differ from the reference backend's"
    column = torch.arange(want.spans.shape[-1], device=start.device)
    at = (start[want.which].long() & 0xFFFFFFFF) * SPAN_ALIGNMENT
    # Past a span's length lies something else: the reference has zeros there.
    inside = column < want.lengths[..., None]
    last = kv.pool.numel() - 1
    found_bytes = kv.pool[(at[..., None] + column).clamp(max=last)] * inside
    if not torch.equal(found_bytes, want.spans):
        return "bytes differ from the reference backend's"
    k, v = bed.out
    k.view(torch.int16).fill_(-1)
    v.view(torch.int16).fill_(-1)
    return bed.differing(*bed.backend.launch.decode_pages(kv, pool.state, pages, k=k, v=v))


# ---- decode_pages ------------------------------------------------------------------------------
def decode_works(bed: Bed, variants: Collection[str]) -> list[Work]:
    """Decodes of every page, each variant from a pool of its own, into the same buffers."""
    return [_decode_work(bed, variant) for variant in variants]


def _decode_work(bed: Bed, variant: str) -> Work:
    import torch

    pool, (k, v) = bed.filled(), bed.out
    if variant == "sealed":
        bed.backend.launch.encode(pool.kv, pool.state, bed.pages)

    def call(ops: Any) -> None:
        ops.decode_pages(pool.kv, pool.state, bed.pages, k=k, v=v)

    def operator(ops: Any) -> Any:
        return ops.decode_pages(pool.kv, pool.state, bed.pages)

    def adopt(result: Any) -> None:
        for x, made in zip((k, v), result, strict=True):
            x.copy_(made)

    def poison() -> None:
        for x in (k, v):
            x.view(torch.int16).fill_(-1)

    def traffic() -> bytes_model.Traffic:
        length = pool.kv.places[bed.pages, :, 1].long() & 0xFFFFFFFF
        return bytes_model.decode_pages(bed.case.shape.layout, length.flatten().tolist())

    return Work(
        "decode_pages",
        variant,
        f"{bed.case.num_pages} pages",
        [call],
        operator=operator,
        adopt=adopt,
        wrong=lambda done: refusals(pool) or bed.differing(k, v),
        traffic=traffic,
        poison=poison,
    )
