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
