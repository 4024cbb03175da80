"""Three tools of compute-sanitizer find nothing in a small case."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.sanitizer_case import DONE

pytestmark = pytest.mark.gpu

TOOLS = ("memcheck", "racecheck", "initcheck")
TIMEOUT = 180
"""Seconds that a test waits for its tool; importing torch under one takes most of what it needs."""

FOUND = 9
"""Exit code that is the sanitizer's own: no other part of a run has it."""


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The case under all three tools, side by side: most of their time is spent on the host."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin")
    # Every tensor is an allocation of its own: an access past its end is one past an allocation's.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    options = ["--error-exitcode", str(FOUND), "--print-limit", "20"]
    # Torch probes for entry points that a driver may not have, which is no error of a kernel.
    options += ["--report-api-errors", "no"]
    case = [sys.executable, str(Path(__file__).with_name("sanitizer_case.py"))]
    started = {
        name: subprocess.Popen(
            [tool, "--tool", name, *options, *_watched(name), *case],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for name in TOOLS
    }
    yield started
    for run in started.values():
        _end(run)


def _watched(tool: str) -> list[str]:
    """Our kernels alone; initcheck must see all writes, or what torch wrote counts as unwritten."""
    return [] if tool == "initcheck" else ["--kernel-regex", "kns=zf_"]


def _end(run: subprocess.Popen[str]) -> None:
    """End a run and the program that it checks, if they have not ended."""
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer_finds_nothing(runs: dict[str, subprocess.Popen[str]], tool: str) -> None:
    """The case runs to its end, with right results, and the tool has nothing to report."""
    start = time.monotonic()
    try:
        said, _ = runs[tool].communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        _end(runs[tool])
        pytest.fail(f"{tool} did not finish in {time.monotonic() - start:.0f} s")
    if "Device not supported" in said:
        pytest.skip(f"compute-sanitizer cannot watch this machine's GPU: {said.strip()[-200:]}")
    assert runs[tool].returncode != FOUND, f"{tool} found:\n{said[-6000:]}"
    assert runs[tool].returncode == 0, f"{tool} ended with {runs[tool].returncode}:\n{said[-6000:]}"
    assert DONE in said, f"the case did not run to its end under {tool}:\n{said[-6000:]}"
    summary = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert summary in said, f"{tool} said:\n{said[-6000:]}"
