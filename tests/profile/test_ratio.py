"""``zf-profile ratio``: files of every kind, numbers counted by hand, and what it refuses."""

import collections
import fractions
import json
import math
import os
import re

import bits
import pytest
import torch
from profile_tool import ROOT, SAMPLE, child
from safetensors.torch import save_file

from zf_profile import ratio
from zf_profile.kvfile import open_kv, pairs


def gaussian(*shape):
    return torch.randn(*shape).bfloat16()


def ones(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


@pytest.fixture
def measure(tool, tmp_path):
    """Save tensors, run the command with ``--json -`` and return its document."""

    def run(content, *words, name="kv.safetensors"):
        path = content if isinstance(content, os.PathLike) else tmp_path / name
        if path is not content:
            save = save_file if name.endswith(".safetensors") else torch.save
            save(content, path)
        ran = tool("ratio", path, *words, "--json", "-")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    return run


def counts(document, name):
    """(compressed, exceptions, raw) of a tensor."""
    (record,) = (x for x in document["tensors"] if x["name"] == name)
    return record["compressed"], record["exceptions"], record["raw"]


# ---- the bundled sample --------------------------------------------------------------------------
def test_agrees_with_the_demo_on_the_sample(measure, demo_document):
    document = measure(SAMPLE)
    assert document["totals"] == demo_document["totals"]
    keys = demo_document["tensors"][0].keys()
    assert [{key: x[key] for key in keys} for x in document["tensors"]] == (
        demo_document["tensors"]
    )


def described_blocks():
    """Of the sample's README: for each tensor the compressed blocks, 16 x 32 and RoPE pairs."""
    text = (ROOT / "tools/zf_profile/data/README.md").read_text()
    rows = re.findall(r"^\| (\S+/layer\d+/[kv]) \|[^|]+\| (\d+) of (\d+) \| (\d+) \|", text, re.M)
    return {name: (int(plain), int(pairs)) for name, plain, _, pairs in rows}


def test_the_papers_format_compresses_the_blocks_that_the_samples_readme_says(measure):
    described = described_blocks()
    assert len(described) == 12
    document = measure(SAMPLE, "--max-exceptions", 0)
    for name, (plain, rope_pairs) in described.items():
        compressed, exceptions, raw = counts(document, name)
        assert compressed == (rope_pairs if name.endswith("k") else plain), name
        assert exceptions == 0
        assert raw == (192 if name.startswith("smollm2") else 256) - compressed


# ---- files ---------------------------------------------------------------------------------------
def test_layouts_and_containers_hold_the_same_values(measure):
    k, v = gaussian(48, 2, 64), gaussian(48, 2, 64)
    k[3, 1, 5] = 0
    wanted = measure({"k": k, "v": v})
    assert counts(wanted, "k")[1] >= 1
    htd = {name: x.transpose(0, 1) for name, x in (("k", k), ("v", v))}
    forms = [
        ({n: x.contiguous() for n, x in htd.items()}, ("--layout", "htd"), "htd.safetensors"),
        ({n: x.contiguous()[None] for n, x in htd.items()}, ("--layout", "bhtd"), "b.safetensors"),
        ({"k": k, "v": v}, (), "dict.pt"),
        ({"k": k, "v": v}, (), "UPPER.PT"),
        (htd, ("--layout", "htd"), "strided.pth"),
        ({"cache": {"layer": {"key": k, "value": v}}}, (), "nested.bin"),
        ([(k, v)], (), "pairs.pt"),
        ([{"key_states": torch.nn.Parameter(k), "value_states": v}], (), "parameter.pt"),
    ]
    for content, words, name in forms:
        document = measure(content, *words, name=name)
        assert document["totals"] == wanted["totals"], name
        for a, b in zip(document["tensors"], wanted["tensors"], strict=True):
            assert {**a, "name": ""} == {**b, "name": ""}, name


def test_batches_count_each_sequence(measure):
    """Two sequences of 20 tokens are two full and two partly filled pages."""
    document = measure({"k": ones(2, 1, 20, 64), "v": ones(2, 1, 20, 64)}, "--layout", "bhtd")
    assert counts(document, "k") == (4, 0, 4)


def test_usual_names_of_layers(measure):
    names = [
        "model.layers.2.self_attn.k_cache",
        "model.layers.10.self_attn.k_cache",
        "model.layers.2.self_attn.v_cache",
        "model.layers.10.self_attn.v_cache",
    ]
    document = measure({name: gaussian(16, 1, 64) for name in [*names, "model.embed", "kv", "q"]})
    assert [x["name"] for x in document["tensors"]] == [
        names[0],
        names[2],
        names[1],
        names[3],
    ], "layer 2 comes before layer 10"


def test_globs_choose_and_pair_by_order(measure):
    content = {name: gaussian(16, 1, 64) for name in ("a0", "a1", "b0", "b1", "k", "v")}
    document = measure(content, "--k", "a*", "--v", "b?")
    assert [x["name"] for x in document["tensors"]] == ["a0", "a1", "b0", "b1"]
    assert document["totals"]["stored_ratio"] is not None
    assert [x["name"] for x in measure(content, "--k", "a0")["tensors"]] == ["a0", "v"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"k": (16, 1, 64)}, "1 K and 0 V tensors cannot be paired into pages"),
        ({"k": (16, 1, 64), "v": (32, 1, 64)}, "k and v differ in shape, so they make no pages"),
        ({"k": (16, 1, 64), "v": (16, 1, 128)}, "k and v differ in shape, so they make no pages"),
        ({"0/k": (16, 1, 64), "0/v": (16, 1, 64), "1/k": (16, 1, 64)}, "2 K and 1 V tensors"),
    ],
)
def test_unpaired_tensors_have_no_aligned_ratio(measure, content, reason):
    document = measure({name: gaussian(*shape) for name, shape in content.items()})
    assert document["totals"]["stored_ratio"] is None
    assert reason in document["totals"]["stored_ratio_reason"]
    assert document["totals"]["ratio"] > 0.7
    assert len(document["tensors"]) == len(content)


