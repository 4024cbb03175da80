"""Raw full pages to sealed pages: one CTA a span.

The CTA claims the span, reads its blocks a chunk at a time into registers (raw blocks lie in
fragment order, so a lane's 16 values are two 16-byte loads), lets each warp choose how its blocks
are stored, adds up sizes across the CTA, and writes the blocks one after another without gaps.
Encoded blocks never lie further on than they did raw, and a chunk is in registers before its first
byte is written, so the destination may be the span's own place.

Refused, on the device and without a word to the host but a count: a page id out of range, a page
that is not full or sealed already, an id given before, a destination outside the pool.  Such a page
stays as it was, all spans of it, and their reported lengths are 0.

Limits   BF16 pages of any shape that PageLayout allows; spans start at multiples of 128 bytes.
Bytes    reads the raw span, writes the sealed one: 1.75 bytes moved for each raw byte on real KV.
Profile  ncu -k regex:^zf_encode --clock-control none zf-profile bench --kernel encode
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

from zf_cute.compile_key import CompileKey
from zf_cute.kernels import blocks, ptx, refusals
from zf_cute.kernels.index import index_type
from zf_cute.kernels.policy import ENCODE_GROUP as GROUP
from zf_cute.kernels.policy import ENCODE_MAX_WARPS as MAX_WARPS
from zf_layouts.block import COMPRESSED_KIND, EXCEPTIONS, LANES, LOW_PLANE, RAW, RAW_KIND
from zf_layouts.page import SPAN_ALIGNMENT, UNIT


class EncodeKernel:
    """Statics here; the launch in __call__, the device code below."""

    def __init__(self, key: CompileKey) -> None:
        """Take the statics from a key."""
        self.key = key

    @staticmethod
    def variants(arch: str = "sm_90a") -> tuple[CompileKey, ...]:
        """Every key of this kernel."""
        return tuple(CompileKey("encode", index=index, arch=arch) for index in ("int32", "int64"))

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of a launch."""
        pages, items, spans = cute.sym_int(), cute.sym_int(), cute.sym_int()
        return (
            make_fake_compact_tensor(Uint8, (cute.sym_int64(),), assumed_align=SPAN_ALIGNMENT),
            make_fake_compact_tensor(
                Int32, (pages, spans, 2), stride_order=(2, 1, 0), assumed_align=8
            ),
            make_fake_compact_tensor(Int64, (pages,)),
            make_fake_compact_tensor(Int32, (pages, spans), stride_order=(1, 0)),
            make_fake_compact_tensor(Int32, (pages,)),
            make_fake_compact_tensor(Int32, (len(refusals.Refusal),)),
            make_fake_compact_tensor(index_type(self.key.index), (items,)),
            make_fake_compact_tensor(Int32, (items, spans), stride_order=(1, 0)),
            make_fake_compact_tensor(Int32, (items, spans), stride_order=(1, 0)),
            *(Int32(1) for _ in range(7)),
            Int64(1),
        )

    @cute.jit
    def __call__(
        self,
        pool: cute.Tensor,  # (bytes,) u8
        places: cute.Tensor,  # (pages, spans, 2) i32
        written: cute.Tensor,  # (pages,) i64: bit t is set once token t is there
        sealed: cute.Tensor,  # (pages, spans) i32
        claimed: cute.Tensor,  # (pages,) i32: 1 + the item that seals a page
        refused: cute.Tensor,  # (refusals,) i32
        ids: cute.Tensor,  # (items,) page ids
        destinations: cute.Tensor,  # (items, spans) i32: starts in units of 128 bytes
        lengths: cute.Tensor,  # (items, spans) i32: out, bytes
        in_place: Int32,  # 1: destinations are not read
        page_size: Int32,
        heads_per_span: Int32,
        blocks_log2: Int32,  # log2 of the blocks in a part
        head_metadata: Int32,  # bytes
        max_exceptions: Int32,
        warps: Int32,  # of a CTA, 1 to MAX_WARPS
        pool_bytes: Int64,  # shapes in kernels have 32 bits
        stream: Any,
    ) -> None:
        """Launch one CTA for every span of every page."""
        items, spans = lengths.shape
        self.kernel(
            pool, places, written, sealed, claimed, refused, ids, destinations, lengths, in_place,
            page_size, heads_per_span, blocks_log2, head_metadata, max_exceptions, warps,
            pool_bytes,
        ).launch(
            grid=(items * spans, 1, 1),
            block=(warps * LANES, 1, 1),
            max_number_threads=(MAX_WARPS * LANES, 1, 1),
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        pool: cute.Tensor,
        places: cute.Tensor,
        written: cute.Tensor,
        sealed: cute.Tensor,
        claimed: cute.Tensor,
        refused: cute.Tensor,
        ids: cute.Tensor,
        destinations: cute.Tensor,
        lengths: cute.Tensor,
        in_place: Int32,
        page_size: Int32,
        heads_per_span: Int32,
        blocks_log2: Int32,
        head_metadata: Int32,
        max_exceptions: Int32,
        warps: Int32,
        pool_bytes: Int64,
    ) -> None:
        """Claim a span, encode it, report its place and length."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        spans = lengths.shape[1]
        item, span = cta // spans, cta % spans
        smem = SmemAllocator()
        mine = smem.allocate_tensor(Int32, cute.make_layout(1))
        units = smem.allocate_tensor(Int32, cute.make_layout(2 * MAX_WARPS), byte_alignment=16)
        if thread == 0:
            raw_head_bytes = head_metadata + (2 * RAW_KIND.nbytes << blocks_log2)
            mine[0] = self.claim(
                written, sealed, claimed, refused, ids[item], item, span, page_size, destinations,
                spans * (1 - in_place), pool_bytes - heads_per_span * raw_head_bytes,
            )  # fmt: skip
        cute.arch.sync_threads()
        if mine[0] == 0:
            if thread == 0:
                lengths[item, span] = 0
        else:
            page = Int32(ids[item])
            start = places[page, span, 0]
            to_start = start
            if in_place == 0:
                to_start = destinations[item, span]
            length = self.encode_span(
                ptx.span_address(pool.iterator, start),
                ptx.span_address(pool.iterator, to_start),
                units,
                heads_per_span,
                blocks_log2,
                head_metadata,
                max_exceptions,
                warps,
            )
            if thread == 0:
                places[page, span, 0] = to_start
                places[page, span, 1] = length
                lengths[item, span] = length

    @cute.jit
    def claim(
        self,
        written: cute.Tensor,
        sealed: cute.Tensor,
        claimed: cute.Tensor,
        refused: cute.Tensor,
        page_id: Any,
        item: Int32,
        span: Int32,
        page_size: Int32,
        destinations: cute.Tensor,
        n_destinations: Int32,
        last_start: Int64,
    ) -> Int32:
        """Take a span of a page for an item, and mark it sealed; 0 where that must not be.

        The first of an item's CTAs takes the page, all spans of it: of two items with one id, one
        seals the whole page and the other nothing.  What an earlier launch has taken is sealed.
        """
        mine = Int32(0)
        refusal = Int32(refusals.Refusal.PAGE_OUTSIDE)
        if (page_id >= 0) & (page_id < written.shape[0]):
            page = Int32(page_id)
            refusal = Int32(refusals.Refusal.PAGE_NOT_SEALABLE)
            place = sealed.iterator + (Int64(page) * sealed.shape[1] + span)
            is_sealed = cute.arch.load(place, Int32, sem="relaxed", scope="gpu")
            missing = ~written[page] << (64 - Int64(page_size))
            if (missing == 0) & (is_sealed == 0):
                outside = Int32(0)
                for s in cutlass.range(n_destinations, unroll=1):
                    start = (Int64(destinations[item, s]) & 0xFFFFFFFF) * SPAN_ALIGNMENT
                    outside += Int32(start > last_start)
                if outside != 0:
                    refusal = Int32(refusals.Refusal.DESTINATION_OUTSIDE)
                else:
                    owner = cute.arch.atomic_cas(
                        claimed.iterator + page,
                        cmp=Int32(0),
                        val=item + 1,
                        sem="relaxed",
                        scope="gpu",
                    )
                    if (owner == 0) | (owner == item + 1):
                        cute.arch.atomic_exch(place, Int32(1), sem="relaxed", scope="gpu")
                        mine = Int32(1)
        if (mine == 0) & (span == 0):  # an item counts once
            refusals.count(refused, refusal, Int32(1))
        return mine

    @cute.jit
    def encode_span(
        self,
        source: Int64,
        to: Int64,
        units: cute.Tensor,
        heads_per_span: Int32,
        blocks_log2: Int32,
        head_metadata: Int32,
        max_exceptions: Int32,
        warps: Int32,
    ) -> Int32:
        """Encode all blocks of a span and write its metadata; returns its length in bytes."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        n_blocks = heads_per_span << (blocks_log2 + 1)
        metadata = heads_per_span * head_metadata
        # Padding and unused descriptors are 0; the barrier of the first chunk orders this before
        # what is written over it.
        for i in cutlass.range(thread, metadata // UNIT, warps * LANES, unroll=1):
            ptx.store(to + i * UNIT, [Uint32(0)] * 4)
        raw = cute.make_rmem_tensor(GROUP * blocks.LANE_WORDS, Uint32)
        kinds = cute.make_rmem_tensor(GROUP, Int32)
        end = metadata // UNIT  # where the next block goes, in units of 16 bytes
        half = Int32(0)  # of `units`: chunks take turns
        for first in cutlass.range(0, n_blocks, warps * GROUP, unroll=1):
            mine = first + warp * GROUP
            here = mine < n_blocks
            size = Int32(0)
            if here:
                self.load_group(source + metadata + Int64(mine) * RAW_KIND.nbytes, raw, lane)
                for b in cutlass.range_constexpr(GROUP):
                    words = [raw[b * blocks.LANE_WORDS + i] for i in range(blocks.LANE_WORDS)]
                    kinds[b] = blocks.choose(words, max_exceptions)
                    size += blocks.block_units(kinds[b])
            if lane == 0:
                units[half + warp] = size
            # All of the chunk is in registers from here on: its bytes may be overwritten.
            cute.arch.sync_threads()
            other = Int32(0)
            if lane < warps:
                other = units[half + lane]
            total = cute.arch.warp_redux_sync(other, "add")
            before = cute.arch.warp_redux_sync(other if lane < warp else Int32(0), "add")
            if here:
                self.write_group(
                    to, end + before, raw, kinds, mine, blocks_log2, head_metadata, lane
                )
            end += total
            half = MAX_WARPS - half
        return end * UNIT

    @cute.jit
    def load_group(self, source: Int64, raw: cute.Tensor, lane: Int32) -> None:
        """A lane's words of four raw blocks: all loads before the first use."""
        for b in cutlass.range_constexpr(GROUP):
            for tile in cutlass.range_constexpr(2):
                at = source + (b * RAW_KIND.nbytes + tile * RAW_KIND.nbytes // 2) + lane * 16
                words = ptx.load(at)
                for i in cutlass.range_constexpr(4):
                    raw[b * blocks.LANE_WORDS + tile * 4 + i] = words[i]

    @cute.jit
    def write_group(
        self,
        to: Int64,
        unit: Int32,
        raw: cute.Tensor,
        kinds: cute.Tensor,
        first: Int32,
        blocks_log2: Int32,
        head_metadata: Int32,
        lane: Int32,
    ) -> None:
        """Write four blocks from `unit` on, their descriptors, and the starts of their parts."""
        for b in cutlass.range_constexpr(GROUP):
            descriptor = kinds[b]
            if lane == b:
                self.write_metadata(to, unit, descriptor, first + b, blocks_log2, head_metadata)
            words = [raw[b * blocks.LANE_WORDS + i] for i in range(blocks.LANE_WORDS)]
            self.write_block(to + Int64(unit) * UNIT, words, descriptor, lane)
            unit += blocks.block_units(descriptor)

    @cute.jit
    def write_metadata(
        self,
        to: Int64,
        unit: Int32,
        descriptor: Int32,
        block: Int32,
        blocks_log2: Int32,
        head_metadata: Int32,
    ) -> None:
        """Descriptor of the span's `block`, and its part's start if it is the part's first."""
        part = block >> blocks_log2
        number = block - (part << blocks_log2)
        descriptor_bytes = cutlass.max(Int32(1) << blocks_log2, 4)
        entry = to + (part >> 1) * head_metadata + (part & 1) * (4 + descriptor_bytes)
        ptx.store_one(entry + 4 + number, descriptor, Uint8)
        if number == 0:
            ptx.store_one(entry, unit, Uint32)

    @cute.jit
    def write_block(self, at: Int64, words: Any, descriptor: Int32, lane: Int32) -> None:
        """One block, the whole warp."""
        if descriptor == RAW:
            for tile in cutlass.range_constexpr(2):
                ptx.store(
                    at + tile * RAW_KIND.nbytes // 2 + lane * 16,
                    [words[tile * 4 + i] for i in range(4)],
                )
        else:
            high = cute.make_rmem_tensor(4, Uint32)
            for q, word in enumerate(blocks.high_words(words)):
                high[q] = word
            half_base = descriptor & (EXCEPTIONS - 1)
            if descriptor >= EXCEPTIONS:
                entries = blocks.split_exceptions(high, half_base, lane)
                if lane == 0:
                    ptx.store(at + COMPRESSED_KIND.nbytes, [entries[i] for i in range(4)])
            codes = blocks.pack_codes(high, blocks.spread(half_base))
            ptx.store(at + lane * 16, blocks.low_words(words))
            ptx.store(at + LOW_PLANE + lane * 8, codes)
