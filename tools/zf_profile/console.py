"""Streams and exit codes: results on stdout, progress and notes on stderr.

With ``--json -`` stdout carries the JSON document alone, and the tables are not printed.
"""

from __future__ import annotations

import argparse
import enum
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    DONE = 0
    NO = 1  # the answer is no: a mismatch, a regression
    USAGE = 2  # usage or bad input
    NO_GPU = 3
    NO_PROFILER = 4
    FAILED = 5  # a kernel did not compile or launch
    INTERRUPTED = 130


class UserError(Exception):
    """A mistake of the user's: printed as one message, without a traceback."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        """`message` says what was wrong and what to do; `code` is the process's exit code."""
        super().__init__(message)
        self.code = code


def stdout(args: argparse.Namespace) -> Console:
    """Console for results: stdout, or nothing where stdout carries the JSON document."""
    return _console(args, sys.stdout, quiet=getattr(args, "json", None) == "-")


def stderr(args: argparse.Namespace) -> Console:
    """Console for progress and notes."""
    return _console(args, sys.stderr, quiet=False)


def _console(args: argparse.Namespace, stream: Any, quiet: bool) -> Console:
    from rich.console import Console

    class Stream(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to `main`: rich itself would exit with code 1, our "the answer is no"."""
            raise BrokenPipeError

    # A pipe has no width of its own: 80 columns would wrap tables that a program or a log reads.
    width = None if stream.isatty() or "COLUMNS" in os.environ else 120
    made = Stream(
        file=stream,
        quiet=quiet,
        width=width,
        color_system=None if _plain(args) else "auto",
        highlight=False,
        soft_wrap=False,
    )
    made.width = made.width or 80  # COLUMNS=0 means unknown; rich would print nothing
    return made


def _plain(args: argparse.Namespace) -> bool:
    """Whether streams carry text alone, without one escape code (rich would keep bold and dim)."""
    return not getattr(args, "color", True) or bool(os.environ.get("NO_COLOR"))


def printable(text: str) -> str:
    """`text` with what is no printable character escaped, so that a name cannot move the cursor."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def import_interruptibly(*modules: str) -> None:
    """Import heavy packages, so that Ctrl-C leaves at once.

    A KeyboardInterrupt inside their imports may be swallowed there, or abort the process in code
    that is not Python.  Nothing is half-written yet, and no bar hides the cursor.
    """

    def leave(*_: object) -> None:
        os.write(2, b"zf-profile: interrupted\n")
        os._exit(Exit.INTERRUPTED)

    try:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual:
            signal.signal(signal.SIGINT, leave)
    except ValueError:  # not the main thread: Ctrl-C does not come here
        usual = False
    try:
        for module in modules:
            import_module(module)
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def note(args: argparse.Namespace, text: str) -> None:
    """Print a line on stderr, its text taken literally."""
    from rich.text import Text

    # A pipe gets whole lines, a terminal gets them wrapped.
    stderr(args).print(Text(f"note: {printable(text)}"), soft_wrap=not sys.stderr.isatty())


def new_table(title: str) -> Table:
    """Empty table in the tool's style: no frame, so that most fit 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def fits(out: Console, table: Table) -> bool:
    """Whether the console is wide enough to show the whole table."""
    from rich.measure import Measurement

    wide = out.options.update(max_width=10_000)
    return Measurement.get(out, wide, table).maximum <= out.width


def print_table(out: Console, table: Table) -> None:
    """Print a table, or its rows as lines where the terminal is too narrow to show all of it."""
    from rich.text import Text

    if fits(out, table):
        out.print(table)
        return
    names = [str(column.header) for column in table.columns]
    out.print(Text(str(table.title or ""), style="italic"))
    for first, *cells in zip(*(column.cells for column in table.columns), strict=True):
        line = Text.assemble(Text.from_markup(first) if isinstance(first, str) else first, ": ")
        for i, (name, cell) in enumerate(zip(names[1:], cells, strict=True)):
            value = Text.from_markup(cell) if isinstance(cell, str) else cell
            if value.plain:
                line.append(", " if i else "").append(f"{name} " if name else "")
                line.append_text(value)
        out.print(line, overflow="fold")


def bars(out: Console) -> str:
    """Characters of rising height that the stream can show, the first for nothing."""
    levels = " ▁▂▃▄▅▆▇█"
    try:
        levels.encode(out.encoding)
    except (UnicodeEncodeError, LookupError):
        return " .:-=+*%#"
    return levels


@contextmanager
def progress(args: argparse.Namespace, label: str, total: int) -> Iterator[Any]:
    """Progress bar on stderr where it is a terminal, silent elsewhere and in plain text.

    Yields a function that advances the bar by its argument (default 1).
    """
    if not sys.stderr.isatty() or _plain(args):
        yield lambda n=1: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=stderr(args), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n=1: bar.advance(task, n)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Text ``"; did you mean 'x'?"`` for the closest known word, or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
