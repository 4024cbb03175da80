"""What a command writes beside its tables: a JSON document and files, each whole or not at all."""

from __future__ import annotations

import argparse
import json
import math
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from zf_profile.console import UserError

SCHEMA = "zf-profile/1"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the ``--json`` option."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write one JSON document to FILE, or to stdout instead of the tables with '-'",
    )


def check_json_target(args: argparse.Namespace) -> None:
    """Refuse a ``--json`` file that cannot be written before any work is done."""
    if getattr(args, "json", None) not in (None, "-"):
        check_target("--json", args.json)


def check_target(option: str, target: str) -> None:
    """Refuse a file to write, named by an option, that cannot be written."""
    path = Path(target)
    try:
        if path.is_dir():
            raise UserError(f"{option} {target}: is a folder; name a file in it")
        folder = path.resolve().parent
        if not folder.is_dir():
            raise UserError(f"{option} {target}: the folder {folder} does not exist")
        if not _is_device(path):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UserError(
            f"{option} {target}: cannot be written: {error.strerror or error}"
        ) from None


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
        temporary = target.with_name(f".zf-profile.{os.getpid()}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror or error}") from None
