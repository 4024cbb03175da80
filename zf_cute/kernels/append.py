"""New K/V rows into raw pages, in fragment order: one warp for a window of 16 rows of one head.

Rows come in the order of the slot mapping, and 16 rows that land together in a tile of 16 tokens
are moved together: token rows to shared memory, fragments from there, 512 bytes a store.  Any other
row, such as those of a decode step, is written two values of K or one of V at a time.  Which rows
form a tile is seen from the slots alone, at any row and not only at multiples of 16, so prompts of
any lengths one after another run at full speed.

Slot -1 skips a row.  Refused: a slot out of range, and a slot in a sealed page; the row is left out
and counted.  Where a slot is given twice, each of its values is one of the two.

Limits   BF16 rows of any strides; those that are dense and 16-byte aligned move 16 bytes at a time.
Bytes    reads each value once, writes it once.
Profile  ncu -k regex:^zf_append --clock-control none zf-profile bench --kernel append
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, Uint16, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor
from cutlass.memory import SmemAllocator

from zf_cute.compile_key import CompileKey
from zf_cute.kernels import ptx, refusals
from zf_cute.kernels.index import index_type
from zf_cute.kernels.tile import TokenTile
from zf_layouts import HEAD_DIMS, PARTS, ROPES, PageLayout
from zf_layouts.block import LANES, RAW_KIND, position, raw_byte
from zf_layouts.fragment import TILE, lane_value
from zf_layouts.page import SPAN_ALIGNMENT

WARPS = 4
AT_ONCE = 4
"""Single rows whose loads are in flight together."""

OWN_ROWS = ((1 << TILE) - 1) << TILE
"""Of the rows a warp looks at, those that it writes: bits 16..31."""


class AppendKernel:
    """Statics here; the launch in __call__, the device code below."""

    def __init__(self, key: CompileKey) -> None:
        """Take the statics from a key."""
        self.key = key
        self.head_dim = key.head_dim
        self.layout = PageLayout(1, key.head_dim, TILE, key.rope)  # type: ignore[arg-type]
        self.row_words = key.head_dim // (2 * LANES)  # of one part, in a lane

    @staticmethod
    def variants(arch: str = "sm_90a") -> tuple[CompileKey, ...]:
        """Every key of this kernel."""
        return tuple(
            CompileKey("append", head_dim, rope, index, vectors, arch)
            for head_dim in HEAD_DIMS
            for rope in ROPES
            for index in ("int32", "int64")
            for vectors in (True, False)
        )

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of a launch."""
        pages, spans, rows, heads = (cute.sym_int() for _ in range(4))
        wide = 8 if self.key.vectors else 1
        strides = [cute.sym_int64(divisibility=wide) for _ in range(4)]
        dense = 1 if self.key.vectors else cute.sym_int64()
        other = 1 if self.key.vectors else cute.sym_int64()
        shape, align = (rows, heads, self.head_dim), 2 * wide
        return (
            make_fake_compact_tensor(Uint8, (cute.sym_int64(),), assumed_align=SPAN_ALIGNMENT),
            make_fake_compact_tensor(
                Int32, (pages, spans, 2), stride_order=(2, 1, 0), assumed_align=8
            ),
            make_fake_compact_tensor(Int64, (pages,)),
            make_fake_compact_tensor(Int32, (pages, spans), stride_order=(1, 0)),
            make_fake_compact_tensor(Int32, (len(refusals.Refusal),)),
            make_fake_tensor(BFloat16, shape, (*strides[:2], dense), assumed_align=align),
            make_fake_tensor(BFloat16, shape, (*strides[2:], other), assumed_align=align),
            make_fake_tensor(index_type(self.key.index), (rows,), (cute.sym_int64(),)),
            *(Int32(1) for _ in range(4)),
        )

    @cute.jit
    def __call__(
        self,
        pool: cute.Tensor,  # (bytes,) u8
        places: cute.Tensor,  # (pages, spans, 2) i32
        written: cute.Tensor,  # (pages,) i64: bit t is set once token t is there
        sealed: cute.Tensor,  # (pages, spans) i32
        refused: cute.Tensor,  # (refusals,) i32
        k: cute.Tensor,  # (rows, heads, head_dim) bf16
        v: cute.Tensor,  # same
        slots: cute.Tensor,  # (rows,) page * page_size + offset
        page_size: Int32,
        heads_per_span: Int32,
        head_metadata: Int32,  # bytes
        sharers: Int32,  # warps that share the single rows of a window, 1 to 16
        stream: Any,
    ) -> None:
        """Launch `sharers` warps for every window of 16 rows of every head."""
        rows, heads, _ = k.shape
        tasks = (rows + TILE - 1) // TILE * heads * sharers
        self.kernel(
            pool, places, written, sealed, refused, k, v, slots, page_size, heads_per_span,
            head_metadata, sharers,
        ).launch(
            grid=((tasks + WARPS - 1) // WARPS, 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        pool: cute.Tensor,
        places: cute.Tensor,
        written: cute.Tensor,
        sealed: cute.Tensor,
        refused: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        slots: cute.Tensor,
        page_size: Int32,
        heads_per_span: Int32,
        head_metadata: Int32,
        sharers: Int32,
    ) -> None:
        """Write a window's tile, if one begins in it, and its single rows."""
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        values = TILE * self.head_dim
        rows = smem.allocate_tensor(
            Uint16, cute.make_layout(2 * WARPS * values), byte_alignment=128
        )
        start = rows.iterator + 2 * warp * values
        n_rows, heads, _ = k.shape
        # Sharers run slowest, heads fastest: neighbouring warps read one token's row.
        task = cta * WARPS + warp
        group = task // heads
        head = task - group * heads
        windows = (n_rows + TILE - 1) // TILE
        share = group // windows
        window = group - share * windows
        if share < sharers:
            first = window * TILE
            n_slots = written.shape[0] * page_size
            mine = self.slot(slots, first - TILE + lane, n_slots)
            tiles, singles = self.sort_rows(mine, self.slot(slots, first + TILE + lane, n_slots))
            span = head // heads_per_span
            part_bytes = page_size * self.head_dim * 2
            # Where this head's K begins in a raw span.
            in_span = (
                heads_per_span * head_metadata + (head - span * heads_per_span) * 2 * part_bytes
            )
            if (tiles != 0) & (share == 0):
                row = lowest(tiles)
                slot = cute.arch.shuffle_sync(mine, row)
                place, is_sealed = self.look_up(places, sealed, slot, span, page_size)
                if self.admit(written, refused, slot, is_sealed, page_size, TILE, head, lane):
                    both = (
                        TokenTile(self.head_dim, self.key.rope, start),
                        TokenTile(self.head_dim, self.key.rope, start + values),
                    )
                    to = ptx.span_address(pool.iterator, place) + in_span
                    offset = slot & (page_size - 1)
                    self.write_tile(
                        both, (k, v), first - TILE + row, head, to, part_bytes, offset, lane
                    )
            if singles != 0:
                for row in cutlass.range(TILE + share, LANES, AT_ONCE * sharers, unroll=1):
                    self.write_singles(
                        pool, places, written, sealed, refused, (k, v), mine, singles, first - TILE,
                        row, sharers, head, span, page_size, in_span, lane,
                    )  # fmt: skip

    @cute.jit
    def write_singles(
        self,
        pool: cute.Tensor,
        places: cute.Tensor,
        written: cute.Tensor,
        sealed: cute.Tensor,
        refused: cute.Tensor,
        rows: tuple[cute.Tensor, cute.Tensor],
        mine: Int32,
        singles: Uint32,
        before: Int32,
        row: Int32,
        stride: Int32,
        head: Int32,
        span: Int32,
        page_size: Int32,
        in_span: Int32,
        lane: Int32,
    ) -> None:
        """Up to AT_ONCE single rows, `stride` apart: all loads before the first store."""
        n = 2 * self.row_words
        words = cute.make_rmem_tensor(AT_ONCE * n, Uint32)
        slot = cute.make_rmem_tensor(AT_ONCE, Int32)
        place = cute.make_rmem_tensor(AT_ONCE, Int32)
        is_sealed = cute.make_rmem_tensor(AT_ONCE, Int32)
        single = cute.make_rmem_tensor(AT_ONCE, Int32)
        for j in cutlass.range_constexpr(AT_ONCE):
            at = row + j * stride
            slot[j] = cute.arch.shuffle_sync(mine, at % LANES)
            single[j] = Int32(at < LANES) & Int32((singles >> Uint32(at % LANES)) & 1)
            if single[j] != 0:
                place[j], is_sealed[j] = self.look_up(places, sealed, slot[j], span, page_size)
                self.load_row(rows, before + at, head, words, j * n, lane)
        for j in cutlass.range_constexpr(AT_ONCE):
            if single[j] != 0:  # noqa: SIM102  not joined with "and": to admit is to mark
                if self.admit(written, refused, slot[j], is_sealed[j], page_size, 1, head, lane):
                    to = ptx.span_address(pool.iterator, place[j]) + in_span
                    self.store_row(words, j * n, to, slot[j], page_size, lane)

    @cute.jit
    def slot(self, slots: cute.Tensor, row: Int32, n_slots: Int32) -> Int32:
        """Slot of a row; -1 where it is skipped or there is none, -2 for a slot out of range."""
        found = Int32(-1)
        if (row >= 0) & (row < slots.shape[0]):
            given = slots[row]
            if (given >= 0) & (given < n_slots):
                found = Int32(given)
            elif given != -1:
                found = Int32(-2)
        return found

    @cute.jit
    def sort_rows(self, mine: Int32, after: Int32) -> tuple[Uint32, Uint32]:
        """Where a tile begins, and which rows are single, as bits of the rows in `mine`.

        A warp sees 64 rows: its 16 (bits 16..31), the 16 before (a tile may have begun there) and
        those after (its tile may end there).  Lane i holds the slots of rows i and 32 + i.
        """
        lane = cute.arch.lane_idx()
        next_mine = cute.arch.shuffle_sync_down(mine, 1)
        next_after = cute.arch.shuffle_sync_down(after, 1)
        first_after = cute.arch.shuffle_sync(after, 0)
        if lane == LANES - 1:
            next_mine = first_after
            next_after = Int32(-1)
        follows = Int64(Uint32(cute.arch.vote_ballot_sync((mine >= 0) & (next_mine == mine + 1))))
        upper = cute.arch.vote_ballot_sync((after >= 0) & (next_after == after + 1))
        run = follows | (Int64(Uint32(upper)) << 32)
        run = run & (run >> 1)
        run = run & (run >> 2)
        run = run & (run >> 4)  # bit i: rows i + 1 .. i + 8 follow one another
        run = run & (run >> 7)  # the same for 15
        begins = cute.arch.vote_ballot_sync((mine >= 0) & (mine % TILE == 0))
        tiles = Uint32(begins) & Uint32(run & 0xFFFFFFFF)
        covered = tiles | (tiles << 1)
        covered = covered | (covered << 2)
        covered = covered | (covered << 4)
        covered = covered | (covered << 8)
        present = Uint32(cute.arch.vote_ballot_sync(mine != -1))
        return tiles & Uint32(OWN_ROWS), present & ~covered & Uint32(OWN_ROWS)

    @cute.jit
    def look_up(
        self, places: cute.Tensor, sealed: cute.Tensor, slot: Int32, span: Int32, page_size: Int32
    ) -> tuple[Int32, Int32]:
        """Start of the span that a slot lies in, and whether it is sealed."""
        place, is_sealed = Int32(0), Int32(0)
        if slot >= 0:
            page = Uint32(slot) // Uint32(page_size)
            at = Int64(page) * sealed.shape[1] + span
            is_sealed = cute.make_tensor(sealed.iterator + at, cute.make_layout(1))[0]
            place = cute.make_tensor(places.iterator + 2 * at, cute.make_layout(1))[0]
        return place, is_sealed

    @cute.jit
    def admit(
        self,
        written: cute.Tensor,
        refused: cute.Tensor,
        slot: Int32,
        is_sealed: Int32,
        page_size: Int32,
        n_rows: cutlass.Constexpr,
        head: Int32,
        lane: Int32,
    ) -> Any:
        """Whether rows from a slot on may be written; marks the slots, or counts a refusal."""
        fine = (slot >= 0) & (is_sealed == 0)
        if (head == 0) & (lane == 0):  # once, not for every head
            if fine:
                bits = Int64((1 << n_rows) - 1) << Int64(slot & (page_size - 1))
                page = written.iterator + Int32(Uint32(slot) // Uint32(page_size))
                cute.arch.atomic_or(page, bits, sem="relaxed", scope="gpu")
            else:
                refusal = Int32(refusals.Refusal.SLOT_SEALED)
                if slot < 0:
                    refusal = Int32(refusals.Refusal.SLOT_OUTSIDE)
                refusals.count(refused, refusal, Int32(n_rows))
        return fine

    @cute.jit
    def write_tile(
        self,
        tiles: tuple[TokenTile, TokenTile],
        rows: tuple[cute.Tensor, cute.Tensor],
        row: Int32,
        head: Int32,
        to: Int64,
        part_bytes: Int32,
        offset: Int32,
        lane: Int32,
    ) -> None:
        """16 rows from `row` on, to the tile of 16 tokens that begins at `offset` of a page."""
        for p in cutlass.range_constexpr(len(PARTS)):
            x, tile = rows[p], tiles[p]
            base = x.iterator + row * x.stride[0] + head * x.stride[1]
            if const_expr(self.key.vectors):
                for step in cutlass.range_constexpr(tile.steps):
                    token, _ = tile.place(step, lane)
                    tile.fetch(step, lane, (base + token * x.stride[0]).toint())
            else:
                for i in cutlass.range(lane, TILE * self.head_dim, LANES, unroll=4):
                    token, dim = i // self.head_dim, i % self.head_dim
                    tile.put_value(token, dim, bits_at(x, base, token, dim))
        if const_expr(self.key.vectors):
            ptx.wait_copies()
        cute.arch.sync_warp()
        block_bytes = RAW_KIND.nbytes
        for p in cutlass.range_constexpr(len(PARTS)):
            at = to + p * part_bytes + offset // TILE * (self.layout.pairs * block_bytes)
            for pair in cutlass.range_constexpr(self.layout.pairs):
                for t in cutlass.range_constexpr(2):
                    words = tiles[p].fragment(PARTS[p], pair, t, lane)
                    there = at + (pair * block_bytes + t * block_bytes // 2) + lane * 16
                    ptx.store(there, words)

    @cute.jit
    def load_row(
        self,
        rows: tuple[cute.Tensor, cute.Tensor],
        row: Int32,
        head: Int32,
        words: cute.Tensor,
        at: cutlass.Constexpr,
        lane: Int32,
    ) -> None:
        """One row of K and of V into ``words[at:]``: two neighbouring dims a lane at a time."""
        for p in cutlass.range_constexpr(len(PARTS)):
            x = rows[p]
            base = x.iterator + row * x.stride[0] + head * x.stride[1]
            for i in cutlass.range_constexpr(self.row_words):
                dim = 2 * (lane + i * LANES)
                to = at + p * self.row_words + i
                if const_expr(self.key.vectors):
                    words[to] = ptx.load_one((base + dim).toint(), Uint32)
                else:
                    low, high = bits_at(x, base, 0, dim), bits_at(x, base, 0, dim + 1)
                    words[to] = Uint32(low) | (Uint32(high) << 16)

    @cute.jit
    def store_row(
        self,
        words: cute.Tensor,
        at: cutlass.Constexpr,
        to: Int64,
        slot: Int32,
        page_size: Int32,
        lane: Int32,
    ) -> None:
        """Write what `load_row` has read to a slot's places in its raw page."""
        offset = slot & (page_size - 1)
        token = Uint32(offset) % TILE
        tile = to + offset // TILE * (self.layout.pairs * RAW_KIND.nbytes)
        part_bytes = page_size * self.head_dim * 2
        for p in cutlass.range_constexpr(len(PARTS)):
            for i in cutlass.range_constexpr(self.row_words):
                dim = Uint32(2 * (lane + i * LANES))
                word = words[at + p * self.row_words + i]
                there = tile + p * part_bytes
                if const_expr(PARTS[p] == "k"):  # two dims are neighbours in a fragment, too
                    ptx.store_one(there + Int32(self.byte_in_tile("k", token, dim)), word, Uint32)
                else:
                    for j in cutlass.range_constexpr(2):
                        byte = Int32(self.byte_in_tile("v", token, dim + j))
                        ptx.store_one(there + byte, word >> (16 * j), Uint16)

    def byte_in_tile(self, part: Any, token: Any, dim: Any) -> Any:
        """Byte of a value among the raw blocks of its 16 tokens: `PageLayout.raw_byte`, traced."""
        dim_tile = dim // TILE
        pairs = self.layout.pairs
        if part == "k" and self.layout.rope == "half":
            tile, pair = dim_tile // pairs, dim_tile % pairs
        else:
            tile, pair = dim_tile % 2, dim_tile // 2
        column = dim % TILE
        lane, v = lane_value(token, column) if part == "k" else lane_value(column, token)
        return pair * RAW_KIND.nbytes + raw_byte(position(tile, lane, v))


def lowest(bits: Any) -> Int32:
    """Number of the lowest set bit."""
    bits = Uint32(bits)
    return Int32(cute.arch.popc((bits & (Uint32(0) - bits)) - 1))


def bits_at(x: cute.Tensor, base: cute.Pointer, token: Any, dim: Any) -> Uint16:
    """Bit pattern of a value, `token` rows and `dim` values from `base`."""
    at = base + (token * x.stride[0] + dim * x.stride[2])
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint16), cute.make_layout(1))[0]
