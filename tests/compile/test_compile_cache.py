"""Compiled kernels on disk: found again, never trusted when damaged, never in the way."""

import hashlib
import itertools
import json
import os
import shutil
import time
import warnings
from pathlib import Path

import pytest
from test_architecture import MODULES, imports

from zf_cute import compile as compiler
from zf_cute import compile_cache
from zf_cute.compile import cache_dir, cache_info, clear_cache, compiled
from zf_cute.compile_key import CompileKey

TOY = CompileKey("toy")


# ---- found again ---------------------------------------------------------------------------------
def test_another_process_finds_it(compiles, restart, cache):
    first = compiled(TOY)
    restart()
    assert compiled(TOY) is not first
    assert len(compiles) == 1
    (folder,) = cache.iterdir()
    (binary,) = folder.glob("*.o")
    (sidecar,) = folder.glob("*.json")
    assert {binary, sidecar} == set(folder.iterdir())  # no lock, nothing temporary
    assert binary.stem == sidecar.stem
    assert binary.name.startswith("zf_toy_i64-")
    about = json.loads(sidecar.read_text())
    assert about["key"] == {
        "kernel": "toy",
        "head_dim": 0,
        "rope": "",
        "index": "int64",
        "vectors": True,
        "arch": "sm_90a",
        "line_info": False,
    }
    assert about["bytes"] == binary.stat().st_size
    assert about["sha256"] == hashlib.sha256(binary.read_bytes()).hexdigest()
    assert oct(cache.stat().st_mode & 0o777) == oct(folder.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize(
    "change",
    ["a source", "another source", "the DSL", "TVM-FFI", "the CPU", "a setting of the DSL"],
)
def test_what_changes_the_code_is_compiled_anew(compiles, restart, cache, monkeypatch, change):
    compiled(TOY)
    restart()
    sources = compile_cache._sources()
    toolchain = compiler._toolchain()
    if change == "a source":
        changed = cache.parent / "kernels" / "append.py"
        changed.parent.mkdir()
        changed.write_text("# " + sources[0].read_text())
        monkeypatch.setattr(compile_cache, "_sources", lambda: [changed, *sources[1:]])
    elif change == "another source":
        monkeypatch.setattr(compile_cache, "_sources", lambda: sources[:-1])
    elif change == "the DSL":
        monkeypatch.setattr(compiler, "_toolchain", lambda: {**toolchain, "dsl": "4.8.2"})
    elif change == "TVM-FFI":
        monkeypatch.setattr(compiler, "_toolchain", lambda: {**toolchain, "tvm_ffi": "0.1.16"})
    elif change == "the CPU":
        monkeypatch.setattr(compile_cache, "_host", lambda: ["x86_64", "flags: mmx"])
    else:
        monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setattr(compile_cache, "_SOURCES", compile_cache._digest())  # a new process
    compiled(TOY)
    assert len(compiles) == 2


def test_nothing_is_kept_once_sources_were_edited(compiles, restart, cache, monkeypatch):
    """The DSL reads functions from disk when it compiles: what it makes may be neither version."""
    sources = compile_cache._sources()
    monkeypatch.setattr(compile_cache, "_sources", lambda: sources[:-1])
    compiled(TOY)
    assert compile_cache.cache_info().entries == 0
    monkeypatch.setattr(compile_cache, "_sources", lambda: sources)
    restart()
    compiled(TOY)
    assert compile_cache.cache_info().entries == 1


def test_the_fingerprint_has_every_source_that_kernels_import():
    """Errors and lists of names change no code; whatever else is imported may."""
    todo = [name for name in MODULES if name.startswith("zf_cute.kernels.")]
    seen = set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [other for other in imports(name) if other in MODULES]
    harmless = {"zf_cute", "zf_cute.errors"}
    known = set(compile_cache._sources())
    assert [name for name in seen - harmless if MODULES[name] not in known] == []
    assert MODULES["zf_cute.compile"] in known
    assert {path for path in known if path.parent.name == "zf_layouts"} >= {
        path for name, path in MODULES.items() if name == "zf_layouts.page"
    }


def test_where_things_lie_does_not_matter(monkeypatch, tmp_path):
    """A checkout that has moved finds its objects: names and contents count, not paths."""
    before = compile_cache.fingerprint({"dsl": "4.8.1"})
    copies = []
    for path in compile_cache._sources():
        copies.append(tmp_path / path.parent.name / path.name)
        copies[-1].parent.mkdir(exist_ok=True)
        shutil.copy(path, copies[-1])
    monkeypatch.setattr(compile_cache, "_sources", lambda: copies)
    monkeypatch.setattr(compile_cache, "_SOURCES", compile_cache._digest())
    assert compile_cache.fingerprint({"dsl": "4.8.1"}) == before


def test_settings_that_change_no_code_do_not_matter(monkeypatch):
    before = compiler._toolchain()
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/tmp")
    assert compiler._toolchain() == before


# ---- damage --------------------------------------------------------------------------------------
def _cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def _empty(path):
    path.write_bytes(b"")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _gone(path):
    path.unlink()


def _nonsense(path):
    path.write_text("[1, 2, {")


def _another_form(path):
    path.write_text("[]")


def _of_another_key(path):
    about = json.loads(path.read_text())
    about["key"]["head_dim"] = 64
    path.write_text(json.dumps(about))


def _not_text(path):
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        *(("o", damage) for damage in (_cut, _empty, _flip, _gone)),
        *(("json", damage) for damage in (_cut, _empty, _gone, _nonsense, _another_form)),
        *(("json", damage) for damage in (_of_another_key, _not_text)),
    ],
)
def test_a_damaged_entry_is_compiled_again(compiles, restart, cache, suffix, damage):
    compiled(TOY)
    (path,) = cache.rglob(f"*.{suffix}")
    (binary,) = cache.rglob("*.o")
    good = binary.read_bytes()
    if damage is _cut and suffix == "json":
        path.write_bytes(path.read_bytes()[:100])
    else:
        damage(path)
    restart()
    assert callable(compiled(TOY))
    assert len(compiles) == 2
    restart()
    assert callable(compiled(TOY))
    assert len(compiles) == 2  # and it is whole again
    assert len(binary.read_bytes()) == len(good)


