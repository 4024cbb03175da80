"""Options that several commands share."""

from __future__ import annotations

import argparse

from zf_layouts import PAGE_SIZES, ROPES
from zf_layouts.block import MAX_EXCEPTIONS


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the parameters of the page format that no tensor's shape tells."""
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
        choices=range(MAX_EXCEPTIONS + 1),
        default=MAX_EXCEPTIONS,
        help="values outside its window that a compressed block may have "
        f"(default {MAX_EXCEPTIONS}; 0 is the ZipFusion paper's format)",
    )
