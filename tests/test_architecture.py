"""The house rules that imports, names and docstrings can break without any other test noticing."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

import pytest

import zf_cute
from zf_cute import reference
from zf_cute.integrations import flashinfer

ROOT = Path(__file__).parents[1]
SOURCES = {
    "zf_layouts": ROOT / "layouts" / "zf_layouts",
    "zf_cute": ROOT / "zf_cute",
    "zf_profile": ROOT / "tools" / "zf_profile",
}
# Each package imports itself and those before it: zf_profile -> zf_cute -> zf_layouts.
ORDER = list(SOURCES)
MAX_LINES = 450


def module_name(package: str, path: Path) -> str:
    """Dotted name of a file of a package."""
    parts = [package, *path.relative_to(SOURCES[package]).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(package, path): path
    for package, folder in SOURCES.items()
    for path in sorted(folder.rglob("*.py"))
}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _statements(node: ast.AST, *, anywhere: bool) -> Iterator[ast.AST]:
    """Nodes below `node`; unless `anywhere`, those that run on import alone."""
    skipped = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for child in ast.iter_child_nodes(node):
        if anywhere or not (isinstance(child, skipped) or _is_type_checking(child)):
            yield child
            yield from _statements(child, anywhere=anywhere)


@cache
def imports(module: str, *, anywhere: bool = True) -> frozenset[str]:
    """Dotted names that a module imports.

    `anywhere`: also in functions and for type checkers; else only what runs on import.
    ``from a.b import c`` gives a.b.c if that is a module here, and a.b in any case.
    """
    path, found = MODULES[module], set()
    for node in _statements(ast.parse(path.read_text()), anywhere=anywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                if path.name != "__init__.py":
                    package = package[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names} & MODULES.keys()
    return frozenset(found)


def tops(names: frozenset[str] | set[str]) -> set[str]:
    """First parts of dotted names."""
    return {name.split(".")[0] for name in names}


def reached(module: str) -> set[str]:
    """Every name imported on import of a module, through our own modules and their packages."""
    seen, todo, names = set(), [module], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        todo += [".".join(parts[:i]) for i in range(1, len(parts))]
        found = imports(name, anywhere=False)
        names |= found
        todo += [other for other in found if other in MODULES]
    return names


# ---- imports -----------------------------------------------------------------------------------
def test_every_module_is_seen():
    """The tests below look at what they are meant to look at."""
    for module in (
        "zf_layouts.page",
        "zf_cute",
        "zf_cute.reference.paged_attention",
        "zf_profile.cli",
    ):
        assert module in MODULES
    assert "zf_cute.reference.pages" in imports("zf_cute.reference.paged_attention")
    assert "torch" in imports("zf_profile.kvfile")  # for type checkers, and inside functions
    assert "torch" not in imports("zf_profile.kvfile", anywhere=False)
    assert "torch" in reached("zf_cute.reference.paged_attention")


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    """zf_profile imports zf_cute imports zf_layouts, and never back; nor do they import tests."""
    allowed = ORDER[: ORDER.index(module.split(".")[0]) + 1]
    assert tops(imports(module)) & {*ORDER, "tests"} <= set(allowed)


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("zf_layouts")])
def test_layouts_need_the_standard_library_alone(module):
    """The format in plain Python: nothing to install, anywhere in the file."""
    assert tops(imports(module)) - {"zf_layouts"} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("zf_cute.kernels")])
def test_kernels_never_import_torch(module):
    """Device code knows pointers and integers; neither it nor what it imports knows torch."""
    assert "torch" not in tops(imports(module))
    assert "torch" not in tops(reached(module))


@pytest.mark.parametrize("module", ["zf_cute", "zf_cute.config", "zf_cute.errors"])
def test_light_modules(module):
    """Shapes and errors import neither torch nor cutlass, nor does anything that they import."""
    heavy = {"torch", "cutlass", "cuda", "tvm_ffi", "numpy"}
    assert not tops(imports(module)) & heavy
    assert not tops(reached(module)) & heavy


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("zf_cute.")])
def test_other_libraries_are_imported_only_when_used(module):
    """On import zf_cute takes torch and the CUDA stack; what it integrates with it never needs."""
    stack = {"torch", "cutlass", "cuda", "tvm_ffi"}
    outside = tops(imports(module, anywhere=False)) - set(ORDER) - sys.stdlib_module_names
    assert outside <= stack


# ---- files -------------------------------------------------------------------------------------
def test_top_level_folders():
    """Four folders, and .ci: what a reader finds where is settled."""
    if (ROOT / ".git").exists():
        git = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        folders = {name.split("/")[0] for name in git.stdout.splitlines() if "/" in name}
    else:
        made = {"build", "dist"}  # by packaging tools
        folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
        folders = {name for name in folders - made if not name.endswith(".egg-info")}
    assert folders | {".ci"} == {"zf_cute", "layouts", "tests", "tools", ".ci"}


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_short(module):
    """A module that grows past what fits in one's head is split by role."""
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