def test_pairs_are_of_the_same_layer(tmp_path):
    """Twice the same stem among the keys must not give one V to two of them."""
    path = tmp_path / "kv.safetensors"
    save_file({name: gaussian(16, 1, 64) for name in ("a/k", "a/key", "a/v", "b/v")}, path)
    matched, _ = pairs(open_kv(path, "thd", {"k": None, "v": None})[0])
    assert sorted(v.name for _, v in matched) == ["a/v", "b/v"]
    names = ["l10/v", "l9/v", "l10/k", "l9/k", "l9/w"]
    save_file({name: gaussian(16, 1, 64) for name in names}, path)
    matched, _ = pairs(open_kv(path, "thd", {"k": None, "v": None})[0])
    assert [(k.name, v.name) for k, v in matched] == [("l9/k", "l9/v"), ("l10/k", "l10/v")]


# ---- numbers -------------------------------------------------------------------------------------
def test_partial_pages_by_hand(measure):
    """20 tokens, 2 heads of 64: a page of 2 x 2 blocks compressed, and one of as many raw."""
    document = measure({"k": ones(20, 2, 64), "v": ones(20, 2, 64)})
    sealed, raw = 4 * 768 + 2 * 8, 4 * 1024 + 2 * 8
    for record in document["tensors"]:
        assert (record["blocks"], record["compressed"], record["raw"]) == (8, 4, 4)
        assert record["bits_per_value"] == (sealed + raw) * 8 / 4096
        assert record["exponent_histogram"] == {"127": 2048}, "of the full page alone"
    totals = document["totals"]
    assert totals["ratio"] == (sealed + raw) / 8192
    # K and V of both heads in one span: 6176 and 8224 bytes, each to the next multiple of 128.
    assert (2 * sealed, 2 * raw) == (6176, 8224)
    assert totals["stored_ratio"] == (6272 + 8320) / 16384


