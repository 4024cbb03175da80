"""What every command of ``zf-profile`` shares: streams, exit codes, and no traceback, ever."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from profile_tool import ESCAPE, SAMPLE, child, command, environment, interruptible, terminal
from safetensors.torch import save_file

from zf_profile import output
from zf_profile.cli import COMMANDS

LEFT = "Exception ignored"  # what Python says where a stream broke at exit


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """Folder for PYTHONPATH that makes importing torch and cutlass raise, in children too."""
    folder = tmp_path_factory.mktemp("broken")
    program = "import sys\nsys.modules['torch'] = sys.modules['cutlass'] = None\n"
    (folder / "sitecustomize.py").write_text(program)
    return folder


def bare(folder, *words):
    """Run the tool where nothing can import torch or cutlass."""
    path = f"{folder}{os.pathsep}{environment()['PYTHONPATH']}"
    return child(*words, PYTHONPATH=path)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.safetensors"
    save_file(
        {"k": torch.randn(40, 2, 64).bfloat16(), "v": torch.randn(40, 2, 64).bfloat16()}, path
    )
    return path


# ---- what needs no torch -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        *(f"{name} --help" for name in COMMANDS),
        *(f"layout {what}" for what in ("k", "v", "block", "page")),
        "layout k --json -",
    ],
)
def test_help_and_layout_work_where_torch_and_cutlass_do_not_import(without_torch, words):
    ran = bare(without_torch, *words.split())
    assert (ran.code, ran.err) == (0, "")
    assert ran.out


@pytest.mark.parametrize("words", [["demo"], ["ratio", SAMPLE]])
def test_commands_that_need_torch_say_so(without_torch, words):
    ran = bare(without_torch, *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        f"zf-profile {words[0]}: error: the package 'torch' is missing; "
        "'zf-profile doctor' says how to get it\n"
    )


def test_doctor_names_a_broken_torch_and_how_to_get_it(without_torch):
    ran = bare(without_torch, "doctor", "--json", "-")
    assert (ran.code, ran.err) == (1, "")
    checks = {check["name"]: check for check in json.loads(ran.out)["checks"]}
    for name, module in (("torch", "torch"), ("nvidia-cutlass-dsl", "cutlass")):
        assert not checks[name]["ok"]
        assert f"import {module} fails (ModuleNotFoundError" in checks[name]["remedy"]
        assert "pip install" in checks[name]["remedy"]
    assert (checks["rich"]["ok"], checks["gpu"]["ok"]) == (True, False)


def test_importing_the_command_line_imports_nothing_heavy():
    program = (
        "import sys, zf_profile.cli as cli; cli.parser(); "
        "print({'torch', 'cutlass', 'numpy', 'rich', 'safetensors'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr


def test_help_is_quick():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(
            command(["--help"]), env=environment(), stdout=subprocess.DEVNULL, check=True
        )
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


# ---- usage ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dmo", "invalid choice 'dmo'; did you mean 'demo'?"),
        ("ratoi x.pt", "invalid choice 'ratoi'; did you mean 'ratio'?"),
        ("frobnicate", f"invalid choice 'frobnicate' (choose from {', '.join(COMMANDS)})"),
        ("--jsn", "unrecognized arguments: --jsn"),
        ("demo --jsn -", "unrecognized arguments: --jsn -; did you mean '--json'?"),
        ("ratio x.pt --page-sise=16", "did you mean '--page-size'?"),
        ("ratio x.pt --layout thdd", "invalid choice 'thdd'; did you mean 'thd'?"),
        ("ratio x.pt --layout bhtdd", "invalid choice 'bhtdd'; did you mean 'bhtd'?"),
        ("ratio x.pt --rope interleavd", "did you mean 'interleaved'?"),
        ("ratio x.pt --page-size 17", "invalid choice 17 (choose from 16, 32, 64)"),
        ("ratio x.pt --page-size many", "invalid int value: 'many'"),
        ("ratio x.pt --max-exceptions 5", "invalid choice 5"),
        ("ratio", "the following arguments are required: FILE"),
        ("demo --device gpu", "invalid choice 'gpu'"),
        ("demo --json", "expected one argument"),
        ("demo --dev cpu", "unrecognized arguments: --dev cpu; did you mean '--device'?"),
        ("demo \x1b[31mred", "unrecognized arguments: \\x1b[31mred"),
    ],
)
def test_usage_errors_name_the_nearest_word(tool, words, message):
    ran = tool(*words.split(" "))
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert message in first
    assert re.fullmatch(r"try 'zf-profile( \w+)? --help'", second)


def test_no_command_prints_the_help_and_is_a_usage_error(tool):
    ran = tool()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("usage: zf-profile")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples(tool, name):
    ran = tool(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert "examples:\n  zf-profile " + name in ran.out
    assert "--no-color" in ran.out
    assert "--json" in ran.out


# ---- Ctrl-C, pipes, full disks -------------------------------------------------------------------
NOTES = (
    "note: k and 1 more: [16008, 8, 128] as thd: 16008 tokens, 8 KV heads, head_dim 128\n"
    "note: 2 sequences end in a partly filled page of 16 tokens, which stays raw: 64 of the raw "
    "blocks\n"
)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("demo", 0.4), ("ratio", 0.4), ("ratio", None)],
)
def test_interrupt(tmp_path, name, seconds):
    """Ctrl-C while torch is imported, whose code may swallow it or abort, and (None) at work."""
    big = tmp_path / "big.safetensors"
    save_file({part: torch.ones(16008, 8, 128, dtype=torch.bfloat16) for part in "kv"}, big)
    words = ["demo"] if name == "demo" else ["ratio", big]
    process = subprocess.Popen(
        command([*words, "--json", tmp_path / "document.json"]),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    if seconds is None:
        assert process.stderr.readline() + process.stderr.readline() == NOTES
    else:
        time.sleep(seconds)
    assert process.poll() is None, "it was over before it could be interrupted"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.removeprefix(NOTES) == "zf-profile: interrupted\n"
    assert list(tmp_path.iterdir()) == [big]


def test_interrupt_of_an_import_that_swallows_it(tmp_path):
    """As some of torch's do: the process leaves all the same, and before it the usual is back."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "except BaseException:\n"
        "    pass\n"
    )
    program = (
        "import signal, sys\n"
        "from zf_profile import console\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "console.import_interruptibly('json')\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "console.import_interruptibly('swallows')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=interruptible,
    )
    assert (done.returncode, done.stderr) == (130, "zf-profile: interrupted\n")


