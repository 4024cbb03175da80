"""``zf-profile bench``: what the kernels reach on this GPU, beside what it can do at all."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from zf_profile import bench_cases, console, output
from zf_profile.bench_cases import CASES, KERNELS, KV, Case
from zf_profile.console import Exit, UserError

if TYPE_CHECKING:
    from zf_profile.backend import Backend
    from zf_profile.bed import Bed
    from zf_profile.bench_report import Options
    from zf_profile.measurement import Measurement
    from zf_profile.timing import Stopwatch
    from zf_profile.work import Work

SUMMARY = "time the kernels on this GPU, after checking every bit"
DESCRIPTION = """\
Check the kernels bit for bit on a case, then time them: median over samples from a cold L2, bytes
read and written, percent of the copy rate measured among the same samples, time in a CUDA graph,
host time of a call directly and through the torch operator.  Exit code 1 if a bit differs, a rate
lies above the measured ceiling or a call compiles; 3 without an SM90 GPU; 5 if a launch fails.
Ctrl-C keeps the cases that are finished."""
EXAMPLES = """\
examples:
  zf-profile bench                                     default cases, all kernels
  zf-profile bench --list                              what there is; needs no GPU
  zf-profile bench --kernel encode,decode_pages --case llama-3.1-8b-b32-8k
  zf-profile bench --case all --kv gaussian --json result.json
  zf-profile bench --kernel append --host              host time of launches alone"""

SAMPLES = 200
_IDLE_REASONS = {"gpu_idle", "applications_clocks_setting"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--kernel",
        metavar="K[,K]",
        type=_names("kernel", KERNELS),
        default=list(KERNELS),
        help=f"of {', '.join(KERNELS)} (default all); copies are always timed, as the ceiling",
    )
    parser.add_argument(
        "--case",
        metavar="NAME[,NAME]",
        type=_names("case", CASES),
        default=bench_cases.default_cases(),
        help="cases, or 'all' (default: those that --list marks)",
    )
    parser.add_argument("--list", action="store_true", help="print kernels and cases, and leave")
    parser.add_argument(
        "--samples",
        type=_positive,
        default=SAMPLES,
        metavar="N",
        help=f"samples of each launch (default {SAMPLES})",
    )
    parser.add_argument(
        "--kv",
        choices=KV,
        default="real",
        help="what pages hold: "
        + "; ".join(f"{name}, {text}" for name, text in KV.items())
        + " (default real)",
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help="of random values and of the order of pages (default 0)",
    )
    parser.add_argument(
        "--host", action="store_true", help="check, then time the host's part of a launch alone"
    )
    output.add_json_option(parser)


def _names(what: str, known: dict[str, Any]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between them; 'all' is every one."""

    def parse(text: str) -> list[str]:
        if text == "all":
            return list(known)
        found = list(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in known:
                hint = console.did_you_mean(name, known)
                raise argparse.ArgumentTypeError(
                    f"no {what} {name!r}{hint} (choose from {', '.join(known)})"
                )
        return found

    return parse


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >> 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 2**63 - 1")
    return int(text)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1")
    return number


# ---- what there is -----------------------------------------------------------------------------
def _list(args: argparse.Namespace) -> int:
    out = console.stdout(args)
    table = console.new_table("Kernels and their variants")
    for name in ("kernel", "variant", "what one launch does"):
        table.add_column(name)
    for kernel, variants in KERNELS.items():
        for variant, text in variants.items():
            table.add_row(kernel, variant, text)
    console.print_table(out, table)
    out.print()
    table = console.new_table("Cases; * runs by default")
    table.add_column("case")
    table.add_column("")
    for name in ("requests", "tokens", "KV heads", "head_dim", "page", "MB"):
        table.add_column(name, justify="right")
    for case in CASES.values():
        shape = case.shape
        numbers = (case.batch, case.kv_len, shape.num_kv_heads, shape.head_dim, shape.page_size)
        size = f"{case.kv_bytes / 1e6:.0f}"
        table.add_row(case.name, "*" if case.default else "", *map(str, numbers), size)
    console.print_table(out, table)
    cases = [{**case.record(), "default": case.default} for case in CASES.values()]
    output.write_json(args, "bench", {"kernels": KERNELS, "known_cases": cases})
    return Exit.DONE


# ---- running -----------------------------------------------------------------------------------
def rig() -> tuple[Backend, Stopwatch]:
    """Return what is measured and what measures it; UserError where no such GPU is."""
    from zf_profile import environment
    from zf_profile.timing import CudaStopwatch

    missing = environment.missing_gpu()
    if missing:
        raise UserError(missing, Exit.NO_GPU)
    import torch

    from zf_cute import launch
    from zf_profile.backend import Kernels

    unusable = launch.unsupported(torch.device("cuda", torch.cuda.current_device()))
    if unusable:  # a package is missing
        raise UserError(unusable)
    return Kernels(), CudaStopwatch()


def run(args: argparse.Namespace) -> int:
    """Measure what was asked for; returns the exit code."""
    if args.list:
        return _list(args)
    console.import_interruptibly("torch", "safetensors.torch", "zf_cute.reference")
    from zf_profile import bench_report, environment

    if args.host and args.kernel == ["copy"]:
        raise UserError("--host: copies are torch's; name a kernel of zf_cute's to time its launch")
    options = bench_report.Options(args.kv, args.seed, args.samples, args.host)
    cases = [CASES[name] for name in args.case]
    document: dict[str, Any] = {
        "env": environment.environment(),
        "options": {
            "kernels": args.kernel,
            "cases": args.case,
            "kv": args.kv,
            "seed": args.seed,
            "samples": args.samples,
            "host_only": args.host,
        },
        "interrupted": False,
        "gpu_state": None,
        "ceiling": None,
        "compiled_keys": None,
        "cases": [],
    }
    try:
        backend, watch = rig()
    except UserError as error:
        output.write_json(args, "bench", {**document, "reason": str(error)})
        raise
    bench = _Bench(args, options, backend, watch)
    try:
        bench.run(cases)
    except KeyboardInterrupt:
        document["interrupted"] = True
    document["gpu_state"] = bench.states or None
    document["ceiling"] = bench_report.run_ceiling(bench.entries)
    document["cases"] = bench.entries
    document["compiled_keys"] = backend.compiled()
    _print(args, {**document["env"], **bench.states.get("before", {})}, bench)
    output.write_json(args, "bench", document)
    if document["interrupted"]:
        raise KeyboardInterrupt
    return bench_report.exit_code(bench.entries)


class _Bench:
    """A run over cases: what has been found so far outlives an interrupt."""

    def __init__(
        self, args: argparse.Namespace, options: Options, backend: Backend, watch: Stopwatch
    ) -> None:
        self.args, self.options, self.backend, self.watch = args, options, backend, watch
        self.entries: list[dict[str, Any]] = []
        self.states: dict[str, dict[str, Any]] = {}

    def run(self, cases: Sequence[Case]) -> None:
        """Measure every case, and look at the GPU's clocks before and after."""
        self._look("before")
        total = len(cases) * self.args.samples
        with console.progress(self.args, "samples", total) as advance:
            for case in cases:
                advance(self.args.samples - self._case(case, advance))
        self._look("after")

    def _case(self, case: Case, advance: Callable[[int], None]) -> int:
        """Measure a case; returns how many samples the progress bar was told of."""
        from zf_profile import bench_report
        from zf_profile.bed import Bed
        from zf_profile.measurement import Plan, broken, measure

        told = 0

        def tell(n: int) -> None:
            nonlocal told
            told += n
            advance(n)

        content, found = None, []
        try:
            bed = Bed(case, self.options.kv, self.options.seed, self.backend)
            content = bed.content_record()
        except Exception as error:  # no memory for it, say: other cases may still run
            for kernel in self._kernels():
                found += broken(kernel, error)
        else:
            works, found = self._works(bed)
            host_only = self.options.host_only
            plan = Plan(self.backend, self.watch, self.options.samples, host_only, tell)
            found += measure(works, plan)
            del bed, works
        order = list(KERNELS)
        found.sort(key=lambda one: order.index(one.work.kernel))
        self.entries += bench_report.records(case, content, found, self.options)
        del found
        self._free()
        return told

    def _kernels(self) -> list[str]:
        """Kernels to run: copies always, unless only the host's time is asked for."""
        asked = {*self.args.kernel, "copy"} - ({"copy"} if self.options.host_only else set())
        return [kernel for kernel in KERNELS if kernel in asked]

    def _works(self, bed: Bed) -> tuple[list[Work], list[Measurement]]:
        """Works of the kernels to run, and measurements of those that cannot be set up."""
        from zf_profile import ceiling, codec_works
        from zf_profile.measurement import broken

        makers = {
            "append": codec_works.append_works,
            "encode": codec_works.encode_works,
            "decode_pages": codec_works.decode_works,
            "copy": ceiling.copy_works,
        }
        works: list[Work] = []
        failed: list[Measurement] = []
        for kernel in self._kernels():
            try:
                works += makers[kernel](bed, KERNELS[kernel])
            except Exception as error:
                failed += broken(kernel, error)
        return works, failed

    def _free(self) -> None:
        """Give the memory of a case back, so that the next one has all of it."""
        import torch

        gc.collect()
        if torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):  # said already by what was measured
                torch.cuda.empty_cache()

    def _look(self, when: str) -> None:
        """Read the clocks while the GPU is at work: idle, it lowers them."""
        from zf_profile import environment

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(environment.gpu_state)
            with contextlib.suppress(RuntimeError):  # a device that has failed is idle
                while not asked.done():
                    for _ in range(50):
                        self.watch.flush()
                    self.watch.synchronize()
        state = self.states[when] = asked.result()
        held = set(state["throttle"] or ()) - _IDLE_REASONS
        if held:
            console.note(self.args, f"the GPU holds its clocks back: {', '.join(sorted(held))}")


def _print(args: argparse.Namespace, env: dict[str, Any], bench: _Bench) -> None:
    from zf_profile import bench_report

    out = console.stdout(args)
    out.print(bench_report.header(env, bench.options), markup=False)
    for name, entries in _by_case(bench.entries):
        bench_report.print_case(out, CASES[name], entries)


def _by_case(entries: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry["case"]["name"], []).append(entry)
    return list(groups.items())
