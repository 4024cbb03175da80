"""What ``bench`` says: a table for each case, and the records of its JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zf_profile import ceiling, console, timing
from zf_profile.bench_cases import Case
from zf_profile.console import Exit
from zf_profile.measurement import Measurement

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LATENCY = "a few kB: latency, not bytes, bounds it"


@dataclass(frozen=True)
class Options:
    """What a run was asked for; every record's ``repro`` repeats it.

    Attributes
    ----------
    kv : str
        What the values were.
    seed, samples : int
        As given.
    host_only : bool
        Whether the GPU was not timed.
    """

    kv: str
    seed: int
    samples: int
    host_only: bool = False

    def repro(self, kernel: str, case: str) -> str:
        """Command line that measures a kernel on a case again."""
        host = " --host" if self.host_only else ""
        return (
            f"zf-profile bench --kernel {kernel} --case {case} --kv {self.kv} "
            f"--samples {self.samples} --seed {self.seed}{host}"
        )


def ceiling_record(found: Sequence[Measurement]) -> dict[str, Any]:
    """Best copy among the measurements of a case."""
    rates = []
    for one in found:
        if one.work.is_ceiling and one.traffic and one.direct and one.direct.samples:
            total, median = one.traffic.total, timing.quantile(one.direct.samples, 0.5)
            rates.append((ceiling.gbps(total, median), one.work.variant, total))
    if not rates:
        return {"copy_gbps": None, "reason": "no copy was timed"}
    rate, way, nbytes = max(rates)
    return {"copy_gbps": round(rate, 3), "way": way, "bytes": nbytes}


def records(
    case: Case,
    content: dict[str, Any] | None,
    found: Sequence[Measurement],
    options: Options,
) -> list[dict[str, Any]]:
    """Entries of ``cases`` of a JSON document: one for each measurement of a case.

    Parameters
    ----------
    case : Case
        What was measured.
    content : dict or None
        What its pages hold, as `Bed.content_record` says; None if they could not be made.
    found : sequence of Measurement
        All of the case, its copies among them.
    options : Options
        What was asked for.
    """
    peak = ceiling_record(found)
    return [_record(case, content, one, options, peak) for one in found]


def _record(
    case: Case,
    content: dict[str, Any] | None,
    one: Measurement,
    options: Options,
    peak: dict[str, Any],
) -> dict[str, Any]:
    work, calls = one.work, len(one.work.calls)
    record: dict[str, Any] = {
        "case": case.record(),
        "content": content,
        "kernel": work.kernel,
        "variant": work.variant,
        "detail": work.detail,
        "match": one.match,
        "failed": one.failed,
        "valid": True,
        "reason": None,
        "time_us": None,
        "bytes": one.traffic.record() if one.traffic else None,
        "gbps": None,
        "pct_measured_peak": None,
        "ceiling": peak,
        "graph_us": None,
        "graph": None,
        "host_us": _rounded(one.host_us),
        "operator_host_us": _rounded(one.operator_host_us),
        "repro": options.repro(work.kernel, case.name),
    }
    if one.direct is not None:
        record["time_us"] = timing.summary(one.direct.samples)
        if one.direct.samples and one.traffic:
            rate = ceiling.gbps(one.traffic.total, timing.quantile(one.direct.samples, 0.5))
            _add_rate(record, one, rate, peak)
        if one.direct.late:
            record["late_samples"] = one.direct.late
    if one.graph is not None and one.graph.samples:
        each = [x / calls for x in one.graph.samples]
        record["graph"] = {"launches": calls, **(timing.summary(each, keep=False) or {})}
        record["graph_us"] = record["graph"]["median"]
    record["reason"] = one.reason or None
    record["valid"] = not one.reason
    untimed = "only the host's time was asked for" if options.host_only else "not timed"
    if one.direct is not None:  # and yet without samples
        untimed = f"the host fell behind the GPU in all of {one.direct.late} samples"
    reasons = {
        "time_us": untimed,
        "gbps": untimed,
        "pct_measured_peak": untimed if work.bandwidth or record["gbps"] is None else _LATENCY,
        "graph_us": one.graph_reason or "not timed",
        "host_us": "a copy of torch's" if work.is_ceiling else "not timed",
        "operator_host_us": one.operator_reason or "not timed",
        "bytes": "counted once the result is right",
        "match": "it could not be run",
    }
    for name, why in reasons.items():
        if record[name] is None:
            record[f"{name}_reason"] = one.reason or why
    return record


def _add_rate(record: dict[str, Any], one: Measurement, rate: float, peak: dict[str, Any]) -> None:
    """Add bytes over time, and what share of the ceiling that is."""
    record["gbps"] = round(rate, 3)
    if one.work.bandwidth and peak["copy_gbps"] is not None:
        record["pct_measured_peak"] = round(100 * rate / peak["copy_gbps"], 2)
        one.reject(ceiling.over(rate, peak["copy_gbps"]))


def _rounded(microseconds: float | None) -> float | None:
    return None if microseconds is None else round(microseconds, 3)


def run_ceiling(cases: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """``ceiling`` of a JSON document, from its records: the best copy of each case."""
    by_case = {record["case"]["name"]: record["ceiling"] for record in cases}
    timed = [entry for entry in by_case.values() if entry["copy_gbps"] is not None]
    if not timed:
        return None
    return {
        **max(timed, key=lambda entry: float(entry["copy_gbps"])),
        "read_gbps": None,
        "read_gbps_reason": ceiling.NO_READ_CEILING,
        "tolerance_pct": 100 * ceiling.TOLERANCE,
        "by_case": by_case,
    }


def exit_code(entries: Sequence[dict[str, Any]]) -> Exit:
    """5 if something failed, else 1 if something is no valid result, else 0."""
    if any(entry["failed"] for entry in entries):
        return Exit.FAILED
    return Exit.DONE if all(entry["valid"] for entry in entries) else Exit.NO


# ---- tables ------------------------------------------------------------------------------------
def header(env: dict[str, Any], options: Options) -> str:
    """Conditions of the run, in a line or two."""
    clocks = env.get("clocks") or {}
    pieces = [
        f"{env['gpu'] or 'no GPU'}" + (f" sm_{env['sm']}" if env["sm"] else ""),
        f"driver {env.get('driver') or '?'}",
        f"SM {clocks.get('sm_mhz') or '?'} MHz, memory {clocks.get('memory_mhz') or '?'} MHz",
        f"torch {env['torch']}",
        f"dsl {env['dsl']}",
    ]
    how = (
        f"cold L2 ({timing.FLUSH_BYTES >> 20} MB read before each sample), medians of "
        f"{options.samples} samples, variants interleaved"
    )
    return ", ".join(pieces) + "\n" + ("host time alone" if options.host_only else how)


def print_case(out: Console, case: Case, entries: Sequence[dict[str, Any]]) -> None:
    """Print the table of a case, and why its invalid entries are."""
    content = entries[0]["content"]
    out.print()
    out.print(case.text, markup=False)
    if content is not None:
        kinds = content["blocks"]
        share = 1 - kinds["raw"] / max(1, sum(kinds.values()))
        out.print(
            f"values: {content['source']}; {share:.1%} of blocks encoded, "
            f"{content['stored_ratio']:.4f} of raw (on {content['checked_pages']} pages)",
            markup=False,
        )
    console.print_table(out, _table(case, entries))
    for entry in entries:
        if entry["reason"]:
            name = f"{entry['kernel']} {entry['variant']}"
            out.print(console.printable(f"{name}: {entry['reason']}"), markup=False)


def _table(case: Case, entries: Sequence[dict[str, Any]]) -> Table:
    table = console.new_table(f"{case.name}: us a launch; GB/s and % of copy count read + written")
    table.add_column("kernel")
    table.add_column("variant")
    names = ("median", "p10-p90", "GB/s", "% copy", "graph", "host", "torch op", "match")
    for name in names:
        table.add_column(name, justify="right")
    for entry in entries:
        took = entry["time_us"]
        spread = f"{took['p10']:.1f}-{took['p90']:.1f}" if took else "-"
        mark = {True: "yes", False: "[red]NO[/red]", None: "-"}[entry["match"]]
        if entry["match"] and not entry["valid"]:
            mark = "[red]INVALID[/red]"
        table.add_row(
            entry["kernel"],
            entry["variant"],
            f"{took['median']:.1f}" if took else "-",
            spread,
            _number(entry["gbps"], ".0f"),
            _number(entry["pct_measured_peak"], ".1f"),
            _number(entry["graph_us"], ".2f"),
            _number(entry["host_us"], ".1f"),
            _number(entry["operator_host_us"], ".1f"),
            mark,
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