def test_no_module_named_utils():
    """A helper lives with its noun."""
    names = {part for module in MODULES for part in module.split(".")}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


# ---- quiet imports -----------------------------------------------------------------------------
WITHOUT = "import sys; sys.modules['torch'] = sys.modules['cutlass'] = None\n"


def python(code: str) -> str:
    """Standard output of code in a fresh interpreter that finds the packages of this checkout."""
    path = f"import sys; sys.path[:0] = {[str(folder.parent) for folder in SOURCES.values()]}\n"
    result = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_imports_without_torch_and_cutlass():
    """Names, shapes and errors work where importing torch or cutlass fails."""
    code = """
import zf_cute, zf_layouts
assert dir(zf_cute) == sorted(zf_cute.__all__), dir(zf_cute)
shape = zf_cute.KVShape(2, 8, 2, 128)
assert shape.layout.page_size == 16
try:
    zf_cute.KVShape(2, 8, 3, 128)
except zf_cute.UnsupportedError as error:
    print(error)
try:
    zf_cute.PageStore
except ImportError as error:
    print(type(error).__name__, error.name)
"""
    lines = python(WITHOUT + code).splitlines()
    assert "num_qo_heads=8" in lines[0]
    assert lines[1] == "ModuleNotFoundError torch"


def test_import_loads_nothing_heavy():
    """With everything installed, `import zf_cute` and a shape leave the heavy packages out."""
    code = """
import sys, zf_cute, zf_layouts
zf_cute.KVShape(2, 8, 2, 128)
print(sorted({"torch", "cutlass", "cuda", "numpy", "rich", "tvm_ffi"} & sys.modules.keys()))
"""
    assert python(code) == "[]\n"


def test_public_names():
    """Every public name resolves, to the same object each time; others raise AttributeError."""
    assert zf_cute.__all__ == sorted(zf_cute.__all__)
    for name in zf_cute.__all__:
        value = getattr(zf_cute, name)
        assert value is getattr(zf_cute, name)
        assert value.__name__ == name
    with pytest.raises(AttributeError, match="module 'zf_cute' has no attribute 'PagedStore'"):
        zf_cute.PagedStore  # noqa: B018
    assert not hasattr(zf_cute, "torch")


# ---- docstrings --------------------------------------------------------------------------------
def _public() -> dict[str, tuple[object, object]]:
    """Name -> (object that has the docstring, callable that has the signature)."""
    roots = {f"zf_cute.{name}": getattr(zf_cute, name) for name in zf_cute.__all__}
    roots |= {f"reference.{name}": getattr(reference, name) for name in reference.__all__}
    roots |= {
        f"integrations.{name}": value
        for name, value in vars(flashinfer).items()
        if inspect.isfunction(value)
        and value.__module__ == flashinfer.__name__
        and not name.startswith("_")
    }
    found: dict[str, tuple[object, object]] = {}
    for name, value in roots.items():
        found[name] = (value, value)
        members = vars(value).items() if inspect.isclass(value) else ()
        for member_name, member in members:
            if member_name.startswith("_"):
                continue
            if isinstance(member, (property, cached_property)):
                found[f"{name}.{member_name}"] = (member, None)
            elif inspect.isfunction(member):
                found[f"{name}.{member_name}"] = (member, member)
    return found


PUBLIC = _public()


def _documented(docstring: str) -> list[str]:
    """Names in the "Parameters" section of a NumPy docstring, in order."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=\n\n\w[^\n]*\n---|\Z)", docstring, re.M | re.S)
    heads = re.findall(r"^(\w[\w, ]*) : ", section[1], re.M) if section else []
    return [name for head in heads for name in head.split(", ")]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstrings(name):
    """All that is public is documented, and parameters under the names that they have.

    A short function may do without a "Parameters" section; one of three parameters or more may
    not.
    """
    documented, signature = PUBLIC[name]
    docstring = inspect.getdoc(documented)
    assert docstring
    assert docstring.splitlines()[0].rstrip().endswith((".", ":"))
    is_error = inspect.isclass(signature) and issubclass(signature, Exception)
    if signature is None or is_error:
        return
    parameters = [p for p in inspect.signature(signature).parameters if p != "self"]
    listed = _documented(docstring)
    assert set(listed) <= set(parameters)
    if len(parameters) >= 3 and "Attributes\n---" not in docstring:
        assert listed
