"""``zf-profile layout``: who holds what, as text, SVG or JSON; needs no GPU and no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from zf_layouts import draw, draw_svg
from zf_layouts.fragment import LANES
from zf_layouts.page import HEAD_DIMS, SPAN_LIMIT, PageLayout
from zf_profile import console, output
from zf_profile.console import Exit, UserError
from zf_profile.options import add_format_options

SUMMARY = "show where the values and bytes of a page lie"

DESCRIPTION = """\
Draw a map of the page format.

  k      a tile of keys: which lane holds which (token, dim)
  v      a tile of values, transposed: dims are rows
  block  the bytes of a block, whose they are, and the bits of codes and exceptions
  page   the bytes of a span: metadata, then the K and V blocks of each head"""

EXAMPLES = """\
examples:
  zf-profile layout k --lane 5                 what lane 5 holds of a key tile
  zf-profile layout block                      the three kinds of block
  zf-profile layout page --kv-heads 8 --head-dim 128 --page-size 32
  zf-profile layout v --svg v.svg              the picture as a file
  zf-profile layout page --json - | jq .layout.raw_span_bytes"""

MOST_KV_HEADS = 1024
"""More than any model has; a bound keeps a mistyped number from printing for minutes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zf-profile layout`` to `parser`."""
    parser.add_argument("what", choices=draw.PICTURES, help="what to draw")
    parser.add_argument(
        "--head-dim",
        type=int,
        choices=HEAD_DIMS,
        default=128,
        help="dims of a head (default 128)",
    )
    parser.add_argument(
        "--kv-heads", type=int, default=8, metavar="N", help="KV heads of a layer (default 8)"
    )
    parser.add_argument(
        "--heads-per-span",
        type=int,
        default=0,
        metavar="N",
        help="KV heads in a span, a divisor of --kv-heads "
        f"(default 0: the most whose raw span has at most {SPAN_LIMIT:,} bytes)",
    )
    add_format_options(parser)
    parser.add_argument(
        "--lane",
        type=int,
        metavar="LANE",
        help=f"mark one lane, 0 to {LANES - 1}, and list what it holds (default: none)",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="also write the picture to FILE as SVG (default: no file)"
    )
    output.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the picture, and write it where ``--svg`` and ``--json`` say; returns the exit code."""
    layout = _layout(args)
    if args.svg is not None:
        _check_svg_target(args)
        picture = draw_svg.svg(args.what, layout, args.lane)
        output.write_file(Path(args.svg), picture, "--svg")
        console.stderr(args).print(f"wrote {args.svg}", markup=False, soft_wrap=True)
    _print(args, layout)
    document = {
        "what": args.what,
        "layout": draw.sizes(layout),
        "lane": args.lane,
        "values": draw.records(args.what, layout, args.lane),
    }
    output.write_json(args, "layout", document)
    return Exit.DONE


def _layout(args: argparse.Namespace) -> PageLayout:
    if args.lane is not None and not 0 <= args.lane < LANES:
        raise UserError(f"--lane {args.lane}: lanes are 0 to {LANES - 1}")
    if not 1 <= args.kv_heads <= MOST_KV_HEADS:
        raise UserError(f"--kv-heads {args.kv_heads}: choose 1 to {MOST_KV_HEADS}")
    if args.heads_per_span < 0 or (args.heads_per_span and args.kv_heads % args.heads_per_span):
        divisors = [n for n in range(1, args.kv_heads + 1) if args.kv_heads % n == 0]
        raise UserError(
            f"--heads-per-span {args.heads_per_span}: does not divide --kv-heads "
            f"{args.kv_heads}; choose one of {', '.join(map(str, divisors))}, or 0 for the default"
        )
    try:
        return PageLayout(
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            page_size=args.page_size,
            rope=args.rope,
            max_exceptions=args.max_exceptions,
            heads_per_span=args.heads_per_span,
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_svg_target(args: argparse.Namespace) -> None:
    path = Path(args.svg)
    if args.svg in ("", "-"):
        raise UserError(f"--svg {args.svg}: name a file, such as {args.what}.svg")
    output.check_target("--svg", args.svg)
    if args.json not in (None, "-") and path.resolve() == Path(args.json).resolve():
        raise UserError(f"--svg {args.svg}: is the --json file too; name another")


def _print(args: argparse.Namespace, layout: PageLayout) -> None:
    from rich.text import Text

    drawn = Text(draw.text(args.what, layout, args.lane), end="")
    drawn.highlight_regex(r"\[[ \d:]+\]", "bold reverse")
    # Not wrapped: a folded row of a tile cannot be read.
    console.stdout(args).print(drawn, soft_wrap=True, end="")
