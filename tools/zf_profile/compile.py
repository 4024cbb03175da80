"""``zf-profile compile``: what every kernel takes of a GPU, found without one."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zf_cute.compile_key import ARCHS, CompileKey
from zf_profile import console, output
from zf_profile.console import Exit, UserError

if TYPE_CHECKING:
    from zf_cute.compile import KernelReport

SUMMARY = "compile every kernel without a GPU: registers, spills, shared memory, code"

DESCRIPTION = """\
Compile every variant of every kernel, and print the registers and spilled bytes of a thread, the
shared memory of a block, the bytes of code, and the seconds it took.  Needs neither a GPU nor a
driver.  Exit code 1 if a kernel spills, 5 if one does not compile.

Compiled kernels are kept in the folder that 'zf-profile doctor' shows; ZF_CUTE_CACHE_DIR names
another one, or is 'off'.  This command always compiles anew, and fills that folder with --warm."""

EXAMPLES = """\
examples:
  zf-profile compile
  zf-profile compile --kernel append,encode --json - | jq '.kernels[] | [.name, .registers]'
  zf-profile compile --keep out        also out/NAME.ptx and out/NAME.cubin
  zf-profile compile --warm            also what launches need, so that the first is quick
  zf-profile compile --clear-cache     remove what is kept on disk"""

MOST_JOBS = 8
"""More is for who asks for it: each process imports the compiler, and holds 0.3 GB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--arch",
        default=ARCHS[0],
        help=f"what to compile for: {', '.join(ARCHS)} (default {ARCHS[0]})",
    )
    parser.add_argument(
        "--kernel", metavar="NAMES", help="kernels, with commas between them (default: all)"
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="write NAME.ptx and NAME.cubin of every kernel to DIR"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help=f"processes that compile (default: one per core, at most {MOST_JOBS}, and one for a "
        "few kernels)",
    )
    parser.add_argument(
        "--warm", action="store_true", help="also fill the cache on disk that launches load from"
    )
    parser.add_argument(
        "--clear-cache",
        action="store_true",
        help="remove the compiled kernels on disk, say how many there were, and leave",
    )
    output.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, and print what the kernels take; returns the exit code."""
    if args.arch not in ARCHS:
        raise UserError(
            f"--arch {args.arch}: kernels are compiled for {', '.join(ARCHS)} (H100, H200)"
            f"{console.did_you_mean(args.arch, ARCHS)}"
        )
    if args.clear_cache:
        return _clear(args)
    names = _kernels(args.kernel)
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: choose 1 or more")
    if args.keep is not None:
        _check_folder(args.keep)
    env = None
    if args.json is not None:
        from zf_profile import environment

        console.import_interruptibly("torch")
        env = environment.environment()
    console.import_interruptibly("zf_cute.compile")
    from zf_cute import compile as compiler
    from zf_cute.kernels import catalog

    compiler.check_compiler()
    keys = [key for name in names for key in catalog.kernel_class(name).variants(args.arch)]
    jobs = _default_jobs(len(keys)) if args.jobs is None else args.jobs
    start = time.perf_counter()
    found: dict[CompileKey, KernelReport | str] = {}
    with (
        contextlib.closing(reports(keys, jobs, args.warm)) as made,
        console.progress(args, "kernels", len(keys)) as advance,
    ):
        for key, report in made:
            found[key] = report
            if args.keep is not None and not isinstance(report, str):
                _write(Path(args.keep) / f"{report.name}.ptx", report.ptx.encode())
                _write(Path(args.keep) / f"{report.name}.cubin", report.cubin)
            advance()
    records = [_record(key, found[key]) for key in keys]
    _print(args, records, time.perf_counter() - start)
    document = {"env": env, "arch": args.arch, "kernels": records, "cache": cache_record()}
    output.write_json(args, "compile", document)
    if any("reason" in record for record in records):
        return Exit.FAILED
    if args.warm and document["cache"]["entries"] < len(records):
        console.note(args, "--warm: not all kernels are on disk; ZF_CUTE_CACHE_DIR names the place")
        return Exit.NO
    return Exit.NO if any(record["spill_bytes"] for record in records) else Exit.DONE


# ---- compiling -----------------------------------------------------------------------------------
def reports(
    keys: Sequence[CompileKey], jobs: int, warm: bool = False
) -> Generator[tuple[CompileKey, KernelReport | str], None, None]:
    """Compile keys in processes of their own, as the DSL compiles one kernel at a time.

    Yields keys as they are done, each with what was found, or why it does not compile.  Closing
    it waits for what is being compiled, and starts nothing more.

    Parameters
    ----------
    keys : sequence of CompileKey
        What to compile.
    jobs : int
        Processes; 1 compiles in this one.
    warm : bool
        Also put what launches need into the cache on disk.
    """
    jobs = min(jobs, len(keys))
    if jobs <= 1:
        for key in keys:
            yield key, _report(key, warm)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # Not forked: this process may run torch's threads, and the bar's.  What a worker that Ctrl-C
    # ends has written goes with the folder.
    folder = tempfile.TemporaryDirectory(prefix="zf_cute-", ignore_cleanup_errors=True)
    context = get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(folder.name,))
    try:
        with _no_interrupt():
            futures = {pool.submit(_report, key, warm): key for key in keys}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], "the process that compiled it, or one beside it, died"
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        folder.cleanup()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Keep Ctrl-C from this process meanwhile, and from those it starts until they are ready.

    A terminal sends it to all of them, and Python would print a traceback in each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(folder: str) -> None:
    tempfile.tempdir = folder
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on Ctrl-C ends it, in silence
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.dup2(2, 1)  # stdout is for the results


def _report(key: CompileKey, warm: bool) -> KernelReport | str:
    from zf_cute.compile import inspect_kernel
    from zf_cute.errors import ZfError

    try:
        with contextlib.redirect_stdout(sys.stderr):
            return inspect_kernel(key, warm=warm)
    except ZfError as error:
        return str(error)


# ---- arguments -----------------------------------------------------------------------------------
def _kernels(text: str | None) -> list[str]:
    """Names of kernels that ``--kernel`` asks for, each once, in the catalog's order."""
    from zf_cute.kernels.catalog import KERNELS

    if text is None:
        return list(KERNELS)
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in KERNELS:
            raise UserError(
                f"--kernel {word or repr(word)}: there is no such kernel"
                f"{console.did_you_mean(word, KERNELS)} (choose from {', '.join(KERNELS)})"
            )
    return [name for name in KERNELS if name in words]


