"""From a key to a kernel: one compile a key, quick to find again, errors that say what to do."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from zf_cute import compile as compiler
from zf_cute.compile import compiled, inspect_kernel
from zf_cute.compile_key import CompileKey
from zf_cute.errors import CompileError, UnsupportedError

ROOT = Path(__file__).parents[2]
TOY = CompileKey("toy")

pytestmark = pytest.mark.usefixtures("cache")


def test_two_equal_keys_are_one_compile(compiles):
    first = compiled(TOY)
    assert compiled(CompileKey("toy")) is first
    assert compiles == ["zf_toy_i64"]
    assert compiled(CompileKey("toy", head_dim=64)) is not first
    assert compiles == ["zf_toy_i64", "zf_toy_d64_i64"]


def test_threads_that_want_one_key_get_one_compile(compiles):
    found, start = [], threading.Barrier(4)

    def want():
        start.wait()
        found.append(compiled(TOY))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len({id(kernel) for kernel in found}) == len(compiles) == 1


def test_finding_a_kernel_again_takes_less_than_a_microsecond(toys):
    compiled(TOY)
    key, seconds = CompileKey("toy"), []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            compiled(key)
        seconds.append((time.perf_counter() - start) / 1000)
    assert min(seconds) < 1e-6


def test_it_takes_torch_tensors_and_checks_them(toys):
    """Without a GPU it comes as far as the check of its arguments."""
    words = torch.zeros(256, dtype=torch.uint32)
    with pytest.raises(ValueError, match="device_type=cuda"):
        compiled(TOY)(words, words, 1)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        compiled(TOY)(words)


def test_no_cache_on_disk(compiles, restart, monkeypatch, tmp_path, cache):
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", "off")
    for _ in range(2):
        restart()
        assert callable(compiled(TOY))
    assert len(compiles) == 2
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_we_are(toys, tmp_path, monkeypatch, cache):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    compiled(TOY)
    inspect_kernel(TOY)
    assert list(here.iterdir()) == []
    assert cache.is_dir()


def test_line_info_is_another_kernel(compiles, cache):
    traced = CompileKey("toy", line_info=True)
    assert compiled(traced) is not compiled(TOY)
    assert len(list(cache.rglob("*.o"))) == len(compiles) == 2
    # A file and a place in it, where Nsight Compute's source view looks.
    assert re.search(r'^\s*\.file\s.*toy_kernels\.py"', inspect_kernel(traced).ptx, re.M)
    assert ".loc" not in inspect_kernel(TOY).ptx  # nor is the option left on


def test_a_kernel_that_does_not_compile(compiles):
    for attempt in (compiled, inspect_kernel, compiled):  # the failure itself is not kept
        with pytest.raises(CompileError) as caught:
            attempt(CompileKey("broken"))
        message = str(caught.value)
        assert message.startswith("zf_broken_i64 does not compile for sm_90a; 'zf-profile doctor'")
        assert "name 'no_such_thing' is not defined" in message
        assert "toy_kernels.py" in message
        assert "\x1b" not in message
        assert caught.value.__cause__ is not None
    assert len(compiles) == 3
    assert callable(compiled(TOY))


def test_a_kernel_that_is_not_there(toys):
    for attempt in (compiled, inspect_kernel):
        with pytest.raises(UnsupportedError, match="kernel='tyo': choose 'toy', 'spill'"):
            attempt(CompileKey("tyo"))


def test_what_is_no_key(toys):
    with pytest.raises(TypeError, match="key is a str; a CompileKey is wanted"):
        compiled("toy")


@pytest.mark.parametrize("version", ["4.7.9", "4.9.0", "5.0", "5", "unknown"])
def test_a_compiler_of_another_version(toys, monkeypatch, version):
    monkeypatch.setattr("cutlass.__version__", version)
    compiler._required.cache_clear()
    try:
        for attempt in (compiled, inspect_kernel):
            with pytest.raises(UnsupportedError) as caught:
                attempt(TOY)
            assert "nvidia-cutlass-dsl >=4.8,<4.9" in str(caught.value)
            assert f"{version} is installed: pip install " in str(caught.value)
    finally:
        compiler._required.cache_clear()


def test_inspecting_needs_neither_torch_nor_tvm_ffi():
    """And leaves the cache alone."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['tvm_ffi'] = None\n"
        f"sys.path[:0] = {[str(ROOT / name) for name in ('', 'layouts', 'tests')]}\n"
        "import toy_kernels\n"
        "from zf_cute.compile import cache_info, inspect_kernel\n"
        "from zf_cute.compile_key import CompileKey\n"
        "from zf_cute.kernels import catalog\n"
        "catalog.KERNELS.update(toy_kernels.KERNELS)\n"
        "print(inspect_kernel(CompileKey('toy')).smem_bytes, cache_info().entries)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "800 0\n"), done.stderr


@pytest.mark.gpu
def test_on_a_gpu(compiles, restart):
    """As compiled and as loaded, on a stream that is not the default one."""
    x = torch.arange(512, dtype=torch.int32, device="cuda").view(torch.uint32)
    key = CompileKey("toy", head_dim=64)
    for _ in range(2):
        restart()
        y = torch.zeros(512, dtype=torch.int32, device="cuda").view(torch.uint32)
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            compiled(key)(x, y, 5)
        torch.cuda.synchronize()
        wanted = [127 - i + 64 + 5 for i in range(128)] + [0] * 384
        assert y.view(torch.int32).tolist() == wanted
    assert len(compiles) == 1


def test_the_entry_turns_to_the_tensors_device_and_back():
    """What `zf_cute.launch` relies on where another GPU is current; tests/gpu sees it with two."""
    code = str(compiler._compile(CompileKey("clear"), "--enable-tvm-ffi").ir_module)
    entry = code[code.index("llvm.call @_cudaSetDevice") - 1000 :]
    calls = re.findall(r"llvm\.call @(_cuda[GS]etDevice|cutlass___call__)", entry)
    assert calls == ["_cudaGetDevice", "_cudaSetDevice", "cutlass___call__", "_cudaSetDevice"]