def test_fewer_tokens_than_a_page(measure, tool, tmp_path):
    document = measure({"k": ones(5, 1, 64), "v": ones(5, 1, 64)}, "--page-size", 32)
    for record in document["tensors"]:
        assert (record["blocks"], record["raw"]) == (4, 4)
        assert record["exponent_entropy_bits"] is None
        assert record["entropy_bound_bits_per_value"] is None
        assert record["exponent_histogram"] == {}
    assert document["totals"]["ratio"] == (4 * 1024 + 8) / 4096
    assert document["totals"]["bitwise_equal"] is True
    ran = tool("ratio", tmp_path / "kv.safetensors", "--page-size", 32)
    assert ran.code == 0
    assert ran.err.splitlines()[1:] == [
        "note: 2 sequences end in a partly filled page of 32 tokens, which stays raw: 8 of the raw "
        "blocks",
        "note: no full page of 32 tokens: nothing was sealed, so this says nothing about "
        "compression",
    ]


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shapes_by_hand(measure, head_dim, page_size):
    """Constant values compress to 768 bytes a block; metadata and alignment by FORMAT.md."""
    heads, pages = 3, 2
    tokens = pages * page_size
    content = {"k": ones(tokens, heads, head_dim), "v": ones(tokens, heads, head_dim)}
    document = measure(content, "--page-size", page_size)
    blocks = page_size * head_dim // 512
    metadata = -(-2 * (4 + max(4, blocks)) // 16) * 16
    assert counts(document, "k") == (blocks * heads * pages, 0, 0)
    values = tokens * heads * head_dim
    used = pages * heads * (2 * blocks * 768 + metadata)
    totals = document["totals"]
    assert totals["ratio"] == pytest.approx(used / (4 * values))
    per_span = 3 if 3 * (metadata + 2 * blocks * 1024) <= 69632 else 1
    span = per_span * (metadata + 2 * blocks * 768)
    stored = pages * (heads // per_span) * -(-span // 128) * 128
    assert totals["stored_ratio"] == pytest.approx(stored / (4 * values))
    assert document["format"] == {"page_size": page_size, "rope": "half", "max_exceptions": 4}


def test_rope_styles_put_other_dims_in_a_block(measure):
    """Scales that differ by tile of 16 dims, alike for dims that are rotated together."""
    half = torch.tensor([1.0, 2.0**20, 2.0**40, 2.0**60]).repeat_interleave(16).repeat(2)
    interleaved = torch.tensor([1.0, 2.0**20, 2.0**40, 2.0**60]).repeat_interleave(32)
    signs = torch.randn(64, 2, 128).sign()
    found = {}
    for style, scale in (("half", half), ("interleaved", interleaved)):
        content = {part: (signs * scale).bfloat16() for part in "kv"}
        for option in ("half", "interleaved"):
            document = measure(content, "--rope", option)
            found[style, option] = counts(document, "k")
            neighbours = (32, 0, 0) if style == "interleaved" else (0, 0, 32)
            assert counts(document, "v") == neighbours, "V blocks do not depend on --rope"
    assert found["half", "half"] == found["interleaved", "interleaved"] == (32, 0, 0)
    assert found["half", "interleaved"] == found["interleaved", "half"] == (0, 0, 32)


def test_max_exceptions(measure):
    """Blocks of 0, 1, 2, 3, 4 and 5 values outside; each head of 64 x 16 has two blocks."""
    k = ones(16, 3, 64)
    # Dims 0..15 and 32..47 share a block, and 16..31 and 48..63.
    for head, first, number in ((0, 16, 1), (1, 0, 2), (1, 16, 3), (2, 0, 4), (2, 16, 5)):
        k[:number, head, first] = 2.0**90
    for limit in range(5):
        document = measure({"k": k}, "--max-exceptions", limit)
        assert counts(document, "k") == (1, limit, 5 - limit)
        (record,) = document["tensors"]
        assert record["blocks_by_values_outside_window"] == {
            "0": 1,
            "1": 1,
            "2": 1,
            "3": 1,
            "4": 1,
            "more": 1,
        }
        assert record["blocks_outside_for_zeros_only"] == 0


def test_why_blocks_fail(measure):
    """Zeros alone, an outlier alone, both, a channel of zeros, and a block of nothing else."""
    k = ones(16, 3, 64)
    k[0, 0, 0] = 0
    k[0, 0, 16] = 2.0**90
    k[0, 1, 0], k[1, 1, 0] = -0.0, 2.0**90
    k[:, 1, 16] = 0
    k[:, 2, :16] = k[:, 2, 32:48] = 0
    document = measure({"k": k})
    (record,) = document["tensors"]
    assert counts(document, "k") == (2, 3, 1)
    assert record["blocks_by_values_outside_window"] == {
        "0": 2,
        "1": 2,
        "2": 1,
        "3": 0,
        "4": 0,
        "more": 1,
    }
    assert record["blocks_outside_for_zeros_only"] == 2
    assert record["exact_zeros"] == 1 + 1 + 16 + 512


def test_exponents_against_an_independent_count(measure):
    k = bits.mixed_values((64, 2, 128), seed=3)
    document = measure({"k": k})
    (record,) = document["tensors"]
    assert record["raw"] > 0
    patterns = bits.to_patterns(k).reshape(-1).tolist()
    found = collections.Counter(x >> 7 & 255 for x in patterns)
    assert record["exponent_histogram"] == {str(e): found[e] for e in sorted(found)}
    n = len(patterns)
    entropy = sum(c / n * math.log2(n / c) for c in found.values())
    assert record["exponent_entropy_bits"] == pytest.approx(entropy)
    assert record["entropy_bound_bits_per_value"] == pytest.approx(8 + entropy)
    assert record["exact_zeros"] == sum(x & 0x7FFF == 0 for x in patterns)


def test_chunks_make_no_difference(measure, monkeypatch):
    k, v = bits.mixed_values((2, 80, 2, 64), seed=5), bits.mixed_values((2, 80, 2, 64), seed=6)
    content = {"k": k.transpose(1, 2).contiguous(), "v": v.transpose(1, 2).contiguous()}
    wanted = measure(content, "--layout", "bhtd")
    monkeypatch.setattr(ratio, "_VALUES_AT_ONCE", 2048 * 2)
    assert measure(content, "--layout", "bhtd")["tensors"] == wanted["tensors"]


def test_every_bit_pattern_comes_back(measure):
    k = bits.from_patterns(torch.randperm(65536)).view(64, 8, 128)
    document = measure({"k": k})
    assert document["totals"]["bitwise_equal"] is True
    assert document["totals"]["raw"] == 128


def test_a_wrong_bit_is_a_no(tool, tmp_path, monkeypatch):
    from zf_cute import reference

    decode = reference.decode_blocks

    def wrong(*args):
        found = decode(*args)
        found[-1, 100] ^= 1
        return found

    monkeypatch.setattr(reference, "decode_blocks", wrong)
    save_file({"k": gaussian(16, 1, 64)}, tmp_path / "k.safetensors")
    ran = tool("ratio", tmp_path / "k.safetensors", "--json", tmp_path / "k.json")
    assert ran.code == 1
    assert "NO" in ran.out
    assert json.loads((tmp_path / "k.json").read_text())["totals"]["bitwise_equal"] is False


# ---- names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "stem",
    ["[red]", "[/nope]", ":smile:", "é漢字", "x" * 300, "²", "a1²2", "1" * 5000, "a b\tc"],
)
def test_any_name_is_shown_as_it_is(tool, tmp_path, monkeypatch, stem):
    """Neither rich's markup nor its emoji, nor numbers that int() refuses."""
    monkeypatch.setenv("COLUMNS", "6000")
    content = {f"{stem}/k": ones(16, 1, 64), f"{stem}/v": ones(16, 1, 64)}
    save_file(content, tmp_path / "kv.safetensors")
    ran = tool("ratio", tmp_path / "kv.safetensors")
    assert ran.code == 0
    shown = stem.replace("\t", "\\t")
    assert ran.err.startswith(f"note: {shown}/k and 1 more: [16, 1, 64] as thd")
    assert ran.out.count(f"{shown}/k ") == ran.out.count(f"{shown}/v ") == 2
    assert "with spans aligned" in ran.out


def test_a_name_cannot_send_escape_codes(tool, tmp_path):
    path = tmp_path / "\x1b[31m[bold]é.pt"
    torch.save({"\x1b[2J\n/k": ones(16, 1, 64), "\ud800/v": ones(32, 1, 64)}, path)
    ran = tool("ratio", path)
    assert ran.code == 0
    assert "\x1b" not in ran.out + ran.err
    assert "\\x1b[2J\\n/k" in ran.out
    assert "\\ud800/v" in ran.out
    torch.save({"\x1b[2J": ones(16, 1, 64)}, path)
    ran = tool("ratio", path)
    assert (ran.code, ran.out) == (2, "")
    assert "\\x1b[31m[bold]é.pt: no tensor is named like keys or values" in ran.err
    assert "\x1b" not in ran.err


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


# ---- how a file is read ------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_lists_of_layers(measure, layers):
    """Two layers of keys are not the keys and the values of one."""
    make = torch.Generator().manual_seed(layers)
    cache = {
        name: [torch.randn(32, 2, 64, generator=make).bfloat16() for _ in range(layers)]
        for name in ("key_cache", "value_cache")
    }
    document = measure(cache, name="kv.pt")
    names = [record["name"] for record in document["tensors"]]
    want = [f"{name}.{i}" for name in ("key_cache", "value_cache") for i in range(layers)]
    assert names == want
    assert document["totals"]["stored_ratio"] is not None


def test_axes_tell_the_layout(measure):
    """Three axes are thd, four bhtd: what people save most."""
    x = torch.randn(2, 3, 48, 64).bfloat16()  # [batch, heads, tokens, dim]
    four = measure({"k": x, "v": x.clone()})
    assert four["totals"]["blocks"] == 2 * 2 * 3 * 48 * 64 // 512
    swapped = x.transpose(1, 2).contiguous()
    same = measure({"k": swapped, "v": swapped.clone()}, "--layout", "bthd")
    assert same["totals"] == four["totals"]


def test_a_swapped_layout_is_asked_about(tool, tmp_path):
    """More heads than tokens is a wrong order of axes more often than a model."""
    save_file({part: ones(8, 100, 64) for part in "kv"}, tmp_path / "kv.safetensors")
    ran = tool("ratio", tmp_path / "kv.safetensors")
    assert "8 tokens, 100 KV heads" in ran.err
    assert "(more heads than tokens: is it --layout htd?)" in ran.err
    assert "nothing was sealed" in ran.err
    ran = tool("ratio", tmp_path / "kv.safetensors", "--layout", "htd")
    assert "?" not in ran.err


def test_keys_without_values_are_said(tool, tmp_path):
    save_file({"k": ones(16, 2, 64)}, tmp_path / "kv.safetensors")
    ran = tool("ratio", tmp_path / "kv.safetensors")
    assert "note: no V tensors found (--v 'GLOB' names them)\n" in ran.err


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_no_number_is_cut(tool, monkeypatch, columns):
    """Where a table does not fit, its rows are printed as lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = tool("ratio", SAMPLE)
    assert "…" not in ran.out
    flat = re.sub(r"\s+", " ", ran.out)
    for name in ("qwen2.5-coder-1.5b/layer14/v", "smollm2-135m/layer0/k"):
        assert flat.count(name) == 2
    for number in ("12.051", "12.058", "0.7586", "107-135", "10.65"):
        assert number in flat


def test_bars_in_ascii():
    """A stream that has no block characters gets others, not question marks."""
    ran = child("ratio", SAMPLE, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.code == 0
    assert "?" not in ran.out
    assert "#" in ran.out
