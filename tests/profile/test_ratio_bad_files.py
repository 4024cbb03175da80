"""``zf-profile ratio``: what it refuses, each with one message and exit code 2."""

import collections
import fractions
import os

import pytest
import torch
from profile_tool import SAMPLE, child, gaussian, ones
from safetensors.torch import save_file


# ---- bad input -----------------------------------------------------------------------------------
def in_a_circle():
    content = [gaussian(16, 1, 64)]
    content.append(content)
    return content


K = (32, 2, 64)


def dense(dtype):
    return {"k": torch.zeros(K, dtype=dtype)}


ONLY_BF16 = "Only BF16 is stored: the codec is lossless because it knows BF16's 8 exponent bits"
# Name of the file, what is in it (tensors, bytes, or a function of the path), part of the message.
FILES = {
    "missing": ("x.pt", None, "x.pt: no such file"),
    "folder": ("x.pt", os.mkdir, "x.pt: not a file"),
    "empty": ("x.safetensors", b"", "the file is empty"),
    "long name": ("x" * 300 + ".pt", None, "File name too long"),
    "in a file": ("x.pt/y.pt", None, "no such file"),
    "suffix": ("x.npz", b"PK", "not a .safetensors, .pt, .pth, .bin file; save the tensors"),
    "no suffix": ("x", b"PK", "not a .safetensors, .pt, .pth, .bin file"),
    "garbage safetensors": ("x.safetensors", b"\xff\x00garbage" * 50, "truncated or damaged"),
    "text safetensors": ("x.safetensors", b"not tensors, text\n" * 9, "truncated or damaged"),
    "tiny safetensors": ("x.safetensors", b"\x02", "truncated or damaged"),
    "huge header": (
        "x.safetensors",
        (1 << 62).to_bytes(8, "little") + b"{}",
        "header too large",
    ),
    "long header": (
        "x.safetensors",
        (90_000_000).to_bytes(8, "little") + b"{}" * 9,
        "truncated or damaged",
    ),
    "no tensors": ("x.safetensors", (2).to_bytes(8, "little") + b"{}", "holds no tensors"),
    "text torch": ("x.pt", b"not tensors, text\n" * 9, "damaged"),
    "byte torch": ("x.pt", b"\x80", "damaged"),
    "custom object": (
        "x.pt",
        {"k": fractions.Fraction(1, 2)},
        "holds something other than tensors in dicts, lists and tuples, or is damaged",
    ),
    "numbers": ("x.pt", {"k": 3, "v": [1.5, "x", None]}, "holds no tensors"),
    "circle": ("x.pt", in_a_circle, "nested too deeply, or in a circle"),
    "twice": (
        "x.pt",
        {"a": {"k": ones(*K)}, "a.k": ones(*K)},
        "two tensors go by the name a.k; rename one",
    ),
    "fp16": ("x.safetensors", dense(torch.float16), f"k: the tensor is F16.  {ONLY_BF16}"),
    "fp32": ("x.safetensors", dense(torch.float32), f"k: the tensor is F32.  {ONLY_BF16}"),
    "fp8": ("x.safetensors", dense(torch.float8_e4m3fn), f"is F8_E4M3.  {ONLY_BF16}"),
    "fp16 torch": ("x.pt", dense(torch.float16), f"k: the tensor is float16.  {ONLY_BF16}"),
    "complex": ("x.pt", dense(torch.complex64), f"the tensor is complex64.  {ONLY_BF16}"),
    "int": ("x.pt", dense(torch.int16), f"the tensor is int16.  {ONLY_BF16}"),
    "sparse": (
        "x.pt",
        lambda: {"k": gaussian(*K).to_sparse()},
        "k: the tensor is sparse_coo; save it as a plain (dense, strided) one",
    ),
    "meta": (
        "x.pt",
        {"k": torch.empty(K, dtype=torch.bfloat16, device="meta")},
        "k: the tensor is without values",
    ),
    "rank 2": ("x.safetensors", {"k": ones(32, 64)}, "shape [32, 64] has 2 axes; three"),
    "rank 5": ("x.safetensors", {"k": ones(1, 1, 2, 32, 64)}, "three or four are wanted"),
    "rank 0": ("x.safetensors", {"k": ones()}, "shape [] has 0 axes"),
    "head_dim 96": ("x.safetensors", {"k": ones(32, 2, 96)}, "is not one of 64, 128, 256"),
    "head_dim 20": (
        "x.safetensors",
        {"k": ones(32, 2, 20)},
        "head_dim 20 (last axis of --layout thd) is not a multiple of 16, not one of 64, 128, 256",
    ),
    "no tokens": ("x.safetensors", {"k": ones(0, 2, 64)}, "shape [0, 2, 64] holds no values"),
    "no heads": ("x.pt", {"k": ones(32, 0, 64)}, "shape [32, 0, 64] holds no values"),
    "no names": (
        "x.safetensors",
        {"a": ones(*K), "": ones(*K)},
        "no tensor is named like keys or values; the file has '', a.  Say which are with --k",
    ),
    "one of several": (
        "x.safetensors",
        {"0/k": ones(*K), "1/k": ones(*K).half()},
        "1/k: the tensor is F16",
    ),
}


