"""From a `CompileKey` to a kernel that takes torch tensors, with no GPU and no driver needed.

A key is compiled once: this process keeps what it compiled or loaded in a table, and all processes
of a machine share objects on disk (`zf_cute.compile_cache`).  Importing this imports neither
cutlass nor torch; the first key does.

Limits   sm_90a.  The DSL keeps what it compiles for in globals, so one thread compiles at a time;
         processes compile side by side.
See      zf-profile compile: registers, spills, shared memory and seconds of every kernel
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from zf_cute import compile_cache, cubin
from zf_cute.compile_cache import cache_dir, cache_info, clear_cache
from zf_cute.compile_key import CompileKey
from zf_cute.errors import CompileError, UnsupportedError, ZfError
from zf_cute.kernels import catalog

__all__ = [
    "CompiledKernel",
    "KernelReport",
    "cache_dir",
    "cache_info",
    "check_compiler",
    "clear_cache",
    "compiled",
    "compiled_keys",
    "inspect_kernel",
]

CompiledKernel = Callable[..., None]
"""Takes the kernel's tensors and scalars, without the stream: it runs on torch's current one."""

REQUIRED = {
    # distribution: (module, lowest version, first version too high, how to get it)
    "nvidia-cutlass-dsl": (
        "cutlass",
        (4, 8),
        (4, 9),
        "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'",
    ),
    "apache-tvm-ffi": ("tvm_ffi", (0, 1, 15), (0, 2), "pip install 'apache-tvm-ffi>=0.1.15,<0.2'"),
}

# Of the DSL's own variables, those that change nothing in the code it makes.
_HARMLESS = {f"CUTE_DSL_{name}" for name in ("ARCH", "CACHE_DIR", "DUMP_DIR", "LOG_LEVEL")}

_log = logging.getLogger(__name__)
_table: dict[CompileKey, CompiledKernel] = {}
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What a kernel takes, and the code that it is.

    Attributes
    ----------
    name : str
        The key's name.
    registers : int
        Registers of a thread.
    spill_bytes : int
        Local memory of a thread, its stack frame: registers that were spilled lie there, and
        arrays that are indexed at run time.
    smem_bytes : int
        Shared memory of a block, static and asked for at launch, without the 1024 bytes that CUDA
        keeps for itself.
    code_bytes : int
        Machine code, padding included.
    seconds : float
        Time that compiling took.
    ptx, cubin : str, bytes
        The code.
    """

    name: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    code_bytes: int
    seconds: float
    ptx: str
    cubin: bytes


def check_compiler() -> None:
    """Import the compiler; UnsupportedError says how to get it, or the right version of it."""
    _required("nvidia-cutlass-dsl")


def compiled(key: CompileKey) -> CompiledKernel:
    """Return the kernel of a key; compiles it if neither this process nor the cache has it.

    Raises
    ------
    CompileError
        Holds what the compiler said.
    UnsupportedError
        For a key that no kernel implements, or where the compiler is missing: says how to get it.
    """
    kernel = _table.get(key)
    return _first(key) if kernel is None else kernel


def compiled_keys() -> tuple[CompileKey, ...]:
    """Keys that this process has compiled or loaded so far, in that order."""
    return tuple(_table)


def inspect_kernel(key: CompileKey, *, warm: bool = False) -> KernelReport:
    """Compile a key, whatever the cache holds, and say what the kernel takes.

    The code is the same as `compiled` makes.  Leaves the cache alone and needs neither TVM-FFI nor
    torch, unless `warm` asks to put the kernel into the cache on disk, where it is not yet.
    """
    check_compiler()
    entry = _entry(key) if warm else None
    with _folder(key) as folder:
        start = time.perf_counter()
        options = f"--keep-ptx --keep-cubin --dump-dir {shlex.quote(folder)}"
        made = _compile(key, f"{options} --enable-tvm-ffi" if warm else options)
        seconds = time.perf_counter() - start
        ptx, code = made.__ptx__, made.__cubin__
        if not ptx or not code:
            raise CompileError(f"{key.name}: its code was not written to {folder}: is there room?")
        if entry is not None and entry.find() is None:
            entry.save(_export(made, key, folder).read_bytes(), seconds)
    try:
        resources = cubin.read(code)
    except ValueError as error:
        raise CompileError(
            f"{key.name}: {error}; is there room for temporary files in {tempfile.gettempdir()}?"
        ) from error
    if len(resources) != 1:
        raise CompileError(f"{key.name}: one entry is wanted, the cubin has {list(resources)}")
    (found,) = resources.values()
    return KernelReport(
        key.name,
        found.registers,
        found.local_bytes,
        found.smem_bytes + _launched_smem(made.ir_module),
        found.code_bytes,
        seconds,
        ptx,
        code,
    )


def _first(key: CompileKey) -> CompiledKernel:
    if not isinstance(key, CompileKey):
        raise TypeError(f"key is a {type(key).__name__}; a CompileKey is wanted")
    with _lock:
        if key not in _table:
            _table[key] = _obtain(key)
        return _table[key]


def _obtain(key: CompileKey) -> CompiledKernel:
    """Load a key's object from disk, or make it."""
    entry = _entry(key)
    if entry is None:
        return _make(key, None)
    kernel = _find(entry)
    if kernel is not None:
        return kernel
    with entry.locked():
        return _find(entry) or _make(key, entry)  # another process may have made it meanwhile


