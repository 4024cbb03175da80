"""Compiled kernels on disk: objects that any later process loads instead of compiling.

``ZF_CUTE_CACHE_DIR`` names the folder; without it, ``zf_cute`` in ``$XDG_CACHE_HOME`` or in
``~/.cache``.  Set to nothing or to ``off``, nothing is read or kept on disk.  The objects hold code
that is run: let nobody else write to the folder.

    <folder>/<fingerprint>/<kernel>-<key>.o      the object
                           <kernel>-<key>.json   what it is, and its sha256

The fingerprint stands for all that changes the code of every kernel: our sources, the compilers'
versions, the CPU (the host part of an object uses its instructions).  Files appear whole, by a
rename; one that is damaged all the same is found by its sha256 and compiled again.  One process
compiles an object while others wait for its lock, which dies with its holder.  A place without
locks or without room is no error: then more is compiled, and nothing kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import zf_layouts
from zf_cute.compile_key import CompileKey

VARIABLE = "ZF_CUTE_CACHE_DIR"
KEPT_FINGERPRINTS = 4
"""Sources and versions whose objects are kept, the last used; one would make two checkouts or two
environments compile in turns."""
PATIENCE_S = 120.0
"""How long a process waits for one that compiles the same key, before it does so itself."""
STALE_S = 3600.0
"""Age from which a temporary file has no process that will finish it."""

_FOLDER = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"zf_\w+-[0-9a-f]{16}\.(?:o|json|lock|(?:o|json)\.[0-9a-f]+\.tmp)", re.ASCII)
_CPU_LINES = {
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
}
_warned = False


class CacheInfo(NamedTuple):
    """Where compiled kernels are kept (None: nowhere), how many, and their size."""

    path: Path | None
    entries: int
    bytes: int


def cache_dir() -> Path | None:
    """Folder of the cache, which need not exist; None where there is none."""
    named = os.environ.get(VARIABLE)
    try:
        if named is not None:
            off = named.strip().lower() in ("", "off")
            return None if off else Path(named).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "zf_cute"
    except RuntimeError:  # no home
        return None


def cache_info() -> CacheInfo:
    """Count what the cache holds."""
    root = cache_dir()
    return CacheInfo(root, *_total(_files(root)))


def clear_cache() -> CacheInfo:
    """Remove all objects, and nothing that this module did not write; returns what was removed."""
    root = cache_dir()
    return CacheInfo(root, *_total(_remove(root, _folders(root))))


def fingerprint(toolchain: Mapping[str, str]) -> str:
    """Name of all that changes the code of every kernel: sources, CPU and the given versions."""
    about = {"sources": _SOURCES, "toolchain": dict(toolchain), "host": _host()}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _digest() -> str:
    """Hash of the sources as they are on disk now."""
    found = hashlib.sha256()
    for path in _sources():
        found.update(f"{path.parent.name}/{path.name}\0".encode())
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()


def _sources() -> list[Path]:
    """Files whose contents may change a kernel's code."""
    here, layouts = Path(__file__).parent, Path(zf_layouts.__file__).parent
    ours = [here / name for name in ("compile.py", "compile_key.py", "config.py")]
    return [*ours, *sorted(here.glob("kernels/*.py")), *sorted(layouts.glob("*.py"))]


_SOURCES = _digest()  # as this process imported them


def _host() -> list[str]:
    """What tells one CPU's instructions from another's; the first CPU stands for all."""
    found = {platform.system(), platform.machine()}
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if not line.strip():
                break
            if line.split(":")[0].strip() in _CPU_LINES:
                found.add(" ".join(line.split()))
    return sorted(found)


