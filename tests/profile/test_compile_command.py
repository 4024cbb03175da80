"""``zf-profile compile``: what kernels take, without a GPU, and the cache it fills and clears."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import toy_kernels
from profile_tool import ESCAPE, ROOT, child, command, environment, interruptible, terminal

from zf_cute import compile as compiler
from zf_cute.compile_key import CompileKey
from zf_cute.kernels import catalog
from zf_profile import compile as compile_command

NUMBERS = ("registers", "spill_bytes", "smem_bytes", "code_bytes", "seconds")
CLEAR = ["zf_clear_i32", "zf_clear_i64"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Folder of an empty cache, for this process and the children of a test."""
    folder = tmp_path / "kernel cache"
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler, "_table", {})
    return folder


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(catalog, "KERNELS", dict(toy_kernels.KERNELS))


# ---- what it says --------------------------------------------------------------------------------
def test_the_document(tool, cache):
    ran = tool("compile", "--kernel", "clear", "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert (document["schema"], document["command"]) == ("zf-profile/1", "compile")
    assert document["arch"] == "sm_90a"
    assert document["env"]["dsl"]
    assert [kernel["name"] for kernel in document["kernels"]] == CLEAR
    for kernel in document["kernels"]:
        assert list(kernel) == ["name", *NUMBERS]
        assert 0 < kernel["registers"] <= 255
        assert kernel["spill_bytes"] == 0
        assert kernel["code_bytes"] > 0
        assert 0 < kernel["seconds"] < 60
    assert document["cache"] == {"path": str(cache), "entries": 0, "bytes": 0}
    assert not cache.exists()  # it is --warm that fills it


def test_the_table_in_processes_and_in_pipes():
    ran = child("compile", "--kernel", "clear", "--jobs", "2")
    assert (ran.code, ran.err) == (0, "")
    assert ESCAPE not in ran.out
    header = "kernel registers spilled smem code seconds"
    assert header in [" ".join(line.split()) for line in ran.out.splitlines()]
    for name in CLEAR:
        assert re.search(rf"^{name} +\d+ +0 +0 +[\d,]+ +\d\.\d\d *$", ran.out, re.M)
    assert re.search(r"^2 kernels in \d+\.\d s: none spills$", ran.out, re.M)


def test_every_number_is_the_same_in_another_process(tool):
    """Kernels compile to the same bytes wherever they do."""
    document = json.loads(child("compile", "--kernel", "clear", "--jobs", "2", "--json", "-").out)
    keys = catalog.kernel_class("clear").variants()
    for kernel, key in zip(document["kernels"], keys, strict=True):
        report = compiler.inspect_kernel(key)
        for name in NUMBERS[:-1]:
            assert kernel[name] == getattr(report, name)


def test_progress_on_a_terminal():
    ran = terminal("compile", "--kernel", "clear", "--json", "-", pipe_stdout=True)
    assert ran.code == 0
    assert "kernels" in ran.err
    assert ESCAPE in ran.err
    assert json.loads(ran.out)["command"] == "compile"


def test_narrow_terminals(tool, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    ran = tool("compile", "--kernel", "clear")
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 40
    assert "zf_clear_i64: registers" in ran.out


@pytest.mark.usefixtures("toys")
def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_done(tool):
    ran = tool("compile", "--kernel", "broken,toy", "--json", "-")
    assert ran.code == 5
    toy, toy_64, broken, _ = json.loads(ran.out)["kernels"]
    assert toy["name"] == "zf_toy_i64"
    assert "reason" not in toy
    assert toy_64["smem_bytes"] == 4 * toy_kernels.SMEM_WORDS
    assert [broken[name] for name in NUMBERS] == [None] * 5
    assert "name 'no_such_thing' is not defined" in broken["reason"]
    assert "zf_broken_i64 does not compile for sm_90a; 'zf-profile doctor'" in ran.err
    assert "name 'no_such_thing' is not defined" in ran.err
    assert "Traceback" not in ran.err
    assert ESCAPE not in ran.err


@pytest.mark.usefixtures("toys")
def test_a_kernel_that_does_not_compile_in_the_table(tool):
    ran = tool("compile", "--kernel", "broken,toy")
    assert ran.code == 5
    assert re.search(r"^zf_broken_i64 +failed *$", ran.out, re.M)
    assert ": none spills, 2 do not compile\n" in ran.out


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("name", ["spill", "local"])
def test_a_kernel_that_spills_is_the_answer_no(tool, name):
    """Registers spilled, and an array in local memory."""
    ran = tool("compile", "--kernel", f"{name},toy", "--json", "-")
    assert ran.code == 1
    spills = {kernel["name"]: kernel["spill_bytes"] for kernel in json.loads(ran.out)["kernels"]}
    assert spills.pop(f"zf_{name}_i64") > 0
    assert spills.pop("zf_toy_i64") == 0


@pytest.mark.usefixtures("toys")
def test_what_the_compiler_prints_is_no_part_of_the_document(tool, monkeypatch):
    inspect = compiler.inspect_kernel
    monkeypatch.setattr(
        compiler, "inspect_kernel", lambda key, **_: print("chatter") or inspect(key)
    )
    ran = tool("compile", "--kernel", "toy", "--json", "-")
    assert json.loads(ran.out)["command"] == "compile"
    assert ran.err == "chatter\nchatter\n"


# ---- options -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--arch sm_100a", "--arch sm_100a: kernels are compiled for sm_90a (H100, H200)"),
        ("--arch sm_90", "(H100, H200); did you mean 'sm_90a'?"),
        ("--kernel apend", "--kernel apend: there is no such kernel; did you mean 'append'?"),
        ("--kernel clear,", "--kernel '': there is no such kernel (choose from append, encode"),
        ("--kernel clear,encod", "did you mean 'encode'?"),
        ("--jobs 0", "--jobs 0: choose 1 or more"),
        ("--jobs few", "invalid int value: 'few'"),
        ("--keep missing/out", "missing does not exist"),
        ("--keep /dev/null", "--keep /dev/null: cannot be written: File exists"),
        ("--clear-cache --warm", "--clear-cache: does nothing else; run it without --warm"),
        ("--clear-cache --kernel clear", "run it without --kernel"),
        ("--clear-cahe", "did you mean '--clear-cache'?"),
    ],
)
def test_usage(tool, monkeypatch, words, message):
    def work(*_):
        raise AssertionError("the compiler was asked before the arguments were checked")

    monkeypatch.setattr(compiler, "check_compiler", work)
    ran = tool("compile", *words.split())
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("zf-profile compile: error: ")
    assert message in ran.err.splitlines()[0]