def _default_jobs(kernels: int) -> int:
    """Processes for so many kernels; one for a few, which compile while others would start."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, min(cores, MOST_JOBS, kernels // 4))


def _check_folder(name: str) -> None:
    """Make the folder of ``--keep``, and refuse one that cannot be written before any work."""
    folder = Path(name)
    try:
        if not folder.resolve().parent.is_dir():
            raise UserError(f"--keep {name}: the folder {folder.resolve().parent} does not exist")
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--keep {name}: cannot be written: {error.strerror or error}") from None


def _write(path: Path, data: bytes) -> None:
    """Write a file of ``--keep``, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"--keep {path}: {error.strerror or error}") from None


def _clear(args: argparse.Namespace) -> int:
    for option in ("kernel", "keep", "jobs", "warm"):
        if getattr(args, option):
            raise UserError(
                f"--clear-cache: does nothing else; run it without --{option}, then again with it"
            )
    from zf_cute.compile_cache import clear_cache

    path, entries, size = clear_cache()
    what = f"removed {entries} compiled kernels, {size:,} bytes" if size else "nothing to remove"
    left = cache_record()
    if left["bytes"]:
        what = f"removed {entries} compiled kernels; {left['entries']} cannot be removed"
    where = console.printable(str(path)) if path is not None else "the cache is off"
    console.stdout(args).print(f"{what}: {where}", markup=False, soft_wrap=True)
    document = {
        "arch": args.arch,
        "kernels": [],
        "cache": {**left, "removed": {"entries": entries, "bytes": size}},
    }
    output.write_json(args, "compile", document)
    return Exit.NO if left["bytes"] else Exit.DONE


# ---- results -------------------------------------------------------------------------------------
def cache_record() -> dict[str, Any]:
    """Build the ``cache`` object of a JSON document: a null path means that nothing is kept."""
    from zf_cute.compile_cache import cache_info

    path, entries, size = cache_info()
    return {"path": None if path is None else str(path), "entries": entries, "bytes": size}


NUMBERS = ("registers", "spill_bytes", "smem_bytes", "code_bytes", "seconds")


def _record(key: CompileKey, report: KernelReport | str) -> dict[str, Any]:
    if isinstance(report, str):
        return {"name": key.name, **dict.fromkeys(NUMBERS), "reason": report}
    numbers = {name: getattr(report, name) for name in NUMBERS}
    return {"name": report.name, **numbers, "seconds": round(report.seconds, 4)}


def _print(args: argparse.Namespace, records: list[dict[str, Any]], seconds: float) -> None:
    from rich.text import Text

    out = console.stdout(args)
    table = console.new_table(f"Kernels for {args.arch}")
    table.add_column("kernel")
    for name in ("registers", "spilled", "smem", "code", "seconds"):
        table.add_column(name, justify="right")
    failed = [record for record in records if "reason" in record]
    spilling = [record for record in records if record["spill_bytes"]]
    for record in records:
        if "reason" in record:
            table.add_row(record["name"], "[red]failed[/red]")
            continue
        spilled = f"[red]{record['spill_bytes']}[/red]" if record["spill_bytes"] else "0"
        table.add_row(
            record["name"],
            str(record["registers"]),
            spilled,
            f"{record['smem_bytes']:,}",
            f"{record['code_bytes']:,}",
            f"{record['seconds']:.2f}",
        )
    console.print_table(out, table)
    out.print("registers and spilled bytes of a thread, smem bytes of a block, bytes of code\n")
    verdict = f"{len(spilling)} spill" if spilling else "none spills"
    if failed:
        verdict += f", {len(failed)} do not compile"
    out.print(f"{len(records)} kernels in {seconds:.1f} s: {verdict}", markup=False)
    if args.warm:
        cache = cache_record()
        out.print(
            f"on disk: {cache['entries']} compiled kernels, {cache['bytes']:,} bytes: "
            f"{console.printable(cache['path'] or 'the cache is off')}",
            markup=False,
            soft_wrap=True,
        )
    err = console.stderr(args)
    for record in failed:
        for line in record["reason"].splitlines():
            err.print(Text(console.printable(line)), soft_wrap=True)
