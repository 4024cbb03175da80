"""The README keeps its word: its example runs as pasted, and its numbers are the demo's."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.M | re.S)


def test_the_example_runs_as_pasted():
    (example,) = blocks("python")
    exec(compile(example, str(README), "exec"), {})


def test_two_commands_do_all_the_set_up():
    install, run_tests = blocks("sh")
    assert install.strip().endswith("zf-profile demo")
    assert run_tests.strip().endswith("pytest -q")


@pytest.fixture(scope="module")
def demo():
    command = [sys.executable, "-m", "zf_profile", "demo", "--json", "-"]
    paths = [str(README.parent / root) for root in (".", "layouts", "tools")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(paths)}, check=True
    )
    return json.loads(done.stdout)


def test_its_numbers_are_the_demos(demo):
    text, whole = README.read_text(), demo["totals"]
    gains = {f"{case['token_gain']:.3f}x" for case in demo["capacity"]["cases"]}
    assert len(gains) == 1
    for number in (
        f"{whole['bits_per_value']:.3f} ({whole['ratio']:.4f} of BF16; ",
        f"about {whole['bits_per_value']:.2f} bits a value",
        f"{demo['capacity']['sealed_ratio']:.3f} for 8-head pages with alignment",
        f"({whole['ratio']:.3f} of BF16, all metadata included, on the bundled sample",
        f"{whole['stored_ratio']:.3f} here",
        gains.pop(),
    ):
        assert number in text, f"README.md does not say {number!r}"


RESULTS = README.parent / "tools" / "results"


def results(name: str, kernel: str, variant: str, case: str) -> dict:
    document = json.loads((RESULTS / name).read_text())
    (found,) = (
        entry
        for entry in document["cases"]
        if (entry["kernel"], entry["variant"]) == (kernel, variant)
        and entry["case"]["name"] == case
    )
    assert (found["match"], found["valid"]) == (True, True)
    return found


def test_its_times_are_those_of_the_results():
    """Each number that the README gives for the kernels is in what zf-profile wrote on an H200."""
    text, main = README.read_text(), "llama-3.1-8b-b32-8k"
    file = "page-kernels-h200.json"
    for kernel, variant in (
        ("append", "prefill"),
        ("append", "unaligned"),
        ("encode", "to-new-place"),
        ("encode", "in-place"),
        ("decode_pages", "sealed"),
        ("decode_pages", "raw"),
    ):
        entry = results(file, kernel, variant, main)
        row = (
            f"| {entry['time_us']['median']:.1f} | {entry['gbps']:.0f} | "
            f"{entry['pct_measured_peak']:.1f} | {entry['host_us']:.1f} |"
        )
        assert row in text, (kernel, variant, row)
    step = results(file, "append", "step-64", main)
    assert f"| {step['graph_us']:.1f} in a graph | | | {step['host_us']:.1f} |" in text
    copy = json.loads((RESULTS / file).read_text())["ceiling"]["by_case"][main]["copy_gbps"]
    small = results(file, "encode", "to-new-place", "llama-70b-tp8-b32-8k")
    ragged = results(file, "append", "unaligned", "llama-3.1-8b-b32-2k")
    wide = results(file, "append", "step-64", "gemma-2-9b-b32-8k")
    random = results("page-kernels-h200-uniform.json", "encode", "to-new-place", main)
    for said in (
        f"({copy:.0f} GB/s read + written)",
        f"134 MB: {small['pct_measured_peak']:.1f} %",
        f"anywhere in a page: {ragged['pct_measured_peak']:.1f} %",
        f"head_dim 256 ({wide['graph_us']:.1f} us)",
        f"searches in vain ({random['time_us']['median']:.0f} us)",
    ):
        assert said in text, said


def test_the_results_meet_what_was_aimed_at():
    """On an H200: rates over a copy's, a step's append in a graph, host time of a direct call."""
    main = "llama-3.1-8b-b32-8k"
    for kernel, variant, percent in (
        ("encode", "to-new-place", 80),
        ("encode", "in-place", 80),
        ("decode_pages", "sealed", 80),
        ("append", "prefill", 60),
    ):
        entry = results("page-kernels-h200.json", kernel, variant, main)
        assert entry["pct_measured_peak"] >= percent
        assert entry["host_us"] <= 15
    assert results("page-kernels-h200.json", "append", "step-64", main)["graph_us"] <= 5