def refused(ran, folder, *messages):
    """One message, exit code 2, nothing on stdout, no file of ours left."""
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("zf-profile ratio: error: ")
    assert len(ran.err.splitlines()) == 1
    for message in messages:
        assert message in ran.err
    assert not (folder / "document.json").exists()
    assert not list(folder.glob(".zf-profile*"))


@pytest.mark.parametrize("case", FILES)
def test_bad_files(tool, tmp_path, case):
    name, content, message = FILES[case]
    path = tmp_path / name
    if content is os.mkdir:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content = content() if callable(content) else content
        (save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    refused(tool("ratio", path, "--json", tmp_path / "document.json"), tmp_path, message)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_cut_anywhere(tool, tmp_path, zipped):
    path, parts = tmp_path / "x.pt", {"k": gaussian(16, 1, 64), "v": gaussian(16, 1, 64)}
    torch.save(parts, path, _use_new_zipfile_serialization=zipped)
    assert tool("ratio", path).code == 0
    whole = path.read_bytes()
    for size in (1, 2, 4, 10, 100, 500, 1000, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        ran = tool("ratio", path, "--json", tmp_path / "document.json")
        refused(ran, tmp_path, "x.pt: ", "damaged")


def test_a_damaged_torch_file(tool, tmp_path):
    """Whatever torch's reader raises, it is one message; a flip in the values is not detectable."""
    path = tmp_path / "x.pt"
    torch.save({"k": gaussian(16, 1, 64)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    codes = collections.Counter()
    for at in range(0, len(whole) - 2100, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        ran = tool("ratio", path)
        codes[ran.code] += 1
        if ran.code:
            refused(ran, tmp_path)
    assert codes.keys() == {0, 2}
    assert codes[2] > 50


def test_a_safetensors_file_cut_anywhere(tool, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"k": gaussian(16, 1, 64)}, path)
    whole = path.read_bytes()
    for size in (1, 7, 8, 9, 60, 500, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(tool("ratio", path), tmp_path, "x.safetensors: not a whole safetensors file")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["quantized", "nested"])
def test_tensors_that_are_no_arrays(tool, tmp_path, kind):
    """Torch warns of both when it reads them; the message alone is shown."""
    if kind == "quantized":
        tensor = torch.quantize_per_tensor(torch.randn(K), 0.1, 0, torch.qint8)
    else:
        tensor = torch.nested.nested_tensor([gaussian(16, 64), gaussian(32, 64)])
    torch.save({"k": tensor}, tmp_path / "x.pt")
    # In a process of its own: pytest would take the warnings from stderr.
    message = {"quantized": f"qint8.  {ONLY_BF16}", "nested": "k: the tensor is nested"}[kind]
    refused(child("ratio", tmp_path / "x.pt"), tmp_path, message)


def test_strides_and_views_are_read_as_they_are(measure):
    k = gaussian(2, 32, 64).transpose(0, 1)
    v = gaussian(1, 1, 64).expand(32, 2, 64)
    plain = measure({"k": k.contiguous(), "v": v.contiguous()}, name="plain.pt")
    strided = measure({"k": k, "v": v}, name="strided.pt")
    assert strided["tensors"] == plain["tensors"]
    negated = measure({"k": torch._neg_view(k.contiguous()), "v": v}, name="negated.pt")
    assert negated["tensors"] == plain["tensors"], "signs change no exponent"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--k", "nothing*"), "--k nothing*: no tensor matches; the file has k"),
        (("--v", "V"), "--v V: no tensor matches; the file has v"),
        (("--k", ""), "--k : no tensor matches"),
        (("--k", "["), "--k [: no tensor matches"),
    ],
)
def test_globs_that_match_nothing(tool, tmp_path, words, message):
    save_file({"k": ones(*K), "v": ones(*K)}, tmp_path / "x.safetensors")
    refused(tool("ratio", tmp_path / "x.safetensors", *words), tmp_path, message)


@pytest.mark.parametrize(
    "words",
    [
        ("--layout", "dth"),
        ("--rope", "full"),
        ("--page-size", "8"),
        ("--max-exceptions", "-1"),
    ],
)
def test_options_outside_their_choices(tool, tmp_path, words):
    ran = tool("ratio", SAMPLE, *words, "--json", tmp_path / "document.json")
    assert (ran.code, ran.out) == (2, "")
    assert f"argument {words[0]}: " in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_a_file_without_permission(tool, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"k": ones(*K)}, path)
    path.chmod(0)
    refused(tool("ratio", path), tmp_path, "x.safetensors: Permission denied")
