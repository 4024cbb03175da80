"""Kernels that are wrong in one place are caught: by different bits, a race or a fault.

A mutant is a change of a line of a kernel's source, which is compiled anew, or of its PTX.  Each is
run on a few small cases, which the kernel itself passes.  A mutant that no longer applies, because
the line is gone, fails: write the change again for the line that does the work now.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from bits import mixed_values
from kernels.hard_blocks import HARD
from kernels.ptx import SCHEDULES, MemoryFault, Race
from kernels.twins import LAYER, Twins, distinct_rows
from kernels_compiled import report

from zf_cute import kernels
from zf_cute.compile import inspect_kernel
from zf_cute.compile_key import CompileKey
from zf_cute.kernels import catalog

KEYS = {
    "append": CompileKey("append", 64, "half"),
    "encode": CompileKey("encode"),
    "decode_pages": CompileKey("decode_pages", 64, "half"),
    "clear": CompileKey("clear"),
}


# ---- small cases that the kernels pass ----------------------------------------------------------
def check_append(**how: object) -> None:
    """Tiles and rows of all kinds, refusals, the last slot of 64, places past 2**31."""
    size = 64
    twins = Twins(2, 64, size, heads_per_span=1, pages=3, pool_at=1 << 38, **how)
    for store in (twins.expected, twins.store):
        store._sealed[LAYER, 2] = 1
    # A tile in the middle of two windows, 15 rows that are none, a tile and a row of a sealed page.
    slots = [*range(5, 37), *range(48, 63), -1, *range(128, 144), 63, 190, 192, 127]
    k, v = distinct_rows(len(slots), 2, 64)
    given = torch.tensor(slots)
    twins.append(k, v, given, (given >= 128), sharers=3)
    twins.refuses(SLOT_SEALED=17, SLOT_OUTSIDE=1)


def check_encode(**how: object) -> None:
    """Every rule in a span of three chunks; a new place over NaN; what is refused; equal ids."""
    names = [name for name in HARD if not name.startswith(("14", "15", "16 exponents from 1"))]
    # Few warps, so that a span has several chunks.
    twins = Twins(10, 128, 16, heads_per_span=10, pages=1, pool_at=1 << 38, warps=4, **how)
    twins.fill_blocks(0, [HARD[name] for name in names][:80])
    twins.encode([0])
    twins = Twins(3, 64, 16, heads_per_span=3, pages=5, warps=1, **{"schedule": "round", **how})
    k, v = (mixed_values((3, 16, 3, 64), seed) for seed in (1, 2))
    twins.fill([0, 1, 2], k, v)
    for store in (twins.expected, twins.store):
        store._written[LAYER, 1] &= ~(1 << 15)
        store._homes[LAYER, 3:].fill_(0xFF)
    twins.encode([0, 1], twins.expected._raw_places[LAYER, 3:, :, 0], refused=[False, True])
    twins.refuses(PAGE_NOT_SEALABLE=1)
    outside = torch.tensor([[-1]], dtype=torch.int32)
    twins.encode([2], outside, refused=[True])
    twins.encode([2], outside * 0 + len(twins.store.pool) // 128 - 1, refused=[True])
    twins.refuses(DESTINATION_OUTSIDE=2)
    lengths = twins.layer.encode(torch.tensor([2, 2]))
    assert (lengths != 0).sum() == 1
    twins.refuses(PAGE_NOT_SEALABLE=1)
    check_equal_ids(**how)


def check_equal_ids(**how: object) -> None:
    """One of three items seals all spans of a page, in any order of the CTAs."""
    schedules = [how.pop("schedule")] if "schedule" in how else SCHEDULES
    for schedule in schedules:
        for seed in range(6 if schedule == "random" else 1):
            twins = Twins(
                2, 64, 16, heads_per_span=1, pages=4, **{**how, "schedule": schedule, "seed": seed}
            )
            k, v = (mixed_values((1, 16, 2, 64), part) for part in (3, 4))
            twins.fill([0], k, v)
            to = twins.expected._raw_places[LAYER, 1:, :, 0].clone()
            lengths = twins.layer.encode(torch.tensor([0, 0, 0]), to)
            assert sorted((lengths > 0).sum(1).tolist()) == [0, 0, 2]
            assert torch.equal(twins.store.places[LAYER, 0, :, 0], to[int(lengths[:, 0].argmax())])
            twins.refuses(PAGE_NOT_SEALABLE=2)
            twins.layer.clear(torch.tensor([0]))


def check_decode_pages(**how: object) -> None:
    """Raw and sealed pages of all kinds of blocks; spans that no writer makes."""
    twins = Twins(2, 64, 32, heads_per_span=2, pages=3, pool_at=1 << 38, **how)
    names = ["8.2", "random bits", "8.3", "outliers in one word", "outliers in four lanes"]
    twins.fill_blocks(0, [HARD[name] for name in names])
    shape = (1, 32, 2, 64)
    twins.fill([2], mixed_values(shape, 1), mixed_values(shape, 2))
    twins.seal([0])
    twins.decode([2, 0])
    start, length = twins.expected.places[LAYER, 0, 0].tolist()
    twins.layer.mapped = slice(start * 128, start * 128 + length)
    place, metadata = twins.store.places[LAYER, 0, 0].clone(), twins.store.pool[start * 128 :][:48]
    good = metadata.clone()

    def refused(parts: int) -> None:
        k, v = twins.layer.decode_pages(torch.tensor([0]))
        twins.refuses(SPAN_MALFORMED=parts)
        zeros = sum(not x[:, :, h].view(torch.int16).any() for x in (k, v) for h in (0, 1))
        assert zeros == parts
        twins.store.places[LAYER, 0, 0] = place
        metadata.copy_(good)

    metadata[0] = 1  # K of head 0 starts inside the metadata, though not in its own
    refused(1)
    metadata[16 + 8 + 4] = 250
    refused(1)
    twins.store.places[LAYER, 0, 0, 1] = length - 16
    refused(1)
    twins.store.places[LAYER, 0, 0, 0] = -1
    refused(4)


def check_clear(**how: object) -> None:
    """40 units of metadata in a span; pages that are sealed elsewhere; ids out of range."""
    twins = Twins(8, 256, 64, heads_per_span=8, pages=3, pool_at=1 << 38, **how)
    for store in (twins.expected, twins.store):
        store.pool.fill_(0xFF)
        store._sealed.fill_(1)
        store._claimed.fill_(2)
        store._written.fill_(-1)
        store.places[LAYER, :2, :, 1] = 768
    twins.clear([1, 3, 0])
    twins.refuses(PAGE_OUTSIDE=1)


CHECKS = {
    "append": check_append,
    "encode": check_encode,
    "decode_pages": check_decode_pages,
    "clear": check_clear,
}


@pytest.mark.parametrize("kernel", CHECKS)
def test_the_kernel_itself_passes(kernel: str) -> None:
    CHECKS[kernel]()


# ---- mutants ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mutant:
    """A change of a kernel.

    Attributes
    ----------
    kernel : str
        Which kernel is compiled and run.
    name : str
        What is wrong with it.
    file : str
        A file of zf_cute/kernels, or "ptx text".
    old, new : str
        What the change replaces, all the places that it is found in: in PTX a regular expression.
    by : exceptions
        How it may be caught.  AssertionError: bits or counts differ.
    """

    kernel: str
    name: str
    file: str
    old: str
    new: str
    by: type[Exception] | tuple[type[Exception], ...] = AssertionError

    def __str__(self) -> str:
        """Id of its test."""
        return f"{self.kernel}: {self.name}"


PTX = "ptx text"
STAYS = "(refused.iterator + 1).toint(), 0"  # 0 to where 0 is
CLAIM = """if (owner == 0) | (owner == item + 1):
                        cute.arch.atomic_exch(place, Int32(1), sem="relaxed", scope="gpu")
                        mine = Int32(1)"""
BAR_WARP = r"bar\.warp\.sync\s+-1;"

MUTANTS = [
    # ---- append
    Mutant("append", "no wait for copies", PTX, r"cp\.async\.wait_all;", "", Race),
    Mutant("append", "no warp barrier before fragments", PTX, BAR_WARP, "", Race),
    Mutant("append", "V not transposed", PTX, r"x4\.trans\.shared", "x4.shared"),
    Mutant(
        "append",
        "14 rows make a tile",
        "append.py",
        "run = run & (run >> 7)",
        "run = run & (run >> 6)",
        (AssertionError, Race),
    ),
    Mutant(
        "append",
        "does not see the rows after its 32",
        "append.py",
        "            next_mine = first_after\n",
        "            next_mine = Int32(-1)\n",
        (AssertionError, Race),
    ),
    Mutant(
        "append", "sealed pages are written", "append.py", "& (is_sealed == 0)", "& (is_sealed < 2)"
    ),
    Mutant(
        "append",
        "every head counts refusals",
        "append.py",
        "(head == 0) & (lane == 0)",
        "(head >= 0) & (lane == 0)",
    ),
    Mutant(
        "append",
        "written has 32 bits",
        "append.py",
        "Int64(slot & (page_size - 1))",
        "Int64(slot & (page_size - 1) & 31)",
    ),
    Mutant(
        "append",
        "places have a sign",
        "ptx.py",
        "(Int64(start) & 0xFFFFFFFF) * SPAN_ALIGNMENT",
        "Int64(start) * SPAN_ALIGNMENT",
        MemoryFault,
    ),
    Mutant(
        "append",
        "rows are put where fragments do not look",
        "tile.py",
        "ptx.copy_async_16(self.unit(token, unit), ",
        "ptx.copy_async_16(self.unit(token, unit ^ 1), ",
    ),
    # ---- encode
    Mutant(
        "encode",
        "no barrier in a chunk",
        PTX,
        r"(bar\.sync\s+0;.*?)bar\.sync\s+0;",
        r"\1",
        (AssertionError, Race),
    ),
    Mutant(
        "encode", "one buffer of sizes", "encode.py", "half = MAX_WARPS - half", "half = half", Race
    ),
    Mutant(
        "encode",
        "two may claim a page",
        PTX,
        r"atom\S*\.cas\.b32\s+(%r\d+), (\[%rd\d+\]), 0, (%r\d+);",
        r"ld.global.b32 \1, \2; st.global.b32 \2, \3;",
        (AssertionError, Race),
    ),
    Mutant(
        "encode",
        "an id given twice is sealed in part",
        "encode.py",
        CLAIM,
        "mine = 1 - cute.arch.atomic_exch(place, Int32(1), sem='relaxed', scope='gpu')",
    ),
    Mutant(
        "encode",
        "an owner takes one span",
        "encode.py",
        "(owner == 0) | (owner == item + 1)",
        "owner == 0",
    ),
    Mutant(
        "encode",
        "destinations outside the pool are written",
        "encode.py",
        "if outside != 0:",
        "if outside < 0:",
        (AssertionError, MemoryFault),
    ),
    Mutant(
        "encode",
        "destinations have a sign",
        "encode.py",
        "(Int64(destinations[item, s]) & 0xFFFFFFFF) * SPAN_ALIGNMENT",
        "Int64(destinations[item, s]) * SPAN_ALIGNMENT",
        (AssertionError, MemoryFault),
    ),
    Mutant(
        "encode",
        "room for a start alone",
        "encode.py",
        "pool_bytes - heads_per_span * raw_head_bytes",
        "pool_bytes - SPAN_ALIGNMENT",
        (AssertionError, MemoryFault),
    ),
    Mutant(
        "encode",
        "every span counts refusals",
        "encode.py",
        "(mine == 0) & (span == 0)",
        "mine == 0",
    ),
    Mutant(
        "encode",
        "the first entry is repeated",
        PTX,
        r"(\[%rd\d+\+768\], \{)(%r\d+)(, %r\d+, %r\d+, )%r\d+",
        r"\1\2\3\2",
    ),
    Mutant("encode", "low bytes of the wrong values", PTX, r"\b25632\b", str(0x6240)),
    Mutant(
        "encode",
        "of equal windows the highest",
        "blocks.py",
        "if count <= outliers",
        "if count < outliers",
    ),
    Mutant(
        "encode",
        "17 exponents in a window",
        "blocks.py",
        "most - least >= PAIRS",
        "most - least > PAIRS",
    ),
    Mutant(
        "encode",
        "one window too few is tried",
        "blocks.py",
        "(tried <= max_exceptions)",
        "(tried < max_exceptions)",
    ),
    Mutant(
        "encode",
        "entries of a lane in odd order",
        "blocks.py",
        "for q in cutlass.range_constexpr(2, -1, -1):",
        "for q in cutlass.range_constexpr(3):",
    ),
    Mutant(
        "encode",
        "metadata over what was there",
        "encode.py",
        "ptx.store(to + i * UNIT, [Uint32(0)] * 4)",
        "ptx.store(to, [Uint32(0)] * 4)",
    ),
    Mutant(
        "encode", "pages need not be full", "encode.py", "(missing == 0) & ", "(missing != 1) & "
    ),
    Mutant(
        "encode",
        "span addresses of 32 bits",
        "ptx.py",
        "(Int64(start) & 0xFFFFFFFF) * SPAN_ALIGNMENT",
        "Int64(Uint32(start) * SPAN_ALIGNMENT)",
        MemoryFault,
    ),
    # ---- decode_pages
    Mutant("decode_pages", "no warp barrier between tiles", PTX, BAR_WARP, "", Race),
    Mutant("decode_pages", "high bytes swapped", PTX, r"\b20800\b", str(0x4150)),
    Mutant("decode_pages", "V not transposed", PTX, r"x4\.trans\.shared", "x4.shared"),
    Mutant(
        "decode_pages",
        "places outside the pool",
        "decode_pages.py",
        "inside & (length % UNIT == 0)",
        "(length % UNIT == 0)",
        MemoryFault,
    ),
    Mutant(
        "decode_pages",
        "starts inside the metadata",
        "decode_pages.py",
        "(first >= metadata_units) & ",
        "",
    ),
    Mutant(
        "decode_pages",
        "blocks past the span",
        "decode_pages.py",
        "(first <= span_units - total)",
        "(first <= span_units)",
    ),
    Mutant(
        "decode_pages",
        "descriptors of no block",
        "decode_pages.py",
        "(descriptor > last) & (descriptor != RAW)",
        "descriptor < 0",
    ),
    Mutant(
        "decode_pages",
        "exceptions in the first half alone",
        "rebuild.py",
        "& ops.u32(0x7F)",
        "& ops.u32(0x3F)",
    ),
    # ---- clear
    Mutant("clear", "the first 32 units alone", "clear.py", ", LANES, unroll=1", ", 64, unroll=1"),
    Mutant("clear", "stays sealed", "clear.py", "(sealed.iterator + at).toint(), 0", STAYS),
    Mutant("clear", "stays claimed", "clear.py", "(claimed.iterator + page).toint(), 0", STAYS),
    Mutant("clear", "places stay", "clear.py", "[home[0], home[1]]", "[home[0], home[0]]"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = report(KEYS[mutant.kernel]).ptx
    if mutant.file == PTX:
        text, changes = re.subn(mutant.old, mutant.new, original, flags=re.DOTALL)
        assert changes
    else:
        text = mutated_source(mutant, tmp_path, monkeypatch)
    assert text != original
    with pytest.raises(mutant.by):
        CHECKS[mutant.kernel](mutate=lambda ptx: text)


@pytest.mark.parametrize(
    "name",
    ["append: no wait for copies", "encode: no barrier in a chunk", "encode: two may claim a page"],
)
def test_schedules_show_what_nothing_orders(name: str) -> None:
    # With the race check off, some schedule makes other bits of it: what the check is for can
    # happen.  (Lanes of a warp run together here, so a missing warp barrier would not show.)
    (mutant,) = (mutant for mutant in MUTANTS if str(mutant) == name)

    def in_every_schedule() -> None:
        for schedule in SCHEDULES:
            CHECKS[mutant.kernel](
                mutate=lambda ptx: re.sub(mutant.old, mutant.new, ptx, flags=re.DOTALL),
                races=False,
                schedule=schedule,
            )

    with pytest.raises((AssertionError, MemoryFault)):
        in_every_schedule()


def mutated_source(mutant: Mutant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """PTX of a kernel of which a file is changed: its own, or one that it imports."""
    sources = Path(kernels.__file__).parent
    source = (sources / mutant.file).read_text()
    assert mutant.old in source, "this line is gone: see the top of this file"

    def load(name: str, text: str):
        path = folder / f"mutant_{name}.py"  # a file, as the DSL reads the source of functions
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    name = mutant.file.removesuffix(".py")
    module = load(name, source.replace(mutant.old, mutant.new))
    if name != mutant.kernel:
        # A copy of the kernel's own file finds the mutant where it imports the original.
        monkeypatch.setitem(sys.modules, f"zf_cute.kernels.{name}", module)
        monkeypatch.setattr(kernels, name, module)
        module = load(mutant.kernel, (sources / f"{mutant.kernel}.py").read_text())
    kernel = catalog.KERNELS[mutant.kernel].split(":")[1]
    monkeypatch.setitem(catalog.KERNELS, mutant.kernel, f"{module.__name__}:{kernel}")
    return inspect_kernel(KEYS[mutant.kernel]).ptx
