"""A compile key is a value: equal calls are one compile, and nothing else gets in."""

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from zf_cute.compile_key import CompileKey
from zf_cute.errors import UnsupportedError
from zf_cute.kernels import catalog

ROOT = Path(__file__).parents[2]
KEY = CompileKey("append", head_dim=128, rope="half")


class Text(str):
    """Equal to a str, and no str."""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        # flash-attention #2635: a tensor of no dimensions in a key compiled anew at every call.
        ("head_dim", torch.tensor(128)),
        ("head_dim", np.int64(128)),
        ("head_dim", True),
        ("head_dim", 128.0),
        ("head_dim", None),
        ("kernel", Text("append")),
        ("kernel", b"append"),
        ("rope", None),
        ("index", torch.int64),
        ("vectors", 1),
        ("vectors", np.bool_(True)),
        ("vectors", torch.tensor(True)),
        ("arch", 90),
        ("line_info", 0),
    ],
)
def test_fields_are_exactly_of_their_types(field, value):
    with pytest.raises(TypeError, match=rf"CompileKey\.{field} is a "):
        replace(KEY, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("index", "int16", "choose 'int32' or 'int64'"),
        ("arch", "sm_100a", "sm_90a"),
        ("kernel", "../append", "is no kernel's name"),
        ("kernel", "", "is no kernel's name"),
        ("rope", "half/..", "'half', 'interleaved' or ''"),
        ("head_dim", -1, "64, 128 or 256"),
    ],
)
def test_values_that_no_kernel_has(field, value, said):
    with pytest.raises(UnsupportedError, match=said):
        replace(KEY, **{field: value})


def test_it_is_a_value():
    assert CompileKey("append", 128, "half") == KEY
    assert hash(KEY) == hash(CompileKey("append", 128, "half"))
    assert replace(KEY, line_info=True) != KEY
    assert pickle.loads(pickle.dumps(KEY)) == KEY  # goes to the processes that compile
    with pytest.raises(FrozenInstanceError):
        KEY.head_dim = 64
    assert not hasattr(KEY, "__dict__")


def test_names():
    assert KEY.name == "zf_append_d128_half_i64"
    assert replace(KEY, vectors=False, index="int32").name == "zf_append_d128_half_i32_rows"
    assert CompileKey("clear").name == "zf_clear_i64"
    assert replace(KEY, line_info=True).name == KEY.name  # one profiler filter finds both


def test_variants_are_many_and_their_names_tell_them_apart():
    keys = catalog.variants()
    assert {key.kernel for key in keys} == set(catalog.KERNELS)
    assert len({key.name for key in keys}) == len(set(keys)) == len(keys)
    assert {key.arch for key in keys} == {"sm_90a"}
    assert not any(key.line_info for key in keys)


def test_the_catalog_names_its_kernels():
    with pytest.raises(UnsupportedError, match="kernel='apend': choose 'append', 'encode'"):
        catalog.build(CompileKey("apend"))
    with pytest.raises(UnsupportedError, match="sm_90a"):
        catalog.variants("sm_80")


def test_importing_them_imports_neither_cutlass_nor_torch():
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['cutlass'] = sys.modules['tvm_ffi'] = None\n"
        "import zf_cute.compile, zf_cute.compile_key, zf_cute.kernels.catalog as catalog\n"
        "print(zf_cute.compile_key.CompileKey('clear').name, len(catalog.KERNELS))\n"
        "try:\n"
        "    zf_cute.compile.compiled(zf_cute.compile_key.CompileKey('clear'))\n"
        "except zf_cute.UnsupportedError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'layouts'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "zf_clear_i64 4"
    assert "import cutlass fails" in second
    assert "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'" in second