def _entry(key: CompileKey) -> compile_cache.Entry | None:
    catalog.check_name(key.kernel)
    return compile_cache.Entry.of(key, compile_cache.fingerprint(_toolchain()))


def _find(entry: compile_cache.Entry) -> CompiledKernel | None:
    path = entry.find()
    try:
        return None if path is None else _load(path, entry.key)
    except Exception as error:  # a linker's, of any class: then it is made anew
        _log.warning("%s cannot be loaded and is compiled again: %s", path, error)
        return None


def _make(key: CompileKey, entry: compile_cache.Entry | None) -> CompiledKernel:
    start = time.perf_counter()
    made = _compile(key, "--enable-tvm-ffi")
    with _folder(key) as folder:
        path = _export(made, key, folder)
        try:
            kernel = _load(path, key)
        except Exception as error:
            raise _failure(key, error) from error
        seconds = time.perf_counter() - start
        _log.info("compiled %s in %.2f s", key.name, seconds)
        if entry is not None:
            entry.save(path.read_bytes(), seconds)
    return kernel


@contextmanager
def _folder(key: CompileKey) -> Iterator[str]:
    """Make a folder for temporary files; CompileError where there is no room for one."""
    try:
        with tempfile.TemporaryDirectory(prefix="zf_cute-") as folder:
            yield folder
    except OSError as error:
        raise CompileError(
            f"{key.name}: no temporary files can be written in {tempfile.gettempdir()}: "
            f"{error.strerror or error}; TMPDIR names another place"
        ) from error


def _export(made: Any, key: CompileKey, folder: str) -> Path:
    """Write an object that `_load` takes: the cubin, and the host code that launches it."""
    path = Path(folder) / "kernel.o"
    try:
        made.export_to_c(str(path), function_name=key.name)
    except Exception as error:
        raise _failure(key, error) from error
    return path


def _load(path: Path, key: CompileKey) -> CompiledKernel:
    """Link an object into this process.  The code goes to a GPU at the first call."""
    from cutlass.cute.runtime import load_module

    kernel: CompiledKernel = load_module(str(path), enable_tvm_ffi=True)[key.name]
    return kernel


def _compile(key: CompileKey, options: str) -> Any:
    """Compile a key with the DSL; CompileError if it cannot."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    # The architecture is always named: the DSL would take that of the GPU it finds, or sm_100a.
    options += f" --gpu-arch {key.arch}"
    if key.line_info:
        options += " --generate-line-info"
    stream = make_fake_stream(use_tvm_ffi_env_stream="--enable-tvm-ffi" in options)
    with _lock:
        try:
            kernel = catalog.build(key)
            # The prefix belongs to the function that all variants share.
            kernel.kernel.set_name_prefix(
                key.name, remove_cutlass_symbol=True, keep_mangled_name=False
            )
            # Without an engine: it would link a second copy here, where there is a GPU.
            return cute.compile(
                kernel, *kernel.arguments(), stream, options=options, no_jit_engine=True
            )
        except ZfError:
            raise
        except Exception as error:
            raise _failure(key, error) from error


def _failure(key: CompileKey, error: Exception) -> CompileError:
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or repr(error)
    return CompileError(
        f"{key.name} does not compile for {key.arch}; 'zf-profile doctor' checks the installation. "
        f"The compiler says:\n{said}"
    )


def _launched_smem(module: Any) -> int:
    """Shared memory that the launch asks for: the third field of its cudaLaunchConfig_t."""
    field = re.compile(
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
        r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, "
    )
    found = []
    for operation in module.body.operations:
        if operation.operation.name != "llvm.func":
            continue
        text = str(operation)
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", text))
        for place in field.findall(text):
            stored = re.search(rf"llvm\.store (%\w+), {place} : i64", text)
            if stored is None or stored[1] not in constants:
                raise CompileError("a launch asks for shared memory that is not constant")
            found.append(int(constants[stored[1]]))
    if not found:
        raise CompileError("no launch found in the host code: is this another version of the DSL?")
    return max(found)


def _toolchain() -> dict[str, str]:
    """Versions and settings that change the code of kernels; also loads what compiles them."""
    cutlass, tvm_ffi = map(_required, REQUIRED)
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and name not in _HARMLESS
    }
    return {
        "dsl": cutlass.__version__,
        "cuda": str(cutlass.CUDA_VERSION),
        "tvm_ffi": tvm_ffi.__version__,
        **settings,
    }


@cache
def _required(distribution: str) -> Any:
    """Import what compiles kernels; UnsupportedError says how to get it, or the right version."""
    name, lowest, limit, remedy = REQUIRED[distribution]
    wanted = f">={'.'.join(map(str, lowest))},<{'.'.join(map(str, limit))}"
    try:
        module = import_module(name)
    except Exception as error:  # a broken install raises OSError or RuntimeError too
        raise UnsupportedError(
            f"compiling kernels needs {distribution} {wanted}, and import {name} fails "
            f"({type(error).__name__}: {error}): {remedy}"
        ) from error
    found = getattr(module, "__version__", None) or "an unknown version"
    version = re.match(r"\d+(?:\.\d+)*", found)
    if version is None or not lowest <= tuple(map(int, version[0].split("."))) < limit:
        raise UnsupportedError(
            f"compiling kernels needs {distribution} {wanted}, and {found} is installed: {remedy}"
        )
    return module
