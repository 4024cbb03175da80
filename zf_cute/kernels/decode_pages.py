"""Pages, raw or sealed, back to ordinary keys and values: one warp for 16 tokens of one head.

The warp finds its span in the place table and its blocks by adding sizes from the descriptors,
reads low bytes, codes and exceptions straight into registers, rebuilds fragments there, turns them
into token rows in shared memory and writes rows out 16 bytes a lane.  Warps share nothing, so there
is no barrier.

Refused: a page id out of range, a place outside the pool, blocks outside their span and descriptors
that no writer makes.  Nothing outside a span is read; the tokens come out as zeros and the
refusal is counted.  Unlike the reference backend the kernel does not look into exception entries.

Limits   BF16 pages of any shape that PageLayout allows.
Bytes    reads the span once, writes each value once: 1.75 bytes moved for each byte written on
         real KV.
Profile  ncu -k regex:^zf_decode_pages --clock-control none zf-profile bench --kernel decode_pages
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, Uint16, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

from zf_cute.compile_key import CompileKey
from zf_cute.kernels import blocks, ptx, refusals
from zf_cute.kernels.index import index_type
from zf_cute.kernels.rebuild import high_bytes, join, patch
from zf_cute.kernels.tile import TokenTile
from zf_layouts import HEAD_DIMS, PARTS, ROPES
from zf_layouts.block import (
    COMPRESSED_KIND,
    EXCEPTIONS,
    EXCEPTIONS_KIND,
    LANES,
    LOW_PLANE,
    MAX_EXCEPTIONS,
    RAW,
    RAW_KIND,
)
from zf_layouts.fragment import TILE
from zf_layouts.page import SPAN_ALIGNMENT, UNIT

WARPS = 4
MIN_CTAS = 8
"""CTAs that an SM should hold: caps registers at 64, so that 32 warps wait for memory at a time.
With head_dim 256 shared memory allows 6."""

GROUP = 2
"""Blocks whose loads are in flight at once in a warp.  Four need more registers: 525 us at 80 of
them against 483 for 1.88 GB moved, 557 without a cap (H200, dsl 4.8.1)."""


def exchanged(entry: Uint32) -> tuple[Uint32, ...]:
    """A block's entries in every lane, from lanes 0..3 that hold one each."""
    return tuple(cute.arch.shuffle_sync(entry, i) for i in range(MAX_EXCEPTIONS))


