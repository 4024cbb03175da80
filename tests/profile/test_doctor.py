"""``zf-profile doctor``: what it finds, what it misses, and what it says to do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from profile_tool import child

from zf_profile import doctor

GOOD = {
    "torch": "2.14.1+cu130",
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "cuda-python": "13.0.3",
    "rich": "15.0.0",
    "safetensors": "0.8.0",
}
NEEDED = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "rich", "safetensors")


@pytest.fixture
def versions(monkeypatch):
    """A healthy machine, to be spoilt: packages that import at once, of versions as in GOOD."""
    for name, (_, lowest, limit, remedy) in doctor.REQUIRED.items():
        monkeypatch.setitem(doctor.REQUIRED, name, ("this", lowest, limit, remedy))
    found = dict(GOOD)
    monkeypatch.setattr(doctor, "version", found.get)
    return found


def test_this_machine():
    ran = child("doctor", "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert document["schema"] == "zf-profile/1"
    checks = {check["name"]: check for check in document["checks"]}
    for name in ("python", *GOOD):
        assert checks[name]["ok"], checks[name]
        assert checks[name]["found"]
        assert checks[name]["remedy"] == ""
    assert {"gpu", "driver", "ncu", "flashinfer-python"} < checks.keys()
    for check in checks.values():
        assert check.keys() == {"name", "ok", "found", "remedy"}
        assert check["ok"] or check["remedy"], f"{check['name']}: nothing says what to do"
    able = {entry["name"]: entry["ok"] for entry in document["can_run"]}
    assert able["reference backend, demo, ratio"]
    assert able["compiling kernels for sm_90a"]
    assert able["running kernels"] == checks["gpu"]["ok"]
    assert document["compile_cache"].keys() == {"path", "entries", "bytes"}


def test_a_healthy_machine(versions, tool):
    ran = tool("doctor")
    assert (ran.code, ran.err) == (0, "")
    for name, version in versions.items():
        assert name in ran.out
        assert version in ran.out
    assert re.search("compiling kernels for sm_90a +yes +needs no GPU: zf-profile compile", ran.out)


def test_where_compiled_kernels_are_kept(versions, tool, monkeypatch, tmp_path):
    """The place, also before anything is in it, how many and how large; and how to clear it."""
    folder = tmp_path / "not yet"
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", str(folder))
    line = "Compiled kernels: {} on disk, {} bytes, in {} ('zf-profile compile --clear-cache'"
    assert line.format(0, 0, folder) in tool("doctor").out
    kept = folder / "0123456789abcdef" / "zf_append_d128_half_i64-0123456789abcdef.o"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(bytes(1234))
    (folder / "notes.txt").write_text("not ours")
    assert line.format(1, "1,234", folder) in tool("doctor").out
    cache = json.loads(tool("doctor", "--json", "-").out)["compile_cache"]
    assert cache == {"path": str(folder), "entries": 1, "bytes": 1234}


def test_compiled_kernels_that_are_not_kept(versions, tool, monkeypatch):
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", "off")
    assert "Compiled kernels are not kept on disk (ZF_CUTE_CACHE_DIR" in tool("doctor").out
    cache = json.loads(tool("doctor", "--json", "-").out)["compile_cache"]
    assert cache == {"path": None, "entries": 0, "bytes": 0}


def test_a_place_whose_name_is_no_plain_text(versions, tool, monkeypatch):
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", "/tmp/[red]\x1b[31m")
    ran = tool("doctor")
    assert "in /tmp/[red]\\x1b[31m (" in ran.out


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_package(versions, tool, monkeypatch, name):
    _, lowest, limit, remedy = doctor.REQUIRED[name]
    monkeypatch.setitem(doctor.REQUIRED, name, ("no_such_module", lowest, limit, remedy))
    del versions[name]
    ran = tool("doctor", "--json", "-")
    assert ran.code == 1
    bad = [c for c in json.loads(ran.out)["checks"] if not c["ok"] and c["name"] in GOOD]
    assert bad == [{"name": name, "ok": False, "found": None, "remedy": remedy}]
    assert "pip install" in remedy
    assert name in remedy


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [
        ("nvidia-cutlass-dsl", "4.9.0", "4.8 or newer and below 4.9 is wanted"),
        ("nvidia-cutlass-dsl", "5", "4.8 or newer and below 4.9 is wanted"),
        ("nvidia-cutlass-dsl", "4.7.3", "4.8 or newer and below 4.9 is wanted"),
        ("torch", "2.10.1+cu126", "2.11 or newer is wanted"),
        ("apache-tvm-ffi", "0.1.14", "0.1.15 or newer and below 0.2 is wanted"),
    ],
)
def test_a_version_out_of_range(versions, tool, name, version, wanted):
    versions[name] = version
    ran = tool("doctor", "--json", "-")
    assert ran.code == 1
    (check,) = (c for c in json.loads(ran.out)["checks"] if c["name"] == name)
    assert (check["ok"], check["found"]) == (False, version)
    assert check["remedy"] == f"{wanted}: {doctor.REQUIRED[name][3]}"


@pytest.mark.parametrize("version", ["4.8", "4.8.0rc1", "4.8.99"])
def test_a_version_at_the_edge_of_its_range(versions, tool, version):
    versions["nvidia-cutlass-dsl"] = version
    assert tool("doctor").code == 0


def test_a_broken_import_is_shown_as_it_is(versions, tool, monkeypatch, tmp_path):
    """What the import said looks like rich's markup, and would be swallowed by it."""
    (tmp_path / "brittle.py").write_text("raise OSError('[red]libcudart.so.13: :smile: \\x1b[1m')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(doctor.REQUIRED, "torch", ("brittle", (2, 9), None, "pip install torch"))
    ran = tool("doctor")
    assert ran.code == 1
    shown = (
        "import brittle fails (OSError: [red]libcudart.so.13: :smile: \\x1b[1m): pip install torch"
    )
    assert shown in ran.out


def test_an_import_that_hangs(versions, tool, monkeypatch):
    def hang(*_, timeout, **__):
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    ran = tool("doctor", "--json", "-")
    assert ran.code == 1
    assert "import this hangs: pip install torch" in ran.out


def test_torch_that_breaks_in_another_way(versions, tool, monkeypatch):
    """A library that is missing raises OSError, which must not take the doctor down."""

    class Broken:
        def find_spec(self, name, *_):
            if name == "torch":
                raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("sys.meta_path", [Broken(), *sys.meta_path])
    ran = tool("doctor", "--json", "-")
    assert "torch is needed to look for one" in ran.out


def test_nothing_is_installed_at_all():
    """Not even rich: plain lines, and one JSON document alone where that is asked for."""
    ran = child("doctor", python=["-S"])
    assert (ran.code, ran.err) == (1, "")
    assert "torch no: pip install torch\n" in ran.out
    assert "\nCompiled kernels" in ran.out
    ran = child("doctor", "--json", "-", python=["-S"])
    assert (ran.code, ran.err) == (1, "")
    able = {entry["name"]: entry["ok"] for entry in json.loads(ran.out)["can_run"]}
    assert able == {
        "reference backend, demo, ratio": False,
        "layout": False,
        "compiling kernels for sm_90a": False,
        "running kernels": False,
    }


def test_its_ranges_are_those_of_the_package():
    """What doctor asks for is what pip was asked for."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)[1]
    asked = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?([^"]*)"', listed))
    assert set(asked) == set(doctor.REQUIRED)
    for name, (_, lowest, limit, _) in doctor.REQUIRED.items():
        want = ">=" + ".".join(map(str, lowest))
        want += ",<" + ".".join(map(str, limit)) if limit else ""
        assert asked[name] == want
    python = re.search(r'^requires-python = "(.*)"', text, re.M)[1]
    lowest, limit = (".".join(map(str, version)) for version in doctor.PYTHONS)
    assert python == f">={lowest},<{limit}"
