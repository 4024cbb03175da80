"""Every variant of every kernel compiles for sm_90a, spills nothing and uses no local memory."""

import re

import pytest

from zf_cute import compile as compiler
from zf_cute.cubin import read
from zf_cute.kernels import catalog

SMEM_LIMIT = 232_448  # of a block on sm_90, without what CUDA keeps
KEYS = catalog.variants()


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_variant(kernel_reports, key):
    report = kernel_reports(key)
    entries = re.findall(r"\.entry (\w+)\(", report.ptx)
    assert entries == list(read(report.cubin))
    assert len(entries) == 1
    assert entries[0].startswith(f"{key.name}_")
    assert re.search(rf"^\.target {key.arch}$", report.ptx, re.M)
    assert report.name == key.name
    assert report.spill_bytes == 0
    assert ".local" not in report.ptx  # such as an array that is indexed at run time
    assert 0 < report.registers <= 255
    assert report.smem_bytes <= SMEM_LIMIT
    assert report.code_bytes > 0
    assert report.seconds > 0


@pytest.mark.parametrize("name", catalog.KERNELS)
def test_what_is_launched_is_what_was_inspected(kernel_reports, name, cache, restart):
    """The object on disk holds the very cubin, and links with neither GPU nor driver."""
    restart()
    key = next(key for key in KEYS if key.kernel == name)
    assert callable(compiler.compiled(key))
    (binary,) = cache.rglob("*.o")
    assert kernel_reports(key).cubin in binary.read_bytes()
