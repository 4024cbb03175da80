"""Redraw the figures of FORMAT.md: writes layouts/figures/*.svg.

    python tools/render_figures.py

A test compares the files with what this would write, so run it after changing a map or a drawing.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "layouts" / "figures"


def main() -> int:
    """Write every figure; returns the exit code."""
    try:
        from zf_layouts import draw_svg
    except ImportError:  # a checkout that is not installed
        sys.path.insert(0, str(ROOT / "layouts"))
        from zf_layouts import draw_svg

    FOLDER.mkdir(exist_ok=True)
    for name, picture in draw_svg.figures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8", newline="\n")
        print(f"layouts/figures/{name}  {len(picture.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
