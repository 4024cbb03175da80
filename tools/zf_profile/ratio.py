"""``zf-profile ratio``: what the format would save on keys and values of your own."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zf_layouts import BLOCK_VALUES, PARTS, PageLayout
from zf_layouts.block import RAW
from zf_profile import console, output
from zf_profile.console import Exit, UserError
from zf_profile.kvfile import LAYOUTS, USUAL_LAYOUTS, KVTensor, open_kv, pairs
from zf_profile.options import add_format_options

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from zf_profile.census import Census, Exponents

SUMMARY = "what the format saves on your own keys and values"
DESCRIPTION = """\
Encode every full page of the K and V tensors in a file, decode it again, compare all bits, and
say how the blocks are stored and why.  Needs no GPU.  A last page that is not full stays raw and
is counted whole on both sides of every ratio, as an uncompressed paged cache would hold it.
Exit code 1 if any bit did not come back."""
EXAMPLES = """\
examples:
  zf-profile ratio cache.safetensors
  zf-profile ratio cache.pt --layout bthd --k '*.key' --v '*.value'
  zf-profile ratio cache.safetensors --max-exceptions 0 --json -"""

_VALUES_AT_ONCE = 1 << 22
"""Values encoded at a time: bounds the working memory to about 130 MB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help=".safetensors or .pt file with BF16 tensors")
    meanings = "; ".join(f"{name} {axes}" for name, axes in LAYOUTS.items())
    usual = ", ".join(f"{name} for {axes} axes" for axes, name in USUAL_LAYOUTS.items())
    parser.add_argument(
        "--layout", choices=LAYOUTS, help=f"order of axes (default {usual}): {meanings}"
    )
    for part, words in (("k", "k, key, k_cache, ..."), ("v", "v, value, v_cache, ...")):
        parser.add_argument(
            f"--{part}",
            metavar="GLOB",
            help=f"names of the {part.upper()} tensors (default: a part of the name is {words})",
        )
    add_format_options(parser)
    output.add_json_option(parser)


@dataclass
class _Measured:
    """What was found in one tensor."""

    part_bytes: Tensor  # [pages, heads] bytes of blocks
    census: Census
    exponents: Exponents


def run(args: argparse.Namespace) -> int:
    """Measure a file; returns the exit code."""
    _check_apart(args)
    tensors, others = open_kv(Path(args.file), args.layout, {"k": args.k, "v": args.v})
    from zf_profile import census, environment

    for note in _notes(tensors, others, args.page_size):
        console.note(args, note)
    measured: dict[str, _Measured] = {}
    work = sum(_page_count(x, args.page_size) for x in tensors)
    with console.progress(args, "pages", work) as advance:
        for tensor in tensors:
            measured[tensor.name] = _measure(tensor, args, advance)
    parts = [m.census for m in measured.values()]
    paired, reason = pairs(tensors)
    stored = sum(_stored(k, measured[k.name], measured[v.name], args) for k, v in paired)
    whole = census.totals(parts, stored if paired else None, reason)
    document: dict[str, Any] = {
        "env": environment.environment(),
        "file": args.file,
        "format": {
            "page_size": args.page_size,
            "rope": args.rope,
            "max_exceptions": args.max_exceptions,
        },
        "tensors": [{**m.census.record(), **m.exponents.record()} for m in measured.values()],
        "totals": whole,
    }
    _print(args, measured, whole)
    output.write_json(args, "ratio", document)
    return Exit.DONE if whole["bitwise_equal"] else Exit.NO


def _notes(tensors: list[KVTensor], others: list[str], page_size: int) -> list[str]:
    """What a user should know about how the file was read."""
    notes = []
    by_reading: dict[str, list[str]] = {}
    for tensor in tensors:
        by_reading.setdefault(tensor.reading, []).append(tensor.name)
    for reading, names in by_reading.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notes.append(f"{names[0]}{more}: {reading}")
    if others:
        notes.append(f"{len(others)} other tensors ignored")
    for part in PARTS:
        if not any(tensor.part == part for tensor in tensors):
            notes.append(f"no {part.upper()} tensors found (--{part} 'GLOB' names them)")
    partial = [x for x in tensors if x.shape[1] % page_size]
    if partial:
        blocks = sum(x.shape[0] * x.shape[2] * x.shape[3] * page_size for x in partial)
        notes.append(
            f"{sum(x.shape[0] for x in partial)} sequences end in a partly filled page of "
            f"{page_size} tokens, which stays raw: {blocks // BLOCK_VALUES} of the raw blocks"
        )
    if all(x.shape[1] < page_size for x in tensors):
        notes.append(
            f"no full page of {page_size} tokens: nothing was sealed, so this says nothing about "
            "compression"
        )
    return notes


def _check_apart(args: argparse.Namespace) -> None:
    """Refuse to write the document over the tensors; a missing file is `open_kv`'s to refuse."""
    if args.json in (None, "-") or not (os.path.exists(args.file) and os.path.exists(args.json)):
        return
    if os.path.samefile(args.file, args.json):
        raise UserError(f"--json {args.json}: is the FILE to be read; name another")