def test_an_object_that_does_not_link_is_compiled_again(compiles, restart, cache):
    """Whole as far as its sha256 goes, and no object at all."""
    compiled(TOY)
    (binary,), (sidecar,) = cache.rglob("*.o"), cache.rglob("*.json")
    binary.write_bytes(b"no object")
    about = json.loads(sidecar.read_text())
    about["sha256"] = hashlib.sha256(b"no object").hexdigest()
    sidecar.write_text(json.dumps(about))
    restart()
    assert callable(compiled(TOY))
    assert len(compiles) == 2
    assert binary.read_bytes() != b"no object"


# ---- places --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("named", "xdg", "wanted"),
    [
        (None, None, "HOME/.cache/zf_cute"),
        (None, "/xdg", "/xdg/zf_cute"),
        (None, "relative", "HOME/.cache/zf_cute"),  # to be ignored, says its specification
        ("/named", "/xdg", "/named"),
        ("~/named", None, "HOME/named"),
        ("", "/xdg", None),
        ("off", "/xdg", None),
        (" OFF ", "/xdg", None),
        ("~nobody-has-this-name/x", None, None),
    ],
)
def test_places(monkeypatch, tmp_path, named, xdg, wanted):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, value in (("ZF_CUTE_CACHE_DIR", named), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    assert cache_dir() == (wanted and Path(wanted.replace("HOME", str(tmp_path))))


def test_a_place_that_cannot_be_written(compiles, monkeypatch, tmp_path):
    """Compiled in memory, with one warning: not an error, nor a warning for each kernel."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZF_CUTE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compile_cache, "_warned", False)
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept: .*Not a directory"):
        assert callable(compiled(TOY))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callable(compiled(CompileKey("toy", head_dim=64)))
    assert len(compiles) == 2
    assert cache_info()[1:] == (0, 0)
    assert clear_cache()[1:] == (0, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_cache_that_is_read_only(compiles, restart, cache):
    """One that an administrator has filled: what is there is found."""
    compiled(TOY)
    (folder,) = cache.iterdir()
    folder.chmod(0o500)
    restart()
    try:
        assert callable(compiled(TOY))
        with pytest.warns(RuntimeWarning, match="not kept"):
            assert callable(compiled(CompileKey("toy", head_dim=64)))
    finally:
        folder.chmod(0o700)
    assert len(compiles) == 2


def test_a_full_disk(compiles, cache, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert callable(compiled(TOY))
    assert [path for path in cache.rglob("*") if path.is_file()] == []


# ---- size ----------------------------------------------------------------------------------------
def test_counted_and_cleared(compiles, restart, cache):
    assert cache_info() == clear_cache() == (cache, 0, 0)
    compiled(TOY)
    compiled(CompileKey("toy", head_dim=64))
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert cache_info() == (cache, 2, size)
    assert clear_cache() == (cache, 2, size)
    assert list(cache.iterdir()) == []
    restart()
    compiled(TOY)
    assert len(compiles) == 3


def test_nothing_that_is_not_ours_is_removed(compiles, cache, tmp_path):
    """Someone names a folder of their own, or puts a link into ours."""
    compiled(TOY)
    (folder,) = cache.iterdir()
    outside = tmp_path / ("0" * 16)
    outside.mkdir()
    others = [
        folder / "notes.txt",
        folder / "zf_toy_i64.o",  # no key
        folder / "zf_toy_i64-0123456789abcdef.cubin",
        cache / "0123456789abcdef.txt",
        cache / "zf_toy_i64-0123456789abcdef.o",  # not in a folder of a fingerprint
        cache / "photos" / "zf_toy_i64-0123456789abcdef.o",
        outside / "zf_toy_i64-0123456789abcdef.o",
    ]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
    (cache / ("f" * 16)).symlink_to(outside)
    (folder / "zf_toy_i64-fedcba9876543210.o").symlink_to(others[0])
    assert cache_info().entries == 1
    assert clear_cache().entries == 1
    assert all(other.read_text() == "mine" for other in others)
    assert (cache / ("f" * 16)).is_symlink()
    assert cache_info().entries == 0


def test_old_fingerprints_go_and_others_stay(compiles, restart, cache, monkeypatch):
    """Growth has a bound, and two checkouts in turn do not compile in turn."""
    clock = itertools.count(time.time() - 1000)
    folders = [cache / compile_cache.fingerprint({"dsl": str(i)})[:16] for i in range(1, 7)]

    def use(version):
        restart()
        monkeypatch.setattr(compiler, "_toolchain", lambda: {"dsl": version})
        before = {folder: folder.stat().st_mtime for folder in cache.glob("*")}
        compiled(TOY)
        folder = folders[int(version) - 1]
        assert folder.stat().st_mtime > before.get(folder, 0)
        os.utime(folder, (next(clock),) * 2)  # file systems' clocks are coarse

    use("1")
    (folders[0] / "notes.txt").write_text("mine")
    for version in ("2", "1", "2", "3", "4"):
        use(version)
    assert len(compiles) == 4
    use("2")  # found: used after 1, 3 and 4
    use("5")
    assert set(cache.iterdir()) == set(folders[:5])  # the first has a file that is not ours
    assert list(folders[0].iterdir()) == [folders[0] / "notes.txt"]
    use("6")
    assert folders[2] not in set(cache.iterdir())
    assert folders[1] in set(cache.iterdir())
    assert cache_info().entries == compile_cache.KEPT_FINGERPRINTS


def test_what_a_dead_writer_left_goes(compiles, cache):
    compiled(TOY)
    (folder,) = cache.iterdir()
    old, new = (folder / f"zf_toy_i64-0123456789abcdef.o.{i}.tmp" for i in ("0a", "0b"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * compile_cache.STALE_S,) * 2)
    compiled(CompileKey("toy", head_dim=64))
    assert (old.exists(), new.exists()) == (False, True)


def test_a_sidecar_that_is_no_document_is_written_anew(compiles, restart, cache):
    """Brackets deeper than the parser goes, and a pipe that nobody writes to."""
    compiled(TOY)
    (sidecar,) = cache.rglob("*.json")
    sidecar.write_text("[" * 100_000)
    restart()
    compiled(TOY)
    assert len(compiles) == 2
    sidecar.unlink()
    os.mkfifo(sidecar)
    restart()
    compiled(TOY)
    assert len(compiles) == 3


def test_an_empty_folder_of_somebody_elses_stays(compiles, cache):
    foreign = cache / "0123456789abcdef"
    foreign.mkdir(parents=True)
    compiled(TOY)
    clear_cache()
    assert list(cache.iterdir()) == [foreign]
