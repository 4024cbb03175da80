"""What a wheel holds: three packages, their data, and nothing else at the top level."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 reads TOML with tomli")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"zf_cute": ".", "zf_layouts": "layouts", "zf_profile": "tools"}
SAMPLE = "zf_profile/data/real_kv.safetensors"


def folder(package: str) -> Path:
    """Folder of one of the three packages."""
    return ROOT / PACKAGES[package] / package


def test_three_packages_are_found():
    """The search of pyproject.toml finds our three packages where they lie, and no other."""
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    found = {
        path.name: where
        for where in find["where"]
        for path in (ROOT / where).iterdir()
        if path.is_dir()
        and path.name.isidentifier()
        and any(fnmatch(path.name, pattern) for pattern in find["include"])
    }
    assert found == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_modules_is_a_package(package):
    """A folder without __init__.py would be a namespace package, in a wheel by luck alone."""
    folders = {path.parent for path in folder(package).rglob("*.py")}
    assert folder(package) in folders
    assert [path for path in folders if not (path / "__init__.py").is_file()] == []


def test_package_data():
    """Every declared pattern matches files, and every file that is not a module is declared."""
    declared = PROJECT["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        matched = {p for pattern in declared[package] for p in folder(package).glob(pattern)}
        for pattern in declared[package]:
            assert list(folder(package).glob(pattern)), f"{package}: nothing matches {pattern}"
        others = {
            path
            for path in folder(package).rglob("*")
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
        }
        assert others == matched
    assert (ROOT / "tools" / SAMPLE).stat().st_size > 1 << 20  # the tensors, not a pointer to them


@pytest.mark.parametrize("package", ["zf_cute", "zf_layouts"])
def test_typed(package):
    """The two libraries tell type checkers that they are typed."""
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]
    assert (folder(package) / "py.typed").is_file()


def test_named_files_exist():
    """The readme and the licence that pyproject.toml names, and the module of the script."""
    project = PROJECT["project"]
    for name in [project["readme"], *project["license-files"]]:
        assert (ROOT / name).is_file(), name
    module, function = project["scripts"]["zf-profile"].split(":")
    source = ROOT / "tools" / (module.replace(".", "/") + ".py")
    assert f"def {function}(" in source.read_text()


def test_installed_metadata():
    """An installation is of this version, and has the command."""
    try:
        installed = metadata.distribution("zf_cute")
    except metadata.PackageNotFoundError:
        pytest.skip("zf_cute is not installed; the tests run from the checkout")
    assert installed.version == PROJECT["project"]["version"]
    scripts = {entry.name: entry.value for entry in installed.entry_points}
    assert scripts["zf-profile"] == PROJECT["project"]["scripts"]["zf-profile"]


def missing_builder() -> str | None:
    """What a wheel cannot be built without, if it is missing here."""
    for name, least in (("setuptools", 77), ("pip", 21)):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} is not installed"
        if int(version.split(".")[0]) < least:
            return f"{name} {version} is installed; {least} or newer is needed"
    return None


@pytest.mark.skipif(missing_builder() is not None, reason=str(missing_builder()))
def test_wheel(tmp_path):
    """A wheel, built without the network from a copy: building leaves folders behind."""
    source = tmp_path / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in ("zf_cute", "layouts", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", PROJECT["project"]["readme"], "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check", "-q", "-w", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    info = f"zf_cute-{PROJECT['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    assert {SAMPLE, "zf_cute/py.typed", "zf_layouts/py.typed"} <= set(names)
    for package, where in PACKAGES.items():
        for path in folder(package).rglob("*.py"):
            assert path.relative_to(ROOT / where).as_posix() in names
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(SAMPLE) == (ROOT / "tools" / SAMPLE).read_bytes()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert "zf-profile = zf_profile.cli:main" in scripts
