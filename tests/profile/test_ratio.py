"""``zf-profile ratio``: files of every kind, and numbers counted by hand."""

import collections
import json
import math
import re

import bits
import pytest
import torch
from profile_tool import ROOT, SAMPLE, gaussian, ones
from safetensors.torch import save_file

from zf_profile import ratio
from zf_profile.kvfile import open_kv, pairs


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
