"""Fixtures of the tests of compiling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kernels_compiled
import pytest
import toy_kernels

from zf_cute import compile as compiler
from zf_cute import compile_cache
from zf_cute.compile import KernelReport
from zf_cute.compile_key import CompileKey
from zf_cute.kernels import catalog


@pytest.fixture(scope="session")
def kernel_reports() -> Callable[[CompileKey], KernelReport]:
    """`kernels_compiled.report`, once all variants are compiled side by side."""
    kernels_compiled.compile_all()
    return kernels_compiled.report


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small kernels instead of ours, in a process that has compiled nothing yet."""
    monkeypatch.setattr(catalog, "KERNELS", dict(toy_kernels.KERNELS))
    monkeypatch.setattr(compiler, "_table", {})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of an empty cache of compiled kernels; it does not exist yet."""
    folder = tmp_path / "kernel cache"
    monkeypatch.setenv(compile_cache.VARIABLE, str(folder))
    monkeypatch.setattr(compile_cache, "_warned", False)
    return folder


@pytest.fixture
def compiles(toys: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that are compiled from now on."""
    names: list[str] = []
    compile_key = compiler._compile

    def noted(key, options):
        names.append(key.name)
        return compile_key(key, options)

    monkeypatch.setattr(compiler, "_compile", noted)
    return names


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what this process has loaded, as another process would start."""
    return lambda: monkeypatch.setattr(compiler, "_table", {})
