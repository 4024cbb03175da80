"""``zf-profile demo``: its document, its arithmetic, its table, and when the answer is no."""

import json
import math
import re

import pytest
import torch
from profile_tool import SAMPLE
from safetensors import safe_open

import zf_cute
from zf_profile import demo

# Parameter counts, layers, KV heads and head_dim as in the models' published configurations.
MODELS = {
    "Llama 3.1 8B": (8_030_261_248, 32, 8, 128),
    "Qwen3 8B": (8_190_735_360, 36, 8, 128),
}
LAYERS = [
    *(f"qwen2.5-coder-1.5b/layer{n}" for n in (0, 7, 14, 23)),
    *(f"smollm2-135m/layer{n}" for n in (0, 15)),
]
TENSORS = [f"{layer}/{part}" for layer in LAYERS for part in "kv"]


def test_document_has_the_fields_of_its_schema(demo_document):
    assert demo_document["schema"] == "zf-profile/1"
    assert {"schema", "env", "tensors", "totals", "attention", "capacity"} <= demo_document.keys()
    env = demo_document["env"]
    assert {"python", "torch", "zf_cute", "dsl", "gpu", "git"} <= env.keys()
    assert env["torch"].split("+")[0] == torch.__version__.split("+")[0]
    for tensor in demo_document["tensors"]:
        assert tensor.keys() == {
            "name",
            "blocks",
            "compressed",
            "exceptions",
            "raw",
            "bits_per_value",
            "bitwise_equal",
        }
    assert {"ratio", "stored_ratio", "bits_per_value", "bitwise_equal"} <= (
        demo_document["totals"].keys()
    )
    for entry in demo_document["attention"]:
        assert {"name", "max_abs_err", "bf16_torch_max_abs_err", "ok"} <= entry.keys()


def test_every_tensor_of_the_sample_comes_back(demo_document):
    assert [tensor["name"] for tensor in demo_document["tensors"]] == TENSORS
    with safe_open(SAMPLE, framework="pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in TENSORS}
    for tensor in demo_document["tensors"]:
        assert tensor["bitwise_equal"] is True
        assert tensor["raw"] == 0
        assert tensor["blocks"] == sizes[tensor["name"]] // 512
        assert tensor["compressed"] + tensor["exceptions"] == tensor["blocks"]


def test_bits_per_value_by_hand(demo_document):
    """768 and 784 bytes a block, and 8 bytes of metadata for each head's K or V of a page."""
    stored = values = 0
    for tensor in demo_document["tensors"]:
        head_dim = 128 if tensor["name"].startswith("qwen") else 64
        parts = tensor["blocks"] // (16 * head_dim // 512)
        size = tensor["compressed"] * 768 + tensor["exceptions"] * 784 + parts * 8
        assert tensor["bits_per_value"] == pytest.approx(size * 8 / (tensor["blocks"] * 512))
        stored += size
        values += tensor["blocks"] * 512
    totals = demo_document["totals"]
    assert totals["ratio"] == pytest.approx(stored / (2 * values))
    assert totals["bits_per_value"] == pytest.approx(stored * 8 / values)


def test_totals(demo_document):
    totals = demo_document["totals"]
    assert totals["bitwise_equal"] is True
    assert totals["raw"] == 0
    assert totals["ratio"] <= 0.755
    assert round(totals["ratio"], 4) == 0.7536
    assert totals["ratio"] < totals["stored_ratio"] < totals["ratio"] + 128 / 25_000
    for key in ("blocks", "compressed", "exceptions"):
        assert totals[key] == sum(tensor[key] for tensor in demo_document["tensors"])


def test_attention_is_within_its_bound(demo_document):
    assert [entry["name"] for entry in demo_document["attention"]] == LAYERS
    for entry in demo_document["attention"]:
        assert entry["ok"] is True
        assert entry["requests"] == 64
        # Twice BF16 torch and an ulp of the largest output, which is at most 2^-7 of it.
        assert 0 < entry["max_abs_err"] <= entry["bound"]
        assert 0 < entry["bf16_torch_max_abs_err"] < entry["bound"]


def test_bf16_error_is_that_of_torch(demo_document, real_kv):
    """The bar is not the tool's own: query 63 of one layer, by torch's attention in BF16."""
    name = LAYERS[4]
    k, v, q = (real_kv[f"{name}/{part}"] for part in "kvq")
    got = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q[63:], k, v)), enable_gqa=True
    )
    exact = demo._dense(q[63:], k, v, torch.tensor([512]), torch.float64)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1)[None] for x in (q[63:], k, v)), enable_gqa=True
    )
    torch.testing.assert_close(exact[0], wanted[0, :, 0])
    (entry,) = (x for x in demo_document["attention"] if x["name"] == name)
    error = (got[0, :, 0].double() - exact[0]).abs().max()
    assert error < 4 * entry["bf16_torch_max_abs_err"]


