"""``zf-profile ratio``: what the format would save on keys and values of your own."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zf_layouts import BLOCK_VALUES, PAGE_SIZES, ROPES, PageLayout
from zf_layouts.block import RAW
from zf_profile import console, output
from zf_profile.console import Exit, UserError
from zf_profile.kvfile import LAYOUTS, KVTensor, open_kv, pairs

if TYPE_CHECKING:
    from torch import Tensor

    from zf_profile.census import Census, Exponents

SUMMARY = "what the format saves on your own keys and values"
DESCRIPTION = """\
Encode every full page of the K and V tensors in a file, decode it again, compare all bits, and
say how the blocks are stored and why.  Needs no GPU.  A last page that is not full stays raw and
is counted so, with all the bytes it takes.  Exit code 1 if any bit did not come back."""
EXAMPLES = """\
examples:
  zf-profile ratio cache.safetensors
  zf-profile ratio cache.pt --layout bhtd --k '*.key' --v '*.value'
  zf-profile ratio cache.safetensors --max-exceptions 0 --json -"""

_VALUES_AT_ONCE = 1 << 22
"""Values encoded at a time: bounds the working memory to about 200 MB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help=".safetensors or .pt file with BF16 tensors")
    meanings = "; ".join(f"{name} {axes}" for name, axes in LAYOUTS.items())
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="thd", help=f"order of axes (default thd): {meanings}"
    )
    for part, usual in (("k", "k, key, k_cache, ..."), ("v", "v, value, v_cache, ...")):
        parser.add_argument(
            f"--{part}",
            metavar="GLOB",
            help=f"names of the {part.upper()} tensors (default: a part of the name is {usual})",
        )
    parser.add_argument(
        "--page-size",
        type=int,
        choices=PAGE_SIZES,
        default=16,
        help="tokens in a page (default 16)",
    )
    parser.add_argument(
        "--rope",
        choices=ROPES,
        default="half",
        help="dims the model rotates together: i with i + head_dim/2 (half, default), or 2i with "
        "2i + 1 (interleaved)",
    )
    parser.add_argument(
        "--max-exceptions",
        type=int,
        choices=range(5),
        default=4,
        help="values outside its window that a compressed block may have (default 4; 0 is the "
        "ZipFusion paper's format)",
    )
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

    notes = console.stderr(args)
    if others:
        notes.print(f"note: {len(others)} other tensors ignored", style="dim")
    partial = sum(x.shape[0] for x in tensors if x.shape[1] % args.page_size)
    if partial:
        notes.print(
            f"note: {partial} sequences end in a partly filled page of {args.page_size} tokens, "
            "which stays raw"
        )
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
    _print(args, parts, whole, [(name, m.exponents) for name, m in measured.items()])
    output.write_json(args, "ratio", document)
    return Exit.DONE if whole["bitwise_equal"] else Exit.NO


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


def _print(
    args: argparse.Namespace,
    parts: list[Census],
    whole: dict[str, Any],
    exponents: list[tuple[str, Exponents]],
) -> None:
    from rich.table import Table
    from rich.text import Text

    from zf_profile.census import tensor_table

    out = console.stdout(args)
    out.print(tensor_table(parts, whole))
    table = Table(title="Exponent fields, and blocks by how many values lie outside their window")
    table.add_column("tensor", overflow="fold", min_width=28)
    for name in ("exponents", "bound", "0", "1", "2", "3", "4", ">4", "zeros"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("histogram", no_wrap=True)
    for name, found in exponents:
        met = [e for e, n in enumerate(found.histogram) if n]
        table.add_row(
            Text(console.shown(name)),
            f"{met[0]}-{met[-1]}" if met else "",
            f"{found.bound:.2f}" if found.bound is not None else "",
            *map(str, found.outside),
            str(found.zeros_only),
            _sparkline(found.histogram),
        )
    out.print(table)
    out.print(
        "bound: 8 + H(exponent) bits a value.  zeros: blocks that would fit one window were it "
        "not for values that are exactly 0.  The others outside have outliers."
    )
    stored = whole["stored_ratio"]
    aligned = (
        f"{stored:.4f} with spans aligned to 128 bytes"
        if stored
        else (f"not given with alignment: {whole['stored_ratio_reason']}")
    )
    out.print(f"ratio to BF16: {whole['ratio']:.4f} with metadata; {aligned}", markup=False)


def _sparkline(histogram: list[int], width: int = 20) -> str:
    """Histogram of the most used stretch of exponents, one character an exponent."""
    peak = max(range(256), key=lambda e: histogram[e])
    first = max(0, min(peak - width * 3 // 4, 256 - width))
    shown = histogram[first : first + width]
    most = max(shown) or 1
    bars = " ▁▂▃▄▅▆▇█"
    return f"{first:>3} " + "".join(bars[-(-8 * n // most)] for n in shown)