@pytest.mark.parametrize(
    "words", [["--help"], ["layout", "k"], ["layout", "v", "--json", "-"], ["ratio", None]]
)
def test_a_reader_that_leaves_is_no_error(small, words):
    """``| true`` and ``| head -1``; the exit code is not 1, which would mean a mismatch."""
    for reader in ("true", "head -1") if words[0] == "layout" else ("true",):
        line = f'"$@" | {reader} >/dev/null; exit "${{PIPESTATUS[0]}}"'
        done = subprocess.run(
            ["bash", "-c", line, "bash", *command(word or small for word in words)],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert LEFT not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["layout", "k"], ["layout", "k", "--json", "-"]])
def test_a_full_disk_is_one_message(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(words), env=environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "zf-profile: error: No space left on device\n"


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_closed_stream_is_no_error(small, stream):
    line = f'exec "$@" {stream}>&-'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command(["ratio", small])],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


# ---- terminals and colours -----------------------------------------------------------------------
def test_progress_and_colours_on_a_terminal(small):
    ran = terminal("ratio", small)
    assert ran.code == 0
    assert ESCAPE in ran.err
    assert "pages" in ran.err


def test_progress_is_on_stderr_alone(small):
    ran = terminal("ratio", small, pipe_stdout=True)
    assert ran.code == 0
    assert "pages" in ran.err
    assert ESCAPE in ran.err
    assert ESCAPE not in ran.out
    assert "ratio to BF16" in ran.out
    assert "ratio to BF16" not in ran.err


def test_json_in_a_pipe_and_progress_on_the_terminal(small):
    ran = terminal("ratio", small, "--json", "-", pipe_stdout=True)
    assert json.loads(ran.out)["command"] == "ratio"
    assert "pages" in ran.err


def test_pipes_are_clean(small):
    ran = child("ratio", small)
    assert ran.code == 0
    assert ESCAPE not in ran.out + ran.err
    assert ran.err == (
        "note: k and 1 more: [40, 2, 64] as thd: 40 tokens, 2 KV heads, head_dim 64\n"
        "note: 2 sequences end in a partly filled page of 16 tokens, which stays raw: 8 of the raw "
        "blocks\n"
    )


@pytest.mark.parametrize("words", [["layout", "k", "--lane", "5"], ["ratio", None]])
@pytest.mark.parametrize("how", ["NO_COLOR", "--no-color"])
def test_plain_text_on_a_terminal(small, words, how):
    """Not one escape code: neither colours, nor bold titles, nor a bar that moves the cursor."""
    words = [word or small for word in words]
    option, extra = (["--no-color"], {}) if how == "--no-color" else ([], {"NO_COLOR": "1"})
    ran = terminal(*words, *option, **extra)
    assert ran.code == 0
    assert ran.err
    assert ESCAPE not in ran.err


