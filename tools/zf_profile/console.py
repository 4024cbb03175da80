"""Streams, exit codes and JSON: results on stdout, progress and notes on stderr.

With ``--json -`` stdout carries the JSON document alone, and the tables are not printed.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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

    # A pipe has no width of its own: 80 columns would wrap tables that a program or a log reads.
    width = None if stream.isatty() or "COLUMNS" in os.environ else 120
    color = getattr(args, "color", True)
    return Console(
        file=stream,
        quiet=quiet,
        width=width,
        no_color=None if color else True,
        highlight=False,
        soft_wrap=False,
    )


def check_json_target(args: argparse.Namespace) -> None:
    """Refuse a ``--json`` file that cannot be written before any work is done."""
    target = getattr(args, "json", None)
    if target in (None, "-"):
        return
    path = Path(target)
    if path.is_dir():
        raise UserError(f"--json {target}: is a folder; name a file in it")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--json {target}: the folder {path.resolve().parent} does not exist")


def write_json(args: argparse.Namespace, command: str, document: dict[str, Any]) -> None:
    """Write the command's document where ``--json`` says, whole or not at all."""
    target = getattr(args, "json", None)
    if target is None:
        return
    whole = {"schema": SCHEMA, "command": command, **document}
    text = json.dumps(whole, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_file(Path(target), text, "--json")


def write_file(path: Path, text: str, option: str) -> None:
    """Write `text` to `path` by way of a temporary file beside it."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror or error}") from None


@contextmanager
def progress(args: argparse.Namespace, label: str, total: int) -> Iterator[Any]:
    """Progress bar on stderr where it is a terminal, silent elsewhere.

    Yields a function that advances the bar by its argument (default 1).
    """
    if not sys.stderr.isatty():
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