def test_kernels_come_in_the_catalogs_order_and_once(tool):
    assert compile_command._kernels(" clear , append,clear") == ["append", "clear"]
    assert compile_command._kernels(None) == list(catalog.KERNELS)


@pytest.mark.parametrize(
    ("cores", "kernels", "jobs"), [(2, 40, 2), (64, 40, 8), (64, 8, 2), (2, 2, 1), (1, 40, 1)]
)
def test_default_jobs(monkeypatch, cores, kernels, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert compile_command._default_jobs(kernels) == jobs


def test_keep(tool, tmp_path):
    ran = tool("compile", "--kernel", "clear", "--keep", tmp_path / "out")
    assert ran.code == 0
    names = {f"{name}.{suffix}" for name in CLEAR for suffix in ("ptx", "cubin")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    report = compiler.inspect_kernel(CompileKey("clear"))
    assert (tmp_path / "out" / "zf_clear_i64.ptx").read_text() == report.ptx
    assert (tmp_path / "out" / "zf_clear_i64.cubin").read_bytes() == report.cubin


def test_nothing_else_is_written(tool, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert tool("compile", "--kernel", "clear").code == 0
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]


def test_warm_and_clear(tool, cache, monkeypatch):
    ran = tool("compile", "--kernel", "clear", "--warm")
    assert ran.code == 0
    binaries = list(cache.rglob("zf_clear_*.o"))
    assert len(binaries) == 2
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert f"on disk: 2 compiled kernels, {size:,} bytes: {cache}\n" in ran.out
    monkeypatch.setattr(compiler, "_compile", None)
    assert callable(compiler.compiled(CompileKey("clear")))  # loaded, not compiled

    shown = json.loads(tool("doctor", "--json", "-").out)["compile_cache"]
    assert shown == {"path": str(cache), "entries": 2, "bytes": size}

    ran = tool("compile", "--clear-cache", "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert document["cache"] == {
        **{"path": str(cache), "entries": 0, "bytes": 0},
        "removed": {"entries": 2, "bytes": size},
    }
    assert document["kernels"] == []
    assert list(cache.rglob("*.o")) == []

    ran = tool("compile", "--clear-cache")
    assert (ran.code, ran.out) == (0, f"nothing to remove: {cache}\n")


def test_clearing_says_what_was_removed(tool, cache):
    assert tool("compile", "--kernel", "clear", "--warm").code == 0
    ran = tool("compile", "--clear-cache")
    assert re.fullmatch(
        rf"removed 2 compiled kernels, [\d,]+ bytes: {re.escape(str(cache))}\n", ran.out
    )


def test_clearing_where_there_is_none(tool, monkeypatch):
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", "off")
    ran = tool("compile", "--clear-cache")
    assert (ran.code, ran.out) == (0, "nothing to remove: the cache is off\n")


# ---- what may go wrong ---------------------------------------------------------------------------
def test_without_a_compiler(tmp_path):
    program = "import sys\nsys.modules['cutlass'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    ran = child("compile", PYTHONPATH=path)
    assert (ran.code, ran.out) == (2, "")
    assert "import cutlass fails" in ran.err
    assert "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'" in ran.err
    assert len(ran.err.splitlines()) == 1
    ran = child("compile", "--clear-cache", PYTHONPATH=path)
    assert (ran.code, ran.err) == (0, "")


def die(key, warm):
    """Stand in for a compiler that brings its process down."""
    os._exit(3)


def test_a_process_that_dies(monkeypatch):
    monkeypatch.setattr(compile_command, "_report", die)
    keys = catalog.kernel_class("clear").variants()
    found = dict(compile_command.reports(keys, 2))
    assert list(found) == list(keys)
    assert {"the process that compiled it, or one beside it, died"} == set(found.values())


def children(process):
    """Process ids of the children of a process."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == process.pid:
                pids.add(path.parent.name)
    return pids


@pytest.mark.parametrize("moment", ["import", "start", "work"])
def test_interrupt(tmp_path, moment):
    """Ctrl-C on a terminal reaches all processes; one of them speaks, and none stays."""
    keep = tmp_path / "out"
    process = subprocess.Popen(
        command(["compile", "--jobs", "2", "--keep", keep, "--json", tmp_path / "document.json"]),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
        start_new_session=True,
        cwd=ROOT,
    )
    if moment == "import":
        time.sleep(0.4)
    else:
        deadline = time.monotonic() + 60
        while not list(keep.glob("*")) if moment == "work" else len(children(process)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.02)  # start: two workers, and what multiprocessing starts beside them
    begin = time.monotonic()
    assert process.poll() is None, "it was over before it could be interrupted"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)  # until the last process closes its streams
    assert (process.returncode, out, err) == (130, "", "zf-profile: interrupted\n")
    assert time.monotonic() - begin < 6  # all kernels take 8 s on two free cores
    assert {path.suffix for path in keep.iterdir()} <= {".ptx", ".cubin"}
    assert not (tmp_path / "document.json").exists()


def test_warm_where_nothing_is_kept_is_the_answer_no(tool, monkeypatch):
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", "off")
    ran = tool("compile", "--kernel", "clear", "--warm")
    assert ran.code == 1
    assert "not all kernels are on disk; ZF_CUTE_CACHE_DIR" in ran.err


def test_what_cannot_be_removed_is_said(tool, cache, monkeypatch):
    assert tool("compile", "--kernel", "clear", "--warm").code == 0

    def refuse(path, *args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(type(cache), "unlink", refuse)
    ran = tool("compile", "--clear-cache")
    assert ran.code == 1
    assert "removed 0 compiled kernels; 2 cannot be removed" in ran.out


def test_no_room_for_temporary_files(tool, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", full)
    ran = tool("compile", "--kernel", "clear", "--jobs", "1")
    assert ran.code == 5
    assert "no temporary files can be written in" in ran.err
    assert "No space left on device; TMPDIR names another place" in ran.err