@pytest.mark.parametrize("columns", [40, 80])
def test_narrow_terminals(small, columns):
    ran = terminal("ratio", small, columns=columns, NO_COLOR="1")
    assert ran.code == 0
    assert "Traceback" not in ran.err
    assert max(map(len, ran.err.splitlines())) <= columns


@pytest.mark.parametrize("columns", ["0", "", "wide", "1", "20", "9999"])
def test_widths_that_are_none(small, tool, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    ran = tool("ratio", small)
    assert ran.code == 0
    assert "ratiotoBF16" in "".join(ran.out.split())


def test_a_terminal_that_is_not_utf8(small):
    ran = child("ratio", small, PYTHONIOENCODING="ascii")
    assert (ran.code, ran.out.isascii()) == (0, True)
    assert "ratio to BF16" in ran.out


# ---- --json --------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [["layout", "block"], ["ratio", SAMPLE]])
def test_json_to_stdout_is_one_document(words):
    ran = child(*words, "--json", "-")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert (document["schema"], document["command"]) == ("zf-profile/1", words[0])


def test_json_file_and_tables(small, tmp_path, tool):
    target = tmp_path / "out" / "document.json"
    target.parent.mkdir()
    target.write_text("old")
    ran = tool("ratio", small, "--json", target)
    assert ran.code == 0
    assert "ratio to BF16" in ran.out
    assert json.loads(target.read_text())["file"] == str(small)
    assert list(target.parent.iterdir()) == [target]


def refuses(ran, message):
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("zf-profile ratio: error: --json ")
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.fixture
def no_work(monkeypatch):
    """Fail where a command starts to work."""

    def work(*_):
        raise AssertionError("the file was read before the target was checked")

    monkeypatch.setattr("zf_profile.ratio.open_kv", work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        (".", "is a folder; name a file in it"),
        ("", "is a folder; name a file in it"),
        ("missing/document.json", "does not exist"),
        ("small.safetensors/document.json", "does not exist"),
        ("x" * 300, "File name too long"),
        ("small.safetensors", "is the FILE to be read; name another"),
        ("link.safetensors", "is the FILE to be read; name another"),
    ],
)
def test_json_target_is_checked_before_any_work(small, tool, monkeypatch, target, message):
    monkeypatch.chdir(small.parent)
    os.symlink(small.name, "link.safetensors")
    before = small.read_bytes()
    refuses(tool("ratio", small, "--json", target), message)
    assert small.read_bytes() == before


@pytest.mark.usefixtures("no_work")
def test_a_folder_that_cannot_be_written(small, tool, monkeypatch):
    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    refuses(tool("ratio", small, "--json", small.parent / "x.json"), "Permission denied")


@pytest.mark.usefixtures("no_work")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_folder_without_permission(small, tool, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    refuses(tool("ratio", small, "--json", folder / "x.json"), "Permission denied")


def test_json_file_is_whole_or_not_there(small, tool, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    ran = tool("ratio", small, "--json", folder / "x.json")
    assert ran.code == 2
    assert ran.err.endswith("x.json: No space left on device\n")
    assert list(folder.iterdir()) == []


def test_json_into_a_pipe_or_a_device_is_written_to_it(small, tool, tmp_path):
    """A device is never replaced by a file: as root that would take ``/dev/null`` away."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE, text=True)
    try:
        assert tool("ratio", small, "--json", fifo).code == 0
        assert fifo.is_fifo()
        assert json.loads(reader.communicate(timeout=30)[0])["command"] == "ratio"
    finally:
        reader.kill()
        reader.communicate()


def test_json_through_a_link_keeps_the_link(small, tool, tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("real/document.json")
    assert tool("ratio", small, "--json", link).code == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "real" / "document.json").read_text())["command"] == "ratio"


def test_a_long_name_that_is_allowed(small, tool, tmp_path):
    target = tmp_path / ("x" * 250 + ".json")
    assert tool("ratio", small, "--json", target).code == 0
    assert json.loads(target.read_text())["command"] == "ratio"


def test_json_has_no_nan():
    document = {"a": [1.5, float("nan"), (float("inf"),)], "b": {"c": float("-inf"), "d": 7}}
    assert output._finite(document) == {"a": [1.5, None, [None]], "b": {"c": None, "d": 7}}