@dataclass(frozen=True)
class Entry:
    """Place of one key's object in the cache."""

    key: CompileKey
    fingerprint: str
    folder: Path
    stem: str

    @classmethod
    def of(cls, key: CompileKey, fingerprint: str) -> Entry | None:
        """Place of a key's object, or None where nothing is kept."""
        root = cache_dir()
        if root is None:
            return None
        fields = json.dumps(asdict(key), sort_keys=True)
        digest = hashlib.sha256(f"{fingerprint} {fields}".encode()).hexdigest()
        return cls(key, fingerprint, root / fingerprint[:16], f"{key.name}-{digest[:16]}")

    @property
    def binary(self) -> Path:
        """File of the object."""
        return self.folder / f"{self.stem}.o"

    @property
    def sidecar(self) -> Path:
        """File that says what the object is."""
        return self.folder / f"{self.stem}.json"

    def find(self) -> Path | None:
        """File of the object if it is there, whole, and this key's."""
        if not (self.sidecar.is_file() and self.binary.is_file()):
            return None
        try:
            about = json.loads(self.sidecar.read_bytes())
            digest = hashlib.sha256(self.binary.read_bytes()).hexdigest()
        except (OSError, ValueError, RecursionError):
            return None
        wanted = self._about(digest)
        if not isinstance(about, dict) or any(about.get(name) != wanted[name] for name in wanted):
            return None
        with suppress(OSError):
            os.utime(self.folder)  # used: among the last fingerprints to go
        return self.binary

    def save(self, data: bytes, seconds: float) -> None:
        """Keep an object, and let go of those of fingerprints out of use.  Warns once if it cannot.

        An object made after our sources were edited under this process is not kept.

        Parameters
        ----------
        data : bytes
            The object.
        seconds : float
            What compiling it took, for whoever reads the sidecar.
        """
        global _warned
        if _digest() != _SOURCES:
            return  # edited since they were imported: what was compiled may be neither version
        about = self._about(hashlib.sha256(data).hexdigest())
        about |= {"bytes": len(data), "seconds": round(seconds, 3)}
        try:
            self._make_folder()
            _write(self.binary, data)
            _write(self.sidecar, (json.dumps(about, indent=2) + "\n").encode())
        except OSError as error:
            if not _warned:
                _warned = True
                warnings.warn(
                    f"compiled kernels are not kept: {self.folder}: {error.strerror or error}.  "
                    f"{VARIABLE} names another folder, or 'off'",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        _prune(self.folder)

    def _about(self, digest: str) -> dict[str, object]:
        return {"key": asdict(self.key), "fingerprint": self.fingerprint, "sha256": digest}

    def _make_folder(self) -> None:
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time in; all of them where there are no locks."""
        lock = self.folder / f"{self.stem}.lock"
        handle = self._acquire(lock)
        try:
            yield
        finally:
            if handle is not None:
                # While it is held: who waits for it sees that it is gone, and takes a new one.
                with suppress(OSError):
                    lock.unlink()
                os.close(handle)

    def _acquire(self, lock: Path) -> int | None:
        """Handle of the locked file, or None: no locks here, or its holder takes too long."""
        try:
            import fcntl
        except ImportError:  # not a Unix
            return None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                self._make_folder()
                handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError:
                return None
            pause, give_up = 0.0, False
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), os.stat(lock)):
                    return handle
            except BlockingIOError:
                pause = 0.02
            except FileNotFoundError:  # its last holder took it away: the next turn makes a new one
                pass
            except OSError:
                give_up = True
            os.close(handle)
            if give_up:
                return None
            time.sleep(pause)
        return None


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it appears whole."""
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _prune(current: Path) -> None:
    """Remove the objects of all but the last used fingerprints, and what writers left behind."""
    root, used = current.parent, {}
    for folder in _folders(root):
        with suppress(OSError):
            if _files_in(folder):  # not one that stays for a file that is not ours
                used[folder] = folder.stat().st_mtime
    used.pop(current, None)
    old = sorted(used, key=lambda folder: used[folder], reverse=True)[KEPT_FINGERPRINTS - 1 :]
    _remove(root, old)
    for path in _files_in(current):
        if path.suffix == ".tmp":
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()


def _folders(root: Path | None) -> list[Path]:
    """Our folders in the cache's."""
    if root is None:
        return []
    try:
        with os.scandir(root) as found:
            return [
                Path(item.path)
                for item in found
                if _FOLDER.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _files_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return [
                Path(item.path)
                for item in found
                if _FILE.fullmatch(item.name) and item.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []


def _files(root: Path | None) -> list[tuple[Path, int]]:
    """Our files and their sizes."""
    found = []
    for folder in _folders(root):
        for path in _files_in(folder):
            with suppress(OSError):
                found.append((path, path.stat().st_size))
    return found


def _total(files: list[tuple[Path, int]]) -> tuple[int, int]:
    """(objects, bytes of all files)."""
    return sum(path.suffix == ".o" for path, _ in files), sum(size for _, size in files)


def _remove(root: Path | None, folders: list[Path]) -> list[tuple[Path, int]]:
    """Remove our files in some of our folders, and folders that are then empty."""
    removed = []
    for path, size in _files(root):
        if path.parent in folders:
            with suppress(OSError):
                path.unlink()
                removed.append((path, size))
    for folder in {path.parent for path, _ in removed}:  # not one that was empty before
        with suppress(OSError):  # something else is in it
            folder.rmdir()
    return removed