def _page_count(tensor: KVTensor, page_size: int) -> int:
    return tensor.shape[0] * -(-tensor.shape[1] // page_size)


def _layout(tensor: KVTensor, args: argparse.Namespace) -> PageLayout:
    _, _, heads, head_dim = tensor.shape
    return PageLayout(heads, head_dim, args.page_size, args.rope, args.max_exceptions)


def _measure(tensor: KVTensor, args: argparse.Namespace, advance: Any) -> _Measured:
    import torch

    from zf_cute import reference
    from zf_profile.census import Census, Exponents

    layout, exponents = _layout(tensor, args), Exponents()
    _, tokens, heads, head_dim = tensor.shape
    full = tokens // layout.page_size
    step = max(1, _VALUES_AT_ONCE // (layout.page_values // 2))
    values = tensor.load()
    descriptors, equal = [], True
    for sequence in values:
        for at in range(0, full, step):
            count = min(step, full - at)
            some = sequence[at * layout.page_size :][: count * layout.page_size]
            pages = some.reshape(count, layout.page_size, heads, head_dim)
            bits = reference.part_blocks(pages, layout, tensor.part).view(-1, BLOCK_VALUES)
            found, rows = reference.encode_blocks(bits, layout.max_exceptions)
            back = reference.decode_blocks(found, rows, layout.max_exceptions)
            equal = equal and torch.equal(back, bits)
            exponents.add(bits)
            descriptors.append(found.view(count, heads, layout.blocks_per_part))
            advance(count)
        if tokens % layout.page_size:
            raw = torch.full((1, heads, layout.blocks_per_part), RAW, dtype=torch.uint8)
            descriptors.append(raw)
            advance(1)
    every = torch.cat(descriptors)
    census = Census.of(tensor.name, every, layout, equal)
    return _Measured(reference.block_bytes(every).sum(2), census, exponents)


def _stored(k: KVTensor, of_k: _Measured, of_v: _Measured, args: argparse.Namespace) -> int:
    """Bytes of the pages that a K and a V make together, spans aligned."""
    from zf_profile.census import aligned_bytes

    layout = _layout(k, args)
    heads = of_k.part_bytes + of_v.part_bytes + layout.head_metadata_bytes
    return aligned_bytes(heads.view(-1, layout.spans, layout.heads_per_span).sum(2))


def _print(args: argparse.Namespace, measured: dict[str, _Measured], whole: dict[str, Any]) -> None:
    from zf_profile.census import tensor_table

    out = console.stdout(args)
    console.print_table(out, tensor_table((m.census for m in measured.values()), whole))
    out.print()
    exponents = {name: m.exponents for name, m in measured.items()}
    table = _exponent_table(exponents, console.bars(out))
    if not console.fits(out, table):
        table = _exponent_table(exponents)
    console.print_table(out, table)
    out.print(
        "bound: 8 + H(exponent) bits a value.  0 to >4: blocks by values outside their window; "
        "zeros: those of them that would fit were it not for values that are exactly 0.  "
        "histogram (in wide terminals): how often each of 20 exponents occurs, from the one "
        "named.\n"
    )
    aligned = (
        f"{whole['stored_ratio']:.4f} with spans aligned to 128 bytes"
        if whole["stored_ratio"] is not None
        else f"not given with alignment: {console.printable(whole['stored_ratio_reason'])}"
    )
    out.print(f"ratio to BF16: {whole['ratio']:.4f} with metadata; {aligned}", markup=False)


def _exponent_table(exponents: dict[str, Exponents], bars: str = "") -> Table:
    """Table of exponents; with histograms if it is told what to draw them with."""
    from rich.text import Text

    table = console.new_table("Exponent fields, and blocks by values outside their window")
    table.add_column("tensor")
    for name in ("exponents", "bound", "0", "1", "2", "3", "4", ">4", "zeros"):
        table.add_column(name, justify="right")
    if bars:
        table.add_column("histogram")
    for name, found in exponents.items():
        met = [e for e, n in enumerate(found.histogram) if n]
        table.add_row(
            Text(console.printable(name)),
            f"{met[0]}-{met[-1]}" if met else "",
            f"{found.bound:.2f}" if found.bound is not None else "",
            *map(str, found.outside),
            str(found.zeros_only),
            *([_sparkline(found.histogram, bars)] if bars else []),
        )
    return table


def _sparkline(histogram: list[int], bars: str, width: int = 20) -> str:
    """Histogram of the most used stretch of exponents, one character an exponent."""
    peak = max(range(256), key=lambda e: histogram[e])
    first = max(0, min(peak - width * 3 // 4, 256 - width))
    shown = histogram[first : first + width]
    most = max(shown) or 1
    return f"{first:>3} " + "".join(bars[-(-(len(bars) - 1) * n // most)] for n in shown)
