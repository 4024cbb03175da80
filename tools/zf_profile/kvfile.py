"""Files of keys and values: .safetensors, or .pt with tensors in dicts, lists and tuples."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zf_layouts import HEAD_DIMS, PARTS, Part
from zf_profile.console import UserError, import_interruptibly

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
MOST_NESTED = 50
"""Dicts and lists in one another: no cache has more."""
LAYOUTS = {
    "thd": "[tokens, kv_heads, head_dim]",
    "htd": "[kv_heads, tokens, head_dim]",
    "bhtd": "[batch, kv_heads, tokens, head_dim], as transformers keeps caches",
    "bthd": "[batch, tokens, kv_heads, head_dim]",
}
USUAL_LAYOUTS = {3: "thd", 4: "bhtd"}
"""Layout by the number of axes, where the user names none."""

_TO_BTHD: dict[str, Callable[[Tensor], Tensor]] = {
    "thd": lambda x: x[None],
    "htd": lambda x: x.transpose(0, 1)[None],
    "bhtd": lambda x: x.transpose(1, 2),
    "bthd": lambda x: x,
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
    reading : str
        How the file's shape was understood, for people.
    """

    name: str
    part: Part
    stem: str
    load: Callable[[], Tensor]
    shape: tuple[int, ...]
    reading: str


def open_kv(
    path: Path, layout: str | None, patterns: dict[Part, str | None]
) -> tuple[list[KVTensor], list[str]]:
    """Find the K and V tensors of a file and check that the format can hold them.

    Parameters
    ----------
    path : Path
        A .safetensors or .pt file.
    layout : str or None
        Order of axes: a key of LAYOUTS; None goes by the number of axes (USUAL_LAYOUTS).
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
    _check_file(path)
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise UserError(
            f"{path}: not a {', '.join(SUFFIXES)} file; save the tensors as one of these"
        )
    import_interruptibly("torch", "safetensors.torch", "zf_cute.reference")
    found: dict[str, _Stored] = {}
    for name, stored in _safetensors(path) if kind == "safetensors" else _torch_file(path):
        if name in found:
            raise UserError(f"{path}: two tensors go by the name {name}; rename one")
        found[name] = stored
    if not found:
        raise UserError(f"{path}: holds no tensors")

    tensors, others = [], []
    for name in sorted(found, key=_natural):
        part, stem = _part_of(name, patterns)
        if part is None:
            others.append(name)
            continue
        tensors.append(_checked(name, part, stem, found[name], layout))
    for part, pattern in patterns.items():
        if pattern is not None and not any(x.part == part for x in tensors):
            raise UserError(f"--{part} {pattern}: no tensor matches; {_listing(others)}")
    if not tensors:
        raise UserError(
            f"{path}: no tensor is named like keys or values; {_listing(others)}.  "
            "Say which are with --k 'GLOB' and --v 'GLOB'; split a tensor that holds both"
        )
    return tensors, others


def _check_file(path: Path) -> None:
    try:
        if not path.exists():
            raise UserError(f"{path}: no such file")
        if not path.is_file():
            raise UserError(f"{path}: not a file")
        with path.open("rb") as file:
            if not file.read(1):
                raise UserError(f"{path}: the file is empty")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def pairs(tensors: list[KVTensor]) -> tuple[list[tuple[KVTensor, KVTensor]], str]:
    """Pair each K with its V.

    Returns the pairs and, where they are not all paired, an empty list and the reason.
    """
    keys, values = ([x for x in tensors if x.part == part] for part in PARTS)
    if len(keys) != len(values):
        return [], f"{len(keys)} K and {len(values)} V tensors cannot be paired into pages"
    by_stem = {x.stem: x for x in values}
    if len(by_stem) == len(values) and {x.stem for x in keys} == by_stem.keys():
        values = [by_stem[k.stem] for k in keys]  # else names tell nothing: by order
    for k, v in zip(keys, values, strict=True):
        if k.shape != v.shape:
            return [], f"{k.name} and {v.name} differ in shape, so they make no pages"
    return list(zip(keys, values, strict=True)), ""


def _natural(name: str) -> list[Any]:
    """Sort key in which layer10 follows layer9: every second piece is a number."""
    pieces = re.split(r"([0-9]+)", name)
    return [(len(x), x) if i % 2 else x for i, x in enumerate(pieces)]


def _part_of(name: str, patterns: dict[Part, str | None]) -> tuple[Part | None, str]:
    pieces = re.split(r"([/.\-]|_?\d+_?)", name)
    for part, pattern in patterns.items():
        if pattern is not None and fnmatchcase(name, pattern):
            return part, _stem(pieces)
    said = [part for piece in pieces for part in PARTS if piece.lower() in _WORDS[part]]
    # The last word tells: "values.3.key" is a key.
    if said and patterns[said[-1]] is None:
        return said[-1], _stem(pieces)
    return None, ""


def _stem(pieces: list[str]) -> str:
    either = _WORDS["k"] | _WORDS["v"]
    return "".join("*" if piece.lower() in either else piece for piece in pieces)


def _listing(names: list[str]) -> str:
    some = ", ".join(name or "''" for name in names[:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"the file has {some or 'no other tensors'}{more}"


class _Stored(NamedTuple):
    """A tensor of a file as the file describes it; `form` names one that is no plain array."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    form: str = ""


