"""Files of keys and values: .safetensors, or .pt with tensors in dicts, lists and tuples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zf_layouts import HEAD_DIMS, PARTS, Part
from zf_profile.console import UserError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
LAYOUTS = {
    "thd": "[tokens, kv_heads, head_dim]",
    "htd": "[kv_heads, tokens, head_dim]",
    "bhtd": "[batch, kv_heads, tokens, head_dim]",
}
_TO_BTHD: dict[str, Callable[[Tensor], Tensor]] = {
    "thd": lambda x: x[None],
    "htd": lambda x: x.transpose(0, 1)[None],
    "bhtd": lambda x: x.transpose(1, 2),
}
_WORDS: dict[Part, frozenset[str]] = {
    "k": frozenset({"k", "key", "keys", "k_cache", "key_cache", "key_states"}),
    "v": frozenset({"v", "value", "values", "v_cache", "value_cache", "value_states"}),
}


@dataclass(frozen=True)
class KVTensor:
    """One K or V tensor of a file, not loaded yet.

    Attributes
    ----------
    name : str
        Name in the file.
    part : {"k", "v"}
        Whether it holds keys or values.
    stem : str
        The name without what says K or V: equal for the two of a pair.
    load : callable
        Returns [batch, tokens, kv_heads, head_dim] bfloat16.
    shape : tuple of int
        The loaded shape.
    """

    name: str
    part: Part
    stem: str
    load: Callable[[], Tensor]
    shape: tuple[int, ...]


def open_kv(
    path: Path, layout: str, patterns: dict[Part, str | None]
) -> tuple[list[KVTensor], list[str]]:
    """Find the K and V tensors of a file and check that the format can hold them.

    Parameters
    ----------
    path : Path
        A .safetensors or .pt file.
    layout : str
        Order of axes: a key of LAYOUTS.
    patterns : dict
        For "k" and "v", a glob over tensor names, or None to go by usual names.

    Returns
    -------
    tensors : list of KVTensor
        At least one.
    others : list of str
        Names in the file that are neither.

    Raises
    ------
    UserError
        If the file cannot be read or a tensor cannot be stored, saying why and what to do.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not path.is_file():
        raise UserError(f"{path}: not a file")
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"{path}: cannot tell the format; name it {', '.join(SUFFIXES)}")
    try:
        size = path.stat().st_size
        if size == 0:
            raise UserError(f"{path}: the file is empty")
        found = dict(_safetensors(path) if kind == "safetensors" else _torch_file(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if not found:
        raise UserError(f"{path}: holds no tensors")

    tensors, others = [], []
    for name in sorted(found, key=_natural):
        part, stem = _part_of(name, patterns)
        if part is None:
            others.append(name)
            continue
        dtype, shape, load = found[name]
        tensors.append(_checked(name, part, stem, dtype, shape, load, layout))
    for part, pattern in patterns.items():
        if pattern is not None and not any(x.part == part for x in tensors):
            raise UserError(f"--{part} {pattern}: no tensor matches; {_listing(others)}")
    if not tensors:
        raise UserError(
            f"{path}: no tensor is named like keys or values; {_listing(others)}.  "
            "Say which are with --k 'GLOB' and --v 'GLOB'"
        )
    return tensors, others


def pairs(tensors: list[KVTensor]) -> tuple[list[tuple[KVTensor, KVTensor]], str]:
    """Pair each K with its V.

    Returns the pairs and, where they are not all paired, an empty list and the reason.
    """
    keys = [x for x in tensors if x.part == "k"]
    values = [x for x in tensors if x.part == "v"]
    by_stem = {x.stem: x for x in values}
    matched = [(k, by_stem[k.stem]) for k in keys if k.stem in by_stem]
    if len(matched) != len(keys) or len(matched) != len(values):
        matched = list(zip(keys, values, strict=False))  # names tell nothing: by order
    if len(keys) != len(values):
        return [], f"{len(keys)} K and {len(values)} V tensors cannot be paired into pages"
    for k, v in matched:
        if k.shape != v.shape:
            return [], f"{k.name} and {v.name} differ in shape, so they make no pages"
    return matched, ""


def _natural(name: str) -> list[Any]:
    """Sort key in which layer10 follows layer9."""
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def _part_of(name: str, patterns: dict[Part, str | None]) -> tuple[Part | None, str]:
    pieces = re.split(r"([/.\-]|_?\d+_?)", name)
    for part in PARTS:
        pattern = patterns[part]
        if pattern is not None:
            if fnmatchcase(name, pattern):
                return part, _stem(pieces)
        elif any(piece.lower() in _WORDS[part] for piece in pieces):
            return part, _stem(pieces)
    return None, ""


def _stem(pieces: list[str]) -> str:
    either = _WORDS["k"] | _WORDS["v"]
    return "".join("*" if piece.lower() in either else piece for piece in pieces)


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"the file has {shown or 'no other tensors'}"


def _checked(
    name: str,
    part: Part,
    stem: str,
    dtype: str,
    shape: tuple[int, ...],
    load: Callable[[], Tensor],
    layout: str,
) -> KVTensor:
    if dtype.lower() not in ("bf16", "bfloat16"):
        raise UserError(
            f"{name}: the tensor is {dtype}.  Only BF16 is stored: the codec is lossless because "
            "it knows BF16's 8 exponent bits, and a cast would change your cache.  If the model "
            "computes in BF16, save its keys and values before any cast"
        )
    if len(shape) != len(layout):
        raise UserError(
            f"{name}: shape {list(shape)} has {len(shape)} axes, --layout {layout} means "
            f"{LAYOUTS[layout]}; other layouts: {', '.join(x for x in LAYOUTS if x != layout)}"
        )
    if 0 in shape:
        raise UserError(f"{name}: shape {list(shape)} holds no values")
    axis = dict(zip(layout, shape, strict=True))
    head_dim = axis["d"]
    if head_dim not in HEAD_DIMS:
        why = "not a multiple of 16, " if head_dim % 16 else ""
        raise UserError(
            f"{name}: head_dim {head_dim} (last axis of --layout {layout}) is {why}not one of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    return KVTensor(
        name,
        part,
        stem,
        lambda: _TO_BTHD[layout](load()),
        (axis.get("b", 1), axis["t"], axis["h"], head_dim),
    )


_Found = tuple[str, tuple[str, tuple[int, ...], Callable[[], "Tensor"]]]


def _safetensors(path: Path) -> Iterator[_Found]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                yield name, (part.get_dtype(), shape, partial(_safetensor, path, name))
    except SafetensorError as error:
        raise UserError(
            f"{path}: not a whole safetensors file (truncated or damaged): {error}"
        ) from None


def _safetensor(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _torch_file(path: Path) -> Iterator[_Found]:
    import pickle

    import torch

    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # The format before torch 1.6 cannot be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: holds something other than tensors in dicts, lists and tuples, or is "
            "damaged; save those alone, for example torch.save({'k': k, 'v': v}, path)"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: not a whole torch file (truncated or damaged): {reason}"
        ) from None
    for name, tensor in _flatten(content, ""):
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield name, (dtype, tuple(tensor.shape), partial(_itself, tensor))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _flatten(content: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    if isinstance(content, torch.Tensor):
        yield name or "tensor", content
        return
    if isinstance(content, dict):
        items = [(str(key), value) for key, value in content.items()]
    elif isinstance(content, (list, tuple)):
        # One (key, value) pair a layer is how caches are saved from transformers.
        pair = len(content) == 2 and all(isinstance(x, torch.Tensor) for x in content)
        labels = PARTS if pair and name else [str(i) for i in range(len(content))]
        items = list(zip(labels, content, strict=True))
    else:
        return
    for label, value in items:
        yield from _flatten(value, f"{name}.{label}" if name else label)
