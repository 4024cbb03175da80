"""Streams, exit codes and JSON: results on stdout, progress and notes on stderr.

With ``--json -`` stdout carries the JSON document alone, and the tables are not printed.
"""

from __future__ import annotations

import argparse
import enum
import json
import math
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "zf-profile/1"


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


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the ``--json`` option."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write one JSON document to FILE, or to stdout instead of the tables with '-'",
    )


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


def shown(text: str) -> str:
    """`text` with what is no printable character escaped, so that a name cannot move the cursor."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def load(*modules: str) -> None:
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


def check_json_target(args: argparse.Namespace) -> None:
    """Refuse a ``--json`` file that cannot be written before any work is done."""
    target = getattr(args, "json", None)
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        if path.is_dir():
            raise UserError(f"--json {target}: is a folder; name a file in it")
        folder = path.resolve().parent
        if not folder.is_dir():
            raise UserError(f"--json {target}: the folder {folder} does not exist")
        if not _is_device(path):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UserError(f"--json {target}: cannot be written: {error.strerror or error}") from None


def _is_device(path: Path) -> bool:
    """Whether `path` is a pipe or a device: written to, and never replaced by a file."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def write_json(args: argparse.Namespace, command: str, document: dict[str, Any]) -> None:
    """Write the command's document where ``--json`` says, whole or not at all."""
    target = getattr(args, "json", None)
    if target is None:
        return
    whole = _finite({"schema": SCHEMA, "command": command, **document})
    text = json.dumps(whole, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_file(Path(target), text, "--json")


def _finite(value: Any) -> Any:
    """`value` with null for NaN and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_file(path: Path, text: str, option: str) -> None:
    """Write `text` to `path` by way of a temporary file beside it."""
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()  # what a link names is replaced, not the link
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".zf-profile.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror or error}") from None


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