def _checked(name: str, part: Part, stem: str, stored: _Stored, layout: str | None) -> KVTensor:
    dtype, shape, read, form = stored
    if dtype.lower() not in ("bf16", "bfloat16"):
        raise UserError(
            f"{name}: the tensor is {dtype}.  Only BF16 is stored: the codec is lossless because "
            "it knows BF16's 8 exponent bits, and a cast would change your cache.  If the model "
            "computes in BF16, save its keys and values before any cast"
        )
    if form:
        raise UserError(f"{name}: the tensor is {form}; save it as a plain (dense, strided) one")
    layout = layout or USUAL_LAYOUTS.get(len(shape))
    if layout is None:
        raise UserError(
            f"{name}: shape {list(shape)} has {len(shape)} axes; three or four are wanted: "
            f"{'; '.join(f'{key} {axes}' for key, axes in LAYOUTS.items())}"
        )
    if len(shape) != len(layout):
        fitting = [key for key in LAYOUTS if len(key) == len(shape)]
        hint = f"; for {len(shape)} axes: {' or '.join(fitting)}" if fitting else ""
        raise UserError(
            f"{name}: shape {list(shape)} has {len(shape)} axes, --layout {layout} means "
            f"{LAYOUTS[layout]}{hint}"
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
    batch, tokens, heads = axis.get("b", 1), axis["t"], axis["h"]
    reading = f"{list(shape)} as {layout}: {tokens} tokens, {heads} KV heads, head_dim {head_dim}"
    if "b" in axis:
        reading += f", batch {batch}"
    if heads > tokens:
        swapped = layout.replace("th", "ht") if "th" in layout else layout.replace("ht", "th")
        reading += f" (more heads than tokens: is it --layout {swapped}?)"
    to_bthd = _TO_BTHD[layout]
    shape = (batch, tokens, heads, head_dim)
    return KVTensor(name, part, stem, lambda: to_bthd(read()), shape, reading)


def _safetensors(path: Path) -> Iterator[tuple[str, _Stored]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                yield name, _Stored(part.get_dtype(), shape, partial(_safetensor, path, name))
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a whole safetensors file (truncated or damaged): {error}"
        ) from None


def _safetensor(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _torch_file(path: Path) -> Iterator[tuple[str, _Stored]]:
    import pickle

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about kinds of tensor refused below
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
    except Exception as error:
        # Damaged bytes make torch's reader raise almost anything, KeyError and OSError included.
        first = str(error).partition("\n")[0]
        reason = f": {first}" if " " in first else ""  # a KeyError's is the key alone
        raise UserError(f"{path}: not a whole torch file (truncated or damaged){reason}") from None
    for name, tensor in _flatten(content, ""):
        dtype, form = str(tensor.dtype).removeprefix("torch."), _form(tensor)
        shape = () if form == "nested" else tuple(tensor.shape)
        yield name, _Stored(dtype, shape, tensor.resolve_neg, form)


def _form(tensor: Tensor) -> str:
    import torch

    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "without values (of torch's meta device)" if tensor.is_meta else ""


def _flatten(content: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    import torch

    if depth > MOST_NESTED:
        raise UserError(f"{name[:60]}...: dicts and lists are nested too deeply, or in a circle")
    if isinstance(content, torch.Tensor):
        yield name or "tensor", content
        return
    if isinstance(content, dict):
        items = [(str(key), value) for key, value in content.items()]
    elif isinstance(content, (list, tuple)):
        # One (key, value) pair a layer is how caches are saved from transformers.
        pair = len(content) == 2 and all(isinstance(x, torch.Tensor) for x in content)
        named = _part_of(name, {"k": None, "v": None})[0]  # two layers of keys, or of values
        labels = PARTS if pair and name and not named else [str(i) for i in range(len(content))]
        items = list(zip(labels, content, strict=True))
    else:
        return
    for label, value in items:
        yield from _flatten(value, f"{name}.{label}" if name else label, depth + 1)