class DecodePagesKernel:
    """Statics here; the launch in __call__, the device code below."""

    def __init__(self, key: CompileKey) -> None:
        """Take the statics from a key."""
        self.key = key
        self.head_dim = key.head_dim
        self.pairs = key.head_dim // (2 * TILE)
        self.group = min(GROUP, self.pairs)

    @staticmethod
    def variants(arch: str = "sm_90a") -> tuple[CompileKey, ...]:
        """Every key of this kernel."""
        return tuple(
            CompileKey("decode_pages", head_dim=head_dim, rope=rope, index=index, arch=arch)
            for head_dim in HEAD_DIMS
            for rope in ROPES
            for index in ("int32", "int64")
        )

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of a launch."""
        items, spans = cute.sym_int(), cute.sym_int()
        page_size, heads = cute.sym_int(), cute.sym_int()
        rows = (items, page_size, heads, self.head_dim)
        order = (3, 2, 1, 0)
        return (
            make_fake_compact_tensor(Uint8, (cute.sym_int64(),), assumed_align=SPAN_ALIGNMENT),
            make_fake_compact_tensor(
                Int32, (cute.sym_int(), spans, 2), stride_order=(2, 1, 0), assumed_align=8
            ),
            make_fake_compact_tensor(Int32, (len(refusals.Refusal),)),
            make_fake_compact_tensor(index_type(self.key.index), (items,)),
            make_fake_compact_tensor(BFloat16, rows, stride_order=order, assumed_align=16),
            make_fake_compact_tensor(BFloat16, rows, stride_order=order, assumed_align=16),
            *(Int32(1) for _ in range(4)),
            Int64(1),
        )

    @cute.jit
    def __call__(
        self,
        pool: cute.Tensor,  # (bytes,) u8
        places: cute.Tensor,  # (pages, spans, 2) i32
        refused: cute.Tensor,  # (refusals,) i32
        ids: cute.Tensor,  # (items,) page ids
        k: cute.Tensor,  # (items, page_size, heads, head_dim) bf16: out
        v: cute.Tensor,  # same
        heads_per_span: Int32,
        blocks_log2: Int32,  # log2 of the blocks in a part
        head_metadata: Int32,  # bytes
        max_exceptions: Int32,
        pool_bytes: Int64,  # shapes in kernels have 32 bits
        stream: Any,
    ) -> None:
        """Launch one warp for every 16 tokens of every head."""
        items, page_size, heads, _ = k.shape
        tasks = items * (page_size // TILE) * heads  # at 4 KiB or more each, 31 bits are enough
        self.kernel(
            pool, places, refused, ids, k, v, heads_per_span, blocks_log2, head_metadata,
            max_exceptions, pool_bytes,
        ).launch(
            grid=((tasks + WARPS - 1) // WARPS, 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=MIN_CTAS, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        pool: cute.Tensor,
        places: cute.Tensor,
        refused: cute.Tensor,
        ids: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        heads_per_span: Int32,
        blocks_log2: Int32,
        head_metadata: Int32,
        max_exceptions: Int32,
        pool_bytes: Int64,
    ) -> None:
        """Decode 16 tokens of one head."""
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        values = TILE * self.head_dim
        rows = smem.allocate_tensor(Uint16, cute.make_layout(WARPS * values), byte_alignment=128)
        tile = TokenTile(self.head_dim, self.key.rope, rows.iterator + warp * values)
        items, page_size, heads, _ = k.shape
        token_tiles = page_size // TILE
        # Heads run fastest: neighbouring warps read one span and write one token's row.
        task = cta * WARPS + warp
        group = task // heads
        head = task - group * heads
        item = group // token_tiles
        token_tile = group - item * token_tiles
        if item < items:
            span = head // heads_per_span
            in_span = head - span * heads_per_span
            raw_head_bytes = head_metadata + (2 * RAW_KIND.nbytes << blocks_log2)
            start, units = self.find(
                pool, pool_bytes, places, ids[item], span, heads_per_span * raw_head_bytes
            )
            if (units < 0) & (head == 0) & (token_tile == 0) & (lane == 0):
                refusals.count(refused, Int32(refusals.Refusal.PAGE_OUTSIDE), Int32(1))
            # Both parts' metadata before either's blocks: one wait on memory for the two.
            ahead = token_tile * self.pairs
            entry = start + in_span * head_metadata
            limits = heads_per_span * head_metadata // UNIT, units
            k_unit, k_kinds = self.look_up(entry, limits, ahead, blocks_log2, max_exceptions, lane)
            entry += 4 + cutlass.max(Int32(1) << blocks_log2, 4)
            v_unit, v_kinds = self.look_up(entry, limits, ahead, blocks_log2, max_exceptions, lane)
            malformed = Int32(k_unit < 0) + Int32(v_unit < 0)
            if (malformed != 0) & (units >= 0) & (token_tile == 0) & (lane == 0):
                refusals.count(refused, Int32(refusals.Refusal.SPAN_MALFORMED), malformed)
            out_row = (Int64(item) * page_size + token_tile * TILE) * heads + head
            for p in cutlass.range_constexpr(len(PARTS)):
                unit, kinds, out = ((k_unit, k_kinds, k), (v_unit, v_kinds, v))[p]
                self.decode_part(PARTS[p], tile, start, unit, kinds, ahead, lane)
                cute.arch.sync_warp()
                for step in cutlass.range_constexpr(tile.steps):
                    token, row_unit = tile.place(step, lane)
                    row = (out_row + token * heads) * (2 * self.head_dim)
                    words = tile.take(step, lane)
                    at = out.iterator.toint() + row + row_unit * 16
                    ptx.store(at, [words[i] for i in range(4)])
                cute.arch.sync_warp()

    @cute.jit
    def find(
        self,
        pool: cute.Tensor,
        pool_bytes: Int64,
        places: cute.Tensor,
        page_id: Any,
        span: Int32,
        raw_span_bytes: Int32,
    ) -> tuple[Int64, Int32]:
        """Address of a span and its length in units of 16 bytes.

        A length of 0 says that the place is none of a span, -1 that there is no such page.
        """
        start, units = Int64(0), Int32(-1)
        if (page_id >= 0) & (page_id < places.shape[0]):
            at = places.iterator + (Int64(page_id) * places.shape[1] + span) * 2
            place = ptx.load(at.toint(), 2, Int32)
            start = ptx.span_address(pool.iterator, place[0])
            length = Int64(place[1]) & 0xFFFFFFFF
            units = Int32(0)
            inside = start + length <= pool.iterator.toint() + pool_bytes
            if inside & (length % UNIT == 0) & (length <= raw_span_bytes):
                units = Int32(length // UNIT)
        return start, units

    @cute.jit
    def look_up(
        self,
        entry: Int64,
        limits: tuple[Int32, Int32],
        ahead: Int32,
        blocks_log2: Int32,
        max_exceptions: Int32,
        lane: Int32,
    ) -> tuple[Int32, Int32]:
        """Where block `ahead` of a part lies, in units from the span's start, and lane i's kind i.

        `entry` is the address of the part's metadata, and its blocks must lie between the two
        `limits`; -1 where they do not, or where a descriptor is none.
        """
        metadata_units, span_units = limits
        unit, mine = Int32(-1), Int32(0)
        if span_units >= metadata_units:
            first, sizes = Int32(ptx.load_one(entry, Uint32)), Int32(0)
            if lane < Int32(1) << blocks_log2:
                mine = Int32(ptx.load_one(entry + 4 + lane, Uint8))
                sizes = self.units_or_many(mine, max_exceptions)
            total = cute.arch.warp_redux_sync(sizes, "add")
            before = cute.arch.warp_redux_sync(sizes if lane < ahead else Int32(0), "add")
            # A start past 2**31 is negative here, and refused with the others.
            if (first >= metadata_units) & (total <= span_units) & (first <= span_units - total):
                unit = first + before
        return unit, mine

    @cute.jit
    def decode_part(
        self,
        part: cutlass.Constexpr,
        tile: TokenTile,
        span: Int64,
        unit: Int32,
        kinds: Int32,
        ahead: Int32,
        lane: Int32,
    ) -> None:
        """This warp's tokens of K or of V into its tile; zeros where `unit` is negative."""
        if unit >= 0:
            for group in cutlass.range_constexpr(0, self.pairs, self.group):
                unit = self.decode_group(part, tile, span, unit, group, kinds, ahead, lane)
        else:
            for pair in cutlass.range_constexpr(self.pairs):
                for t in cutlass.range_constexpr(2):
                    tile.put_fragment(part, pair, t, lane, [Uint32(0)] * 4)

    @cute.jit
    def units_or_many(self, descriptor: Int32, max_exceptions: Int32) -> Int32:
        """Size of a block; more than any span holds for a descriptor that no writer makes."""
        units = blocks.block_units(descriptor)
        last = Int32(EXCEPTIONS_KIND.last)
        if max_exceptions == 0:
            last = Int32(COMPRESSED_KIND.last)
        if (descriptor > last) & (descriptor != RAW):
            units = Int32(1 << 25)  # 32 blocks of this size still fit 31 bits
        return units

    @cute.jit
    def decode_group(
        self,
        part: cutlass.Constexpr,
        tile: TokenTile,
        span: Int64,
        unit: Int32,
        group: cutlass.Constexpr,
        descriptors: Int32,
        ahead: Int32,
        lane: Int32,
    ) -> Int32:
        """Some blocks side by side: all loads, then the rebuild; returns where the next one is."""
        low = cute.make_rmem_tensor(4 * self.group, Uint32)  # raw: tile 0
        rest = cute.make_rmem_tensor(4 * self.group, Uint32)  # codes; raw: tile 1
        entry = cute.make_rmem_tensor(self.group, Uint32)  # lanes 0..3 hold one each
        kind = cute.make_rmem_tensor(self.group, Int32)
        for b in cutlass.range_constexpr(self.group):
            kind[b] = cute.arch.shuffle_sync(descriptors, ahead + group + b)
            at = span + Int64(unit) * UNIT
            words = ptx.load(at + lane * 16)
            for i in cutlass.range_constexpr(4):
                low[4 * b + i] = words[i]
            if kind[b] == RAW:
                words = ptx.load(at + RAW_KIND.nbytes // 2 + lane * 16)
                for i in cutlass.range_constexpr(4):
                    rest[4 * b + i] = words[i]
            else:
                pair = ptx.load(at + LOW_PLANE + lane * 8, 2)
                rest[4 * b], rest[4 * b + 1] = pair[0], pair[1]
                entry[b] = Uint32(0)
                if (kind[b] >= EXCEPTIONS) & (lane < MAX_EXCEPTIONS):
                    entry[b] = ptx.load_one(at + COMPRESSED_KIND.nbytes + lane * 4, Uint32)
            unit += blocks.block_units(kind[b])
        for b in cutlass.range_constexpr(self.group):
            self.rebuild_block(part, tile, group + b, b, low, rest, entry, kind[b], lane)
        return unit

    @cute.jit
    def rebuild_block(
        self,
        part: cutlass.Constexpr,
        tile: TokenTile,
        pair: cutlass.Constexpr,
        b: cutlass.Constexpr,
        low: cute.Tensor,
        rest: cute.Tensor,
        entry: cute.Tensor,
        kind: Int32,
        lane: Int32,
    ) -> None:
        """Both fragments of a block, from registers to the tile's rows."""
        words = cute.make_rmem_tensor(8, Uint32)
        if kind == RAW:
            for i in cutlass.range_constexpr(4):
                words[i], words[4 + i] = low[4 * b + i], rest[4 * b + i]
        else:
            ops = ptx.DeviceOps
            half_base_x4 = blocks.spread(kind & (EXCEPTIONS - 1))
            high = cute.make_rmem_tensor(4, Uint32)
            for t in cutlass.range_constexpr(2):
                first, second = high_bytes(rest[4 * b + t], half_base_x4, ops)
                high[2 * t], high[2 * t + 1] = first, second
            if kind >= EXCEPTIONS:
                entries = exchanged(entry[b])
                for q in cutlass.range_constexpr(4):
                    high[q] = patch(high[q], Uint32(lane * 4 + q), entries, ops)
            for t in cutlass.range_constexpr(2):
                at = 4 * b + 2 * t
                both = (low[at], low[at + 1]), (high[2 * t], high[2 * t + 1])
                four = join(*both, ops)
                for i in cutlass.range_constexpr(4):
                    words[4 * t + i] = four[i]
        for t in cutlass.range_constexpr(2):
            tile.put_fragment(part, pair, t, lane, [words[4 * t + i] for i in range(4)])
