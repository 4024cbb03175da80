"""``zf-profile bench``: the whole command on the CPU, the reference backend for the kernels."""

import json
import os
import re
import shlex
from functools import partial

import bench_stand_in
import pytest
import torch
from bench_stand_in import FEW, ReferenceLaunch, StandIn, entries
from profile_tool import ESCAPE, child, environment, terminal

from zf_profile import bench, bench_cases
from zf_profile import environment as environment_module
from zf_profile.bench_cases import CASES, KERNELS
from zf_profile.cli import parser

TIMED = {(kernel, variant) for kernel, variants in KERNELS.items() for variant in variants}


@pytest.fixture
def install(monkeypatch):
    """Put a stand-in where the kernels would be; its parts may be given."""
    return partial(bench_stand_in.install, monkeypatch.setattr)


@pytest.fixture
def measure(tool, install):
    """Run ``bench`` on a stand-in and return its exit code and document."""
    return partial(bench_stand_in.measured, tool, install)


@pytest.fixture(scope="module")
def document():
    """Document of every kernel on the three small cases, run once."""
    import contextlib
    import io

    from zf_profile.cli import main

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        bench_stand_in.install(patch.setattr)
        words = ["bench", "--case", "tiny,tiny-128,tiny-256", *FEW, "--json", "-"]
        assert main(words) == 0
    return json.loads(out.getvalue())


# ---- what there is -------------------------------------------------------------------------------
def test_list_needs_no_torch(tmp_path):
    program = "import sys\nsys.modules['torch'] = sys.modules['cutlass'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    ran = child("bench", "--list", PYTHONPATH=path)
    assert (ran.code, ran.err) == (0, "")
    for name in (*CASES, *KERNELS, *(variant for _, variant in TIMED)):
        assert name in ran.out


def test_list_as_json(tool):
    document = json.loads(tool("bench", "--list", "--json", "-").out)
    assert document["kernels"] == KERNELS
    assert [case["name"] for case in document["known_cases"]] == list(CASES)
    assert [case["name"] for case in document["known_cases"] if case["default"]] == (
        bench_cases.default_cases()
    )


def test_cases_are_of_whole_pages_and_known_shapes():
    shapes = set()
    for name, case in CASES.items():
        assert case.name == name
        assert case.kv_len % case.shape.page_size == 0
        assert case.num_pages * case.shape.page_size == case.tokens
        assert case.num_pages >= 256  # a step of 256 rows writes to as many pages
        shape = case.shape
        shapes.add((shape.num_kv_heads, shape.head_dim, shape.page_size))
    first = CASES[bench_cases.default_cases()[0]]
    assert (first.batch, first.kv_len, first.kv_bytes) == (32, 8192, 32 * 8192 * 8 * 128 * 2 * 2)
    assert {(8, 128, 16), (1, 128, 64), (8, 128, 32), (8, 128, 64)} <= shapes
    assert {head_dim for _, head_dim, _ in shapes} == {64, 128, 256}


# ---- usage ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kernel encod", "no kernel 'encod'; did you mean 'encode'?"),
        ("--kernel append,", "no kernel ''"),
        ("--case llama-3.1-8b", "no case 'llama-3.1-8b'; did you mean 'llama-3.1-8b-b"),
        ("--samples 0", "'0' must be a number of at least 1"),
        ("--samples many", "'many' must be a number of at least 1"),
        ("--kv reel", "invalid choice 'reel'; did you mean 'real'?"),
        ("--seed x", "'x' is no number from 0 to 2**63 - 1"),
        ("--seed 99999999999999999999", "is no number from 0 to 2**63 - 1"),
        ("--kernl append", "did you mean '--kernel'?"),
    ],
)
def test_usage_errors(tool, words, message):
    ran = tool("bench", *words.split(" "))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err.splitlines()[0]


def test_host_time_of_copies_is_no_question(tool):
    ran = tool("bench", "--kernel", "copy", "--host")
    assert (ran.code, ran.out) == (2, "")
    assert "--host: copies are torch's" in ran.err


def test_defaults():
    args = parser().parse_args(["bench"])
    assert args.kernel == list(KERNELS)
    assert args.case == bench_cases.default_cases()
    assert (args.samples, args.kv, args.seed, args.host) == (200, "real", 0, False)
    assert parser().parse_args(["bench", "--case", "all"]).case == list(CASES)


