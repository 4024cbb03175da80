"""How the tests run the terminal tool in a process of its own, in pipes and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tools" / "zf_profile" / "data" / "real_kv.safetensors"
ESCAPE = "\x1b"


class Ran(NamedTuple):
    """What a run of the tool left behind."""

    code: int
    out: str
    err: str


def environment(**extra: str) -> dict[str, str]:
    """Environment of a child: a colour terminal, and nothing that changes how the tool prints."""
    changing = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED", "CLICOLOR_FORCE")
    env = {name: value for name, value in os.environ.items() if name not in changing}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "layouts", ROOT / "tools")))
    return {**env, "PYTHONPATH": path, "TERM": "xterm-256color", **extra}


def command(words: Iterable[object], python: Sequence[str] = ()) -> list[str]:
    """Command line of the tool, with options for the interpreter."""
    return [sys.executable, *python, "-m", "zf_profile", *map(str, words)]


def child(*words: object, python: Sequence[str] = (), **extra: str) -> Ran:
    """Run the tool in a process of its own, its streams in pipes."""
    done = subprocess.run(
        command(words, python), env=environment(**extra), capture_output=True, text=True
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def interruptible() -> None:
    """Let Ctrl-C reach a child even where this process was started in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def terminal(*words: object, columns: int = 80, pipe_stdout: bool = False, **extra: str) -> Ran:
    """Run the tool on a pseudo-terminal, which shows stderr, and stdout unless it is piped."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command(words),
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if pipe_stdout else theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen = b""
    while True:
        try:
            some = os.read(ours, 65536)
        except OSError:  # Linux's end of file of a terminal
            break
        if not some:
            break
        screen += some
    os.close(ours)
    out = process.communicate()[0] or b""
    return Ran(process.returncode, out.decode(), screen.decode())


def gaussian(*shape):
    return torch.randn(*shape).bfloat16()


def ones(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)