def test_capacity_arithmetic(demo_document):
    capacity = demo_document["capacity"]
    assert (capacity["prefix_tokens"], capacity["new_tokens"]) == (8192, 256)
    assert capacity["memory_fraction"] == 0.8
    # 8 heads of 128 dims, 16 tokens: one span of 16 metadata bytes and 8 raw blocks a head, and
    # its 8 bytes in the place table; raw_ratio counts the home's padding to 128 too.
    page = 2 * 2 * 8 * 16 * 128
    assert capacity["raw_ratio"] == (-(-8 * (16 + 8 * 1024) // 128) * 128 + 8) / page
    assert 0.75 < capacity["sealed_ratio"] < 0.755
    cases = {(case["model"], case["gpu_bytes"]): case for case in capacity["cases"]}
    assert cases.keys() == {(model, gb * 10**9) for model in MODELS for gb in (80, 141)}
    for (model, gpu_bytes), case in cases.items():
        parameters, layers, heads, head_dim = MODELS[model]
        token_bytes = 2 * layers * heads * head_dim * 2
        budget = 0.8 * gpu_bytes - 2 * parameters
        assert case["weight_bytes"] == 2 * parameters
        assert case["budget_bytes"] == pytest.approx(budget)
        needs = {
            "uncompressed": 8448 * token_bytes,
            "compressed": token_bytes
            * (8192 * capacity["sealed_ratio"] + 256 * capacity["raw_ratio"]),
        }
        for side, need in needs.items():
            assert case[side]["bytes_per_request"] == pytest.approx(need)
            assert case[side]["requests"] == math.floor(budget / need)
            assert case[side]["tokens"] == pytest.approx(budget / need * 8448)
        assert case["token_gain"] == pytest.approx(needs["uncompressed"] / needs["compressed"])
        assert case["token_gain"] > 1.3
    for number in ("8192", "256", "0.8", f"{capacity['sealed_ratio']:.4f}"):
        assert number in capacity["formula"]


def test_sealed_ratio_of_eight_heads(demo_document, real_kv):
    """Counted again from the sample: pages of the four Qwen layers side by side."""
    layers = [name for name in LAYERS if name.startswith("qwen")]
    store = zf_cute.PageStore(zf_cute.KVShape(1, 8, 8, 128), 32)
    k, v = (torch.cat([real_kv[f"{name}/{part}"] for name in layers], 1) for part in "kv")
    store.append(0, k, v, torch.arange(512))
    lengths = store.seal(0, range(32))
    assert store.shape.layout.spans == 1
    stored = sum(-(-n // 128) * 128 + 8 for n in lengths.tolist())
    sealed = demo_document["capacity"]["sealed_ratio"]
    assert sealed == pytest.approx(stored / (2 * (k.numel() + v.numel())))


def test_one_wrong_bit_is_a_no(tool, monkeypatch, tmp_path):
    """The table comes beside the file, and both say which tensor it is."""
    read = zf_cute.PageStore.read

    def flipped(store, layer, pages):
        k, v = read(store, layer, pages)
        if (store.shape.head_dim, layer) == (64, 1):
            v.view(torch.int16)[5, 1, 7] ^= 1
        return k, v

    monkeypatch.setattr(zf_cute.PageStore, "read", flipped)
    ran = tool("demo", "--json", tmp_path / "demo.json")
    assert (ran.code, ran.err) == (1, "")
    document = json.loads((tmp_path / "demo.json").read_text())
    wrong = [x["name"] for x in document["tensors"] if not x["bitwise_equal"]]
    assert wrong == ["smollm2-135m/layer15/v"]
    assert document["totals"]["bitwise_equal"] is False
    for name in (*TENSORS, "Llama 3.1 8B", "Qwen3 8B", "80 GB", "141 GB", "0.7536"):
        assert name in ran.out
    (row,) = (line for line in ran.out.splitlines() if "smollm2-135m/layer15/v" in line)
    assert "NO" in row
    (row,) = (line for line in ran.out.splitlines() if "smollm2-135m/layer15/k" in line)
    assert "yes" in row


@pytest.mark.parametrize("wrong", [10.0, float("nan")])
def test_an_attention_error_above_the_bound_is_a_no(tool, monkeypatch, tmp_path, wrong):
    """NaN too, which is above no bound and which JSON cannot say."""
    run = zf_cute.BatchAttention.run

    def off(attention, q, kv, **options):
        out = run(attention, q, kv, **options)
        if q.shape[2] == 128:  # the Qwen layers
            out[3, 2, 1] += wrong
        return out

    monkeypatch.setattr(zf_cute.BatchAttention, "run", off)
    ran = tool("demo", "--json", tmp_path / "demo.json")
    assert (ran.code, ran.err) == (1, "")
    document = json.loads((tmp_path / "demo.json").read_text())
    assert document["totals"]["bitwise_equal"] is True
    ok = {entry["name"]: entry["ok"] for entry in document["attention"]}
    assert ok == {name: name.startswith("smollm2") for name in LAYERS}
    error = document["attention"][0]["max_abs_err"]
    assert error is None if math.isnan(wrong) else error == pytest.approx(wrong, rel=0.01)
    assert ran.out.count("NO") == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(tool, tmp_path):
    ran = tool("demo", "--device", "cuda", "--json", tmp_path / "demo.json")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("zf-profile demo: error: --device cuda: torch finds no usable GPU")
    assert len(ran.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_commit_is_named(monkeypatch):
    """From the checkout, or by the environment where the files are a copy without history."""
    from zf_profile import environment

    monkeypatch.delenv("ZF_COMMIT", raising=False)
    found = environment.git_commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)
    monkeypatch.setenv("ZF_COMMIT", "0123abc")
    assert environment.git_commit() == "0123abc"