# ---- no GPU --------------------------------------------------------------------------------------
@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_no_gpu_is_one_line(no_gpu, tool, tmp_path):
    ran = tool("bench", "--json", tmp_path / "result.json")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("zf-profile bench: error: no CUDA device: torch finds none")
    assert len(ran.err.splitlines()) == 1
    document = json.loads((tmp_path / "result.json").read_text())
    assert (document["schema"], document["command"]) == ("zf-profile/1", "bench")
    assert (document["cases"], document["ceiling"]) == ([], None)
    assert document["reason"] in ran.err
    assert json.loads(tool("bench", "--json", "-").out) == document


def test_a_torch_without_cuda(monkeypatch, tool):
    monkeypatch.setattr(torch.version, "cuda", None)
    ran = tool("bench")
    assert (ran.code, len(ran.err.splitlines())) == (3, 1)
    assert "this torch is built without CUDA" in ran.err


def test_another_gpu(monkeypatch, tool):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment_module, "gpu", lambda: {"gpu": "A", "sm": "80", "cuda": "13"})
    monkeypatch.setattr(environment_module, "gpu_state", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    ran = tool("bench")
    assert (ran.code, len(ran.err.splitlines())) == (3, 1)
    assert "NVIDIA A100 is sm_80; kernels are for sm_90a" in ran.err


# ---- the document --------------------------------------------------------------------------------
def test_every_variant_of_every_case_is_right_and_timed(document):
    names = ["tiny", "tiny-128", "tiny-256"]
    assert [entry["case"]["name"] for entry in entries(document, "encode", "in-place")] == names
    assert len(document["cases"]) == len(names) * len(TIMED)
    for entry in document["cases"]:
        assert (entry["kernel"], entry["variant"]) in TIMED
        assert (entry["match"], entry["valid"], entry["failed"]) == (True, True, False)
        assert entry["reason"] is None
        took = entry["time_us"]
        assert took["n"] == len(took["samples"]) == 3
        assert min(took["samples"]) <= took["p10"] <= took["median"] <= took["p90"]
        assert all(round(x, 3) == x for x in took["samples"])
        total = entry["bytes"]["total"]
        assert total == sum(sum(entry["bytes"][key].values()) for key in ("read", "written"))
        assert entry["gbps"] == pytest.approx(total / took["median"] / 1e3, rel=1e-3, abs=1e-3)
    assert document["interrupted"] is False
    assert document["gpu_state"].keys() == {"before", "after"}


def test_what_is_not_measured_says_why(document):
    for entry in document["cases"]:
        for name in ("time_us", "gbps", "pct_measured_peak", "graph_us", "host_us", "bytes"):
            assert (entry[name] is None) == (f"{name}_reason" in entry), name
    for entry in entries(document, "copy"):
        assert entry["graph_us"] is entry["host_us"] is entry["operator_host_us"] is None
    for entry in entries(document, "append", "step-64"):
        assert entry["pct_measured_peak"] is None
        assert "latency" in entry["pct_measured_peak_reason"]
        assert entry["graph"]["launches"] == 3
    for kernel in ("append", "encode", "decode_pages"):
        for entry in entries(document, kernel):
            assert entry["graph_us"] == entry["graph"]["median"] > 0
            assert entry["host_us"] > 0
            assert entry["operator_host_us"] > 0


def test_percent_is_of_the_best_copy_of_the_same_case(document):
    for name, peak in document["ceiling"]["by_case"].items():
        of_case = [entry for entry in document["cases"] if entry["case"]["name"] == name]
        copies = [entry for entry in of_case if entry["kernel"] == "copy"]
        best = max(copies, key=lambda entry: entry["gbps"])
        assert best["variant"] == peak["way"]
        assert best["pct_measured_peak"] == pytest.approx(100, abs=0.05)
        for entry in of_case:
            assert entry["ceiling"] == peak
            if entry["pct_measured_peak"] is not None:
                want = 100 * entry["gbps"] / peak["copy_gbps"]
                assert entry["pct_measured_peak"] == pytest.approx(want, rel=0.02, abs=0.02)
    best = max(entry["gbps"] for entry in entries(document, "copy"))
    assert document["ceiling"]["copy_gbps"] == best
    assert document["ceiling"]["read_gbps"] is None
    assert document["ceiling"]["read_gbps_reason"]


def test_bytes_are_those_of_the_sealed_pages(document):
    for name in ("to-new-place", "in-place"):
        for encoded, sealed in zip(
            entries(document, "encode", name),
            entries(document, "decode_pages", "sealed"),
            strict=True,
        ):
            assert encoded["bytes"]["written"]["spans"] == sealed["bytes"]["read"]["spans"]
    for entry in document["cases"]:
        raw = entry["case"]["kv_bytes"]
        if entry["kernel"] == "decode_pages":
            assert entry["bytes"]["written"] == {"values": raw}
        if entry["kernel"] == "encode":
            assert entry["bytes"]["read"]["blocks"] == raw
            ratio = entry["bytes"]["written"]["spans"] / raw
            # Aligned to 128 bytes is more; here all pages are looked at.
            assert ratio <= entry["content"]["stored_ratio"] < ratio + 0.05


def test_repro_repeats_the_run(document):
    for entry in document["cases"]:
        words = shlex.split(entry["repro"])
        assert words[:2] == ["zf-profile", "bench"]
    with pytest.MonkeyPatch.context() as patch:
        bench_stand_in.install(patch.setattr)
        args = parser().parse_args(words[1:])
    assert args.kernel == [entry["kernel"]]
    assert args.case == [entry["case"]["name"]]
    assert (args.kv, args.seed, args.samples, args.host) == ("real", 0, 3, False)


def test_content_says_what_it_is(document):
    found = {entry["case"]["name"]: entry["content"] for entry in document["cases"]}
    assert "smollm2-135m" in found["tiny"]["source"]
    assert "two heads joined" in found["tiny-256"]["source"]
    for content in found.values():
        assert content["kv"] == "real"
        assert 0.74 < content["stored_ratio"] < 0.82
        assert sum(content["blocks"].values()) > 0


@pytest.mark.parametrize(("kv", "ratio"), [("gaussian", (0.75, 0.80)), ("uniform", (1.0, 1.02))])
def test_other_contents(measure, kv, ratio):
    code, document = measure("--kv", kv, "--kernel", "encode,decode_pages", "--seed", "7")
    assert code == 0
    for entry in document["cases"]:
        assert ratio[0] <= entry["content"]["stored_ratio"] <= ratio[1]
        assert f"--kv {kv} --samples 3 --seed 7" in entry["repro"]
    in_place = entries(document, "encode", "in-place")[0]["bytes"]["written"]["spans"]
    moved = entries(document, "encode", "to-new-place")[0]["bytes"]["written"]["spans"]
    # Spans that stay raw need not be written where they lie.
    assert in_place == (0 if kv == "uniform" else moved)


# ---- choices -------------------------------------------------------------------------------------
def test_only_what_was_asked_for_and_the_copies(measure):
    code, document = measure("--kernel", "encode")
    assert code == 0
    assert {entry["kernel"] for entry in document["cases"]} == {"encode", "copy"}
    code, document = measure("--kernel", "copy")
    assert {entry["kernel"] for entry in document["cases"]} == {"copy"}


def test_host_alone(measure):
    code, document = measure("--host")
    assert code == 0
    assert document["ceiling"] is None
    for entry in document["cases"]:
        assert entry["kernel"] != "copy"
        assert entry["match"] is True
        assert entry["host_us"] > 0
        assert entry["operator_host_us"] > 0
        assert entry["time_us"] is entry["graph_us"] is entry["pct_measured_peak"] is None
        assert "host" in entry["time_us_reason"]
        assert entry["repro"].endswith("--host")


def test_tables(tool, install):
    install()
    ran = tool("bench", "--case", "tiny,tiny-256", *FEW)
    assert (ran.code, ran.err) == (0, "")
    assert "cold L2 (512 MB read before each sample), medians of 3 samples" in ran.out
    for kernel, variant in TIMED:
        assert len(re.findall(rf"^{kernel} +{variant} ", ran.out, re.M)) == 2
    assert "tiny-256: us a launch" in ran.out
    assert "smollm2-135m" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 160


# ---- interrupts, terminals -----------------------------------------------------------------------
class Interrupted(ReferenceLaunch):
    """Ctrl-C at the first append of the second case."""

    def append(self, kv, state, k, v, slots):
        if k.shape[2] == 256:
            raise KeyboardInterrupt
        super().append(kv, state, k, v, slots)


def test_an_interrupt_keeps_the_cases_that_are_done(tool, install, tmp_path):
    install(backend=StandIn(Interrupted()))
    path = tmp_path / "result.json"
    ran = tool("bench", "--case", "tiny,tiny-256", *FEW, "--json", path)
    assert (ran.code, ran.err) == (130, "zf-profile: interrupted\n")
    assert "tiny: us a launch" in ran.out
    assert "tiny-256" not in ran.out
    document = json.loads(path.read_text())
    assert document["interrupted"] is True
    assert {entry["case"]["name"] for entry in document["cases"]} == {"tiny"}
    assert len(document["cases"]) == len(TIMED)


@pytest.fixture
def stand_in_path(tmp_path):
    """PYTHONPATH on which every child measures the stand-in."""
    program = (
        "import sys\n"
        "if 'zf_profile' in sys.argv[0] or '-m' in sys.orig_argv:\n"
        "    import bench_stand_in\n"
        "    bench_stand_in.install()\n"
    )
    (tmp_path / "sitecustomize.py").write_text(program)
    here = os.path.dirname(os.path.abspath(__file__))
    return os.pathsep.join((str(tmp_path), here, environment()["PYTHONPATH"]))


def test_progress_on_a_terminal_alone(stand_in_path):
    words = ("bench", "--case", "tiny", "--kernel", "append", *FEW)
    ran = terminal(*words, pipe_stdout=True, PYTHONPATH=stand_in_path)
    assert ran.code == 0
    assert "samples" in ran.err
    assert ESCAPE in ran.err
    assert ESCAPE not in ran.out
    assert "tiny: us a launch" in ran.out
    ran = child(*words, PYTHONPATH=stand_in_path)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_narrow_terminals(stand_in_path, columns):
    words = ("bench", "--case", "tiny", *FEW)
    ran = terminal(*words, columns=columns, NO_COLOR="1", PYTHONPATH=stand_in_path)
    assert ran.code == 0
    assert max(map(len, ran.err.splitlines())) <= columns


def test_throttled_clocks_are_noted(tool, install, monkeypatch):
    state = {"driver": "580.1", "ecc": "Enabled", "clocks": {"sm_mhz": 1980}, "throttle": []}
    states = iter([{**state, "throttle": ["gpu_idle"]}, {**state, "throttle": ["sw_power_cap"]}])
    install()
    blank = dict.fromkeys(state)
    monkeypatch.setattr(environment_module, "gpu_state", lambda: next(states, blank))
    monkeypatch.setattr(
        environment_module,
        "environment",
        lambda: {"gpu": "NVIDIA H200", "sm": "90", "torch": "2.11", "dsl": "4.8.1", **blank},
    )
    ran = tool("bench", "--case", "tiny", "--kernel", "copy", *FEW)
    assert ran.code == 0
    assert ran.err == "note: the GPU holds its clocks back: sw_power_cap\n"
    assert "NVIDIA H200 sm_90, driver 580.1, SM 1980 MHz" in ran.out


# ---- on a GPU ------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_the_kernels(tool, monkeypatch):
    """Everything on a small case, with the real kernels, events and graphs."""
    rig = bench.rig
    bench_stand_in.install(monkeypatch.setattr)
    monkeypatch.setattr(bench, "rig", rig)
    ran = tool("bench", "--case", "tiny,tiny-128,tiny-256", "--samples", "5", "--json", "-")
    document = json.loads(ran.out)
    for entry in document["cases"]:
        assert entry["match"], entry["reason"]
        if entry["kernel"] != "copy":
            assert entry["graph_us"], entry.get("graph_us_reason")
            assert entry["host_us"]
            assert entry["operator_host_us"]
    # Copies of a few kB are latency: rates above theirs are possible and mean nothing.
    assert ran.code in (0, 1)
