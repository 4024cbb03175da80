"""The sheet that draw_svg draws on: boxes, words and bit fields, in one set of colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from zf_layouts.draw import Fields

INK, MUTED, RULE, PALE = "#1b1f24", "#57606a", "#c4cad1", "#f3f5f7"
HUES = (0x2F6DB5, 0x17888A, 0x3B8F42, 0x8A8419, 0xC27C12, 0xC24E38, 0xAC4279, 0x6B53B0)
SHADES = (20, 32, 44, 56)
STYLE = (
    "text{font:13px Helvetica,Arial,sans-serif;fill:#1b1f24}"
    ".m{font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".b{font-weight:bold}.g{fill:#57606a}.w{fill:#fff}"
)
LEFT = 40


def tint(hue: int, percent: int) -> str:
    """Hue number `hue` mixed with white; 100 percent is the pure hue."""
    rgb = HUES[hue % len(HUES)]
    mixed = (255 - (255 - (rgb >> shift & 255)) * percent // 100 for shift in (16, 8, 0))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def lane_tint(lane: int) -> str:
    """Colour of a lane: a hue for each row of four lanes, a shade for each lane of the row."""
    return tint(lane // 4, SHADES[lane % 4])


class Canvas:
    """Rectangles, lines and words of one picture, in pixels from the upper left corner."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.title, self.items = title, [f"<title>{escape(title)}</title>"]
        self.items.append(f"<desc>{escape(subtitle)}</desc>")
        self.items.append("")  # the ground, whose size is known at the end
        self.words(LEFT, 42, title, "b", 21)
        self.words(LEFT, 66, subtitle, "g", 14)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, edge: str = "#fff", line: float = 1
    ) -> None:
        self.items.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
            f'stroke="{edge}" stroke-width="{line:g}"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.items.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{MUTED}"{dashed}/>'
        )

    def words(
        self, x: float, y: float, words: str, kind: str = "", size: int = 13, at: str = "start"
    ) -> None:
        kinds = f' class="{" ".join(kind)}"' if kind else ""
        sized = f' style="font-size:{size}px"' if size != 13 else ""
        anchor = f' text-anchor="{at}"' if at != "start" else ""
        # Runs of spaces align columns; without this XML folds them.
        kept = ' xml:space="preserve"' if "  " in words else ""
        self.items.append(
            f'<text x="{x:g}" y="{y:g}"{kinds}{sized}{anchor}{kept}>{escape(words)}</text>'
        )

    def cell(
        self, x: float, y: float, w: float, h: float, fill: str, label: str, size: int = 12
    ) -> None:
        """A box with its label in the middle."""
        self.box(x, y, w, h, fill)
        self.words(x + w / 2, y + h / 2 + size * 0.36, label, "m", size, "middle")

    def fields(self, x: float, y: float, unit: float, fields: Fields, hues: Sequence[int]) -> None:
        """Bit fields, highest bit first, with the bit numbers above."""
        top = fields[0][0]
        for (last, first, content), hue in zip(fields, hues, strict=True):
            at, width = x + (top - last) * unit, (last - first + 1) * unit
            self.cell(at, y, width, 32, tint(hue, 34) if hue >= 0 else PALE, content, 11)
            for bit in {last, first}:
                middle = x + (top - bit + 0.5) * unit
                self.words(middle, y - 6, str(bit), "mg", 10, "middle")

    def heading(self, x: float, y: float, name: str, note: str) -> None:
        """A bold name and a note after it."""
        self.items.append(
            f'<text x="{x:g}" y="{y:g}">'
            f'<tspan class="b" style="font-size:14px">{escape(name)}</tspan>'
            f'<tspan class="g" dx="10" style="font-size:12px">{escape(note)}</tspan></text>'
        )

    def render(self, width: int, height: int, caption: Sequence[str]) -> str:
        """The SVG text, with the caption's sentences below the picture."""
        # 7.1: a wide sans's pixels a character at this size.
        lines = [line for words in caption for line in wrap(words, int((width - 2 * LEFT) / 7.1))]
        for i, words in enumerate(lines):
            self.words(LEFT, height + 6 + 19 * i, words, "g")
        height += 19 * len(lines) + 16
        self.items[2] = f'<rect width="{width}" height="{height}" fill="#fff"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<style>{STYLE}</style>\n'
            + "\n".join(self.items)
            + "\n</svg>\n"
        )
