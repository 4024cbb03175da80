"""Several processes at once: one compile a key, no torn file, nobody waits for the dead."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zf_cute import compile as compiler
from zf_cute import compile_cache
from zf_cute.compile import compiled
from zf_cute.compile_key import CompileKey

ROOT = Path(__file__).parents[2]
TOY = CompileKey("toy")

PROGRAM = f"""
import os, sys, time
sys.modules["torch"] = None  # TVM-FFI imports it where it is, which takes long
sys.path[:0] = {[str(ROOT / name) for name in ("", "layouts", "tests")]}
import tvm_ffi, toy_kernels
from pathlib import Path
from zf_cute import compile as compiler, compile_cache
from zf_cute.compile_key import CompileKey
from zf_cute.kernels import catalog

catalog.KERNELS.update(toy_kernels.KERNELS)
folder, action = Path(sys.argv[1]), sys.argv[2]
really_compile = compiler._compile

def noted(key, options):
    with open(folder / "compiles", "a") as log:
        log.write(f"{{key.name}}\\n")
    made = really_compile(key, options)
    time.sleep(0.3)  # long enough for the others to come
    return made

compiler._compile = noted
(folder / f"ready-{{os.getpid()}}").touch()
while len(list(folder.glob("ready-*"))) < int(sys.argv[3]):
    time.sleep(0.01)
if action == "hold":
    toolchain = compiler._toolchain()
    entry = compile_cache.Entry.of(CompileKey("toy"), compile_cache.fingerprint(toolchain))
    with entry.locked():
        (folder / "held").touch()
        time.sleep(600)
for head_dim in (0, 64):
    assert callable(compiler.compiled(CompileKey("toy", head_dim=head_dim)))
"""


def start(folder, action, processes):
    command = [sys.executable, "-c", PROGRAM, str(folder), action, str(processes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_four_processes_compile_each_key_once(cache, tmp_path):
    """flash-attention PR #2647: all ranks of a job compiled at once, and nothing was kept."""
    folder = tmp_path / "log"
    folder.mkdir()
    for process in [start(folder, "compile", 4) for _ in range(4)]:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (0, "", "")
    names = (folder / "compiles").read_text().splitlines()
    assert sorted(names) == ["zf_toy_d64_i64", "zf_toy_i64"]
    suffixes = sorted(path.suffix for path in cache.rglob("*") if path.is_file())
    assert suffixes == [".json", ".json", ".o", ".o"]


def test_a_holder_that_is_killed_does_not_block(compiles, cache, tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    holder = start(folder, "hold", 1)
    try:
        while not (folder / "held").exists():
            assert holder.poll() is None, holder.communicate()
            time.sleep(0.01)
        (lock,) = cache.rglob("*.lock")
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        assert lock.exists()
        begin = time.perf_counter()
        assert callable(compiled(TOY))
        assert time.perf_counter() - begin < 10
        assert len(compiles) == 1
        assert not lock.exists()
    finally:
        holder.kill()
        holder.communicate()


@pytest.fixture
def held(cache):
    """Lock of the toy's entry, held by somebody who never lets go."""
    toolchain = compiler._toolchain()
    entry = compile_cache.Entry.of(TOY, compile_cache.fingerprint(toolchain))
    entry.folder.mkdir(parents=True)
    handle = os.open(entry.folder / f"{entry.stem}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield entry
    os.close(handle)


def test_patience_ends(compiles, held, monkeypatch):
    monkeypatch.setattr(compile_cache, "PATIENCE_S", 0.2)
    begin = time.perf_counter()
    assert callable(compiled(TOY))
    assert 0.2 < time.perf_counter() - begin < 10
    assert len(compiles) == 1
    assert held.find() is not None


def test_a_hit_needs_no_lock(compiles, held, restart, monkeypatch):
    monkeypatch.setattr(compile_cache, "PATIENCE_S", 0.0)
    compiled(TOY)
    restart()
    monkeypatch.setattr(compile_cache, "PATIENCE_S", 600.0)
    assert callable(compiled(TOY))
    assert len(compiles) == 1


def test_a_lock_file_that_nobody_holds(compiles, cache):
    toolchain = compiler._toolchain()
    entry = compile_cache.Entry.of(TOY, compile_cache.fingerprint(toolchain))
    entry.folder.mkdir(parents=True)
    (entry.folder / f"{entry.stem}.lock").touch()
    assert callable(compiled(TOY))
    assert len(compiles) == 1


def test_a_place_without_locks(compiles, cache, monkeypatch):
    """As some network file systems: then each compiles for itself, and files are whole still."""

    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert callable(compiled(TOY))
    assert len(compiles) == 1
    assert compile_cache.cache_info().entries == 1
