"""``zf-profile doctor``: versions, what can run here, what is missing and how to get it."""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from zf_cute import compile as compiler
from zf_cute.compile_cache import VARIABLE
from zf_profile import console, output
from zf_profile.compile import cache_record
from zf_profile.console import Exit
from zf_profile.environment import version

SUMMARY = "versions, what can run here, and what is missing"
DESCRIPTION = """\
Check the packages, the GPU and the profiler, and say what can run on this machine, what is
missing and how to get it, and where compiled kernels are kept.  Exit code 1 if the reference
backend or kernel compilation cannot run; a missing GPU or profiler is reported and is no
failure."""
EXAMPLES = """\
examples:
  zf-profile doctor
  zf-profile doctor --json -"""

PYTHONS = ((3, 10), (3, 14))
REQUIRED = {
    # distribution: (module, lowest version, first version too high, how to get it)
    "torch": ("torch", (2, 11), None, "pip install torch"),
    **compiler.REQUIRED,
    "cuda-python": ("cuda.bindings", (13,), (14,), "pip install 'cuda-python>=13,<14'"),
    "rich": ("rich", (13,), None, "pip install rich"),
    "safetensors": ("safetensors", (0, 4), None, "pip install safetensors"),
}
OPTIONAL = {
    "flashinfer-python": ("flashinfer", "pip install flashinfer-python (a peer to compare with)"),
}
IMPORT_SECONDS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    output.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Examine this machine; returns the exit code."""
    checks = [_python(), *map(_package, REQUIRED), *map(_peer, OPTIONAL)]
    gpu, driver = _gpu(), _driver()
    checks += [gpu, driver, _profiler()]
    good = {check["name"]: check["ok"] for check in checks}
    reference = all(good[name] for name in ("python", "torch", "safetensors", "rich"))
    compiles = reference and all(good[name] for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    abilities = [
        _ability("reference backend, demo, ratio", reference, "any device torch supports"),
        _ability("layout", good["python"] and good["rich"], "needs no torch"),
        _ability("compiling kernels for sm_90a", compiles, "needs no GPU: zf-profile compile"),
        _ability("running kernels", compiles and good["gpu"], "needs an SM90 GPU as well"),
    ]
    cache = cache_record()
    _print(args, checks, abilities, cache)
    document = {"checks": checks, "can_run": abilities, "compile_cache": cache}
    output.write_json(args, "doctor", document)
    return Exit.DONE if reference and compiles else Exit.NO


def _check(name: str, ok: bool, found: str | None, remedy: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "remedy": "" if ok else remedy}


def _ability(name: str, ok: bool, note: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "note": note}


def _python() -> dict[str, Any]:
    lowest, limit = (".".join(map(str, v)) for v in PYTHONS)
    ok = PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]
    return _check("python", ok, platform.python_version(), f"use Python {lowest} to below {limit}")


def _numbers(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.14.1+cu130" gives (2, 14, 1)."""
    numbers = []
    for piece in text.split("+")[0].split("."):
        digits = piece[: len(piece) - len(piece.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _package(distribution: str) -> dict[str, Any]:
    module, lowest, limit, remedy = REQUIRED[distribution]
    found = version(distribution)
    if found is None and not _findable(module):
        return _check(distribution, False, None, remedy)
    if found is not None:
        numbers = _numbers(found)
        if numbers < lowest or (limit is not None and numbers >= limit):
            upper = f" and below {'.'.join(map(str, limit))}" if limit else ""
            wanted = f"{'.'.join(map(str, lowest))} or newer{upper} is wanted: {remedy}"
            return _check(distribution, False, found, wanted)
    # In a process of its own: a broken install must not take the doctor down with it.
    try:
        trial = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _check(distribution, False, found, f"import {module} hangs: {remedy}")
    if trial.returncode:
        last = (trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"])[-1]
        return _check(distribution, False, found, f"import {module} fails ({last}): {remedy}")
    return _check(distribution, True, found or "importable")


def _findable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _peer(distribution: str) -> dict[str, Any]:
    module, remedy = OPTIONAL[distribution]
    found = version(distribution)
    return _check(
        distribution, found is not None and _findable(module), found, f"optional: {remedy}"
    )


def _gpu() -> dict[str, Any]:
    try:
        console.import_interruptibly("torch")
        import torch
    except Exception:  # a broken install raises OSError or RuntimeError too
        return _check("gpu", False, None, "torch is needed to look for one")
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device: a GPU and its driver are needed"
        )
        return _check("gpu", False, None, why)
    major, minor = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    return _check("gpu", major == 9, name, "kernels are for sm_90a (H100, H200)")


def _driver() -> dict[str, Any]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return _check("driver", False, None, "nvidia-smi not found: no NVIDIA driver here")
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _check("driver", False, None, f"nvidia-smi does not answer: {error}")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return _check("driver", False, None, "nvidia-smi finds no GPU")
    return _check("driver", True, lines[0].strip())


def _profiler() -> dict[str, Any]:
    tool = shutil.which("ncu")
    return _check("ncu", tool is not None, tool, "optional: Nsight Compute, in the CUDA toolkit")


def _cache_line(cache: dict[str, Any]) -> str:
    if cache["path"] is None:
        return f"Compiled kernels are not kept on disk ({VARIABLE} says so, or there is no home)"
    return (
        f"Compiled kernels: {cache['entries']} on disk, {cache['bytes']:,} bytes, in "
        f"{console.printable(cache['path'])} ('zf-profile compile --clear-cache' removes them)"
    )


def _print(
    args: argparse.Namespace,
    checks: list[dict[str, Any]],
    abilities: list[dict[str, Any]],
    cache: dict[str, Any],
) -> None:
    try:
        from rich.text import Text
    except ImportError:
        if args.json == "-":
            return
        for row in (*checks, *abilities):
            print(row["name"], "ok" if row["ok"] else f"no: {row.get('remedy') or row.get('note')}")
        print(_cache_line(cache))
        return
    out = console.stdout(args)

    table = console.new_table("What is here")
    table.add_column("what")
    table.add_column("", no_wrap=True)
    table.add_column("found")
    table.add_column("what to do", overflow="fold")
    for check in checks:
        mark = "[green]ok[/green]" if check["ok"] else "[yellow]no[/yellow]"
        # Text, not str: what an import says may look like rich's markup.
        cells = (Text(console.printable(text)) for text in (check["found"] or "-", check["remedy"]))
        table.add_row(check["name"], mark, *cells)
    console.print_table(out, table)
    table = console.new_table("What can run here")
    table.add_column("what")
    table.add_column("", no_wrap=True)
    table.add_column("note")
    for ability in abilities:
        mark = "[green]yes[/green]" if ability["ok"] else "[yellow]no[/yellow]"
        table.add_row(ability["name"], mark, ability["note"])
    console.print_table(out, table)
    out.print()
    out.print(Text(_cache_line(cache)), soft_wrap=True)
