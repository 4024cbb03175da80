"""What ``bench`` fills pages with."""

import pytest
import torch
from bench_stand_in import TINY, TINY_128, TINY_256, StandIn

from zf_cute import KVShape
from zf_profile import contents, sample
from zf_profile.bed import Bed
from zf_profile.bench_cases import Case

CPU = torch.device("cpu")
CASES = (TINY, TINY_128, TINY_256)


def bits(x):
    return x.view(torch.int16)


@pytest.mark.parametrize("kv", ["real", "gaussian", "uniform"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shape_and_seed(case, kv):
    k, v = contents.make(case, kv, 1, CPU)
    shape = case.shape
    for x in (k, v):
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape == (case.tokens, shape.num_kv_heads, shape.head_dim)
    assert not torch.equal(bits(k), bits(v))
    again = contents.make(case, kv, 1, CPU)
    assert torch.equal(bits(k), bits(again[0]))
    other = contents.make(case, kv, 2, CPU)
    assert torch.equal(bits(k), bits(other[0])) == (kv == "real")


def test_uniform_bits_are_all_bits():
    k, _ = contents.make(TINY_128, "uniform", 0, CPU)
    assert len(bits(k).unique()) > 0.4 * k.numel()
    assert k.isnan().any()


def test_real_heads_and_tokens_are_the_samples():
    layers = sample.load()["qwen2.5-coder-1.5b"]
    k, v = contents.make(TINY_128, "real", 0, CPU)
    k, v = (x.view(2, 48, 4, 128) for x in (k, v))
    every = [torch.cat([getattr(layer, part) for layer in layers], 1) for part in "kv"]
    for x, source in zip((k, v), every, strict=True):
        # Request 0 has heads 0 to 3 from token 0, request 1 heads 4 to 7 from token 80.
        assert torch.equal(bits(x[0]), bits(source[:48, :4]))
        assert torch.equal(bits(x[1]), bits(source[80:128, 4:]))


def test_one_head_meets_every_layer():
    case = Case("one", "One", KVShape(1, 8, 1, 128, page_size=64), 8, 64)
    k, _ = contents.make(case, "real", 0, CPU)
    assert len({tuple(row.flatten().tolist()) for row in bits(k.view(8, 64, 128)[:, :1])}) == 8


def test_joined_heads_keep_rope_partners_half_a_head_apart():
    layers = sample.load()["qwen2.5-coder-1.5b"]
    k, _ = contents.make(TINY_256, "real", 0, CPU)
    joined, source = k.view(2, 64, 256)[0], layers[0].k[:64]
    for half in (0, 1):
        for head in (0, 1):
            ours = joined[:, half * 128 + head * 64 :][:, :64]
            assert torch.equal(bits(ours), bits(source[:, head, half * 64 :][:, :64]))


def test_longer_than_the_sample():
    case = Case("long", "Long", KVShape(1, 2, 2, 64), 1, 1024)
    k, _ = contents.make(case, "real", 0, CPU)
    assert torch.equal(bits(k[:512]), bits(k[512:]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pages_are_shuffled_and_slots_follow(case):
    bed = Bed(case, "gaussian", 3, StandIn())
    page_size = case.shape.page_size
    assert sorted(bed.pages.tolist()) == list(range(case.num_pages))
    assert bed.pages.tolist() != sorted(bed.pages.tolist())
    assert sorted(bed.slots.tolist()) == list(range(case.tokens))
    assert torch.equal(bed.slots[::page_size] // page_size, bed.pages)
    assert torch.equal(bed.slots % page_size, torch.arange(case.tokens) % page_size)


def test_a_fresh_pool_is_raw_and_poisoned():
    bed = Bed(TINY, "real", 0, StandIn())
    pool = bed.pool(spare_pages=2)
    layout = TINY.shape.layout
    homes = pool.kv.pool.view(-1, layout.span_stride)
    assert len(homes) == TINY.num_pages + 2
    assert bytes(homes[5, : layout.metadata_bytes].tolist()) == layout.raw_metadata()
    k, _ = bed.backend.launch.decode_pages(pool.kv, pool.state, torch.arange(3))
    assert (bits(k) == -1).all()


def test_partly_filled_pages_are_no_case():
    with pytest.raises(ValueError, match="kv_len=60 of odd is not whole pages"):
        Bed(Case("odd", "Odd", KVShape(1, 2, 2, 64), 1, 60), "real", 0, StandIn())
