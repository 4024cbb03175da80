"""Pages raw and empty again: raw metadata at their homes, places, states; one warp a span.

Refused: a page id out of range, which is counted.

Profile  ncu -k regex:^zf_clear --clock-control none
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor

from zf_cute.compile_key import CompileKey
from zf_cute.kernels import ptx, refusals
from zf_cute.kernels.index import index_type
from zf_layouts.block import LANES
from zf_layouts.page import SPAN_ALIGNMENT, UNIT


class ClearKernel:
    """Statics here; the launch in __call__, the device code below."""

    def __init__(self, key: CompileKey) -> None:
        """Take the statics from a key."""
        self.key = key

    @staticmethod
    def variants(arch: str = "sm_90a") -> tuple[CompileKey, ...]:
        """Every key of this kernel."""
        return tuple(CompileKey("clear", index=index, arch=arch) for index in ("int32", "int64"))

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of a launch."""
        pages, spans = cute.sym_int(), cute.sym_int()
        return (
            make_fake_compact_tensor(Uint8, (cute.sym_int64(),), assumed_align=SPAN_ALIGNMENT),
            make_fake_compact_tensor(
                Int32, (pages, spans, 2), stride_order=(2, 1, 0), assumed_align=8
            ),
            make_fake_compact_tensor(
                Int32, (pages, spans, 2), stride_order=(2, 1, 0), assumed_align=8
            ),
            make_fake_compact_tensor(Int64, (pages,)),
            make_fake_compact_tensor(Int32, (pages, spans), stride_order=(1, 0)),
            make_fake_compact_tensor(Int32, (pages,)),
            make_fake_compact_tensor(Int32, (len(refusals.Refusal),)),
            make_fake_compact_tensor(Uint8, (cute.sym_int(),), assumed_align=UNIT),
            make_fake_compact_tensor(index_type(self.key.index), (cute.sym_int(),)),
        )

    @cute.jit
    def __call__(
        self,
        pool: cute.Tensor,  # (bytes,) u8
        places: cute.Tensor,  # (pages, spans, 2) i32
        homes: cute.Tensor,  # same: places of the pages when raw
        written: cute.Tensor,  # (pages,) i64
        sealed: cute.Tensor,  # (pages, spans) i32
        claimed: cute.Tensor,  # (pages,) i32: 1 + the item that sealed a page
        refused: cute.Tensor,  # (refusals,) i32
        metadata: cute.Tensor,  # (bytes,) u8: of a raw span
        ids: cute.Tensor,  # (items,) page ids
        stream: Any,
    ) -> None:
        """Launch one warp for every span of every page."""
        self.kernel(pool, places, homes, written, sealed, claimed, refused, metadata, ids).launch(
            grid=(ids.shape[0] * sealed.shape[1], 1, 1), block=(LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        pool: cute.Tensor,
        places: cute.Tensor,
        homes: cute.Tensor,
        written: cute.Tensor,
        sealed: cute.Tensor,
        claimed: cute.Tensor,
        refused: cute.Tensor,
        metadata: cute.Tensor,
        ids: cute.Tensor,
    ) -> None:
        """Clear a span."""
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        spans = sealed.shape[1]
        item, span = cta // spans, cta % spans
        page_id = ids[item]
        if (page_id >= 0) & (page_id < written.shape[0]):
            page = Int32(page_id)
            at = Int64(page) * spans + span
            home = ptx.load((homes.iterator + 2 * at).toint(), 2, Int32)
            to = ptx.span_address(pool.iterator, home[0])
            source = metadata.iterator.toint()
            for i in cutlass.range(lane, metadata.shape[0] // UNIT, LANES, unroll=1):
                words = ptx.load(source + i * UNIT)
                ptx.store(to + i * UNIT, [words[j] for j in range(4)])
            if lane == 0:
                ptx.store((places.iterator + 2 * at).toint(), [home[0], home[1]], Int32)
                ptx.store_one((sealed.iterator + at).toint(), 0, Int32)
                if span == 0:
                    ptx.store_one((written.iterator + page).toint(), 0, Int64)
                    ptx.store_one((claimed.iterator + page).toint(), 0, Int32)
        elif (span == 0) & (lane == 0):
            refusals.count(refused, Int32(refusals.Refusal.PAGE_OUTSIDE), Int32(1))
