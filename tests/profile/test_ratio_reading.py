"""``zf-profile ratio``: how names and axes are read, and how results are shown."""

import re

import pytest
import torch
from profile_tool import SAMPLE, child, ones
from safetensors.torch import save_file


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
