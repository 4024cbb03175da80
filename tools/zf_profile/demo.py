"""``zf-profile demo``: the whole path on real keys, values and queries."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from zf_profile import console, output
from zf_profile.console import Exit, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from zf_cute import KVShape, PageStore
    from zf_profile.census import Census
    from zf_profile.sample import SampleLayer

SUMMARY = "seal real keys and values, prove it lossless, attend, and say what it saves"
DESCRIPTION = """\
Put the bundled keys and values of two trained models into pages, seal the pages, prove that every
bit comes back, run decode attention over the compressed pages with the models' own queries, and
say what it means for 8B models on 80 and 141 GB GPUs.  No GPU is needed; on one (--device cuda) the
kernels write and read the pages, and attention runs on the reference backend in any case.  Nothing
is timed.  Exit code 1 if a bit or an attention error is not as it must be."""
EXAMPLES = """\
examples:
  zf-profile demo
  zf-profile demo --json - | python -m json.tool
  zf-profile demo --device cuda        pages by the kernels, on the GPU"""

PAGE_SIZE = 16
GPU_GB = (80, 141)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the pages lie (default cpu)",
    )
    output.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code."""
    console.import_interruptibly("torch", "safetensors.torch", "zf_cute.reference")
    import torch

    from zf_profile import census, environment, sample

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch finds no usable GPU; leave the option out to run on the CPU",
            Exit.NO_GPU,
        )
    models = sample.load()
    parts: list[Census] = []
    attention: list[dict[str, Any]] = []
    stored = 0
    with console.progress(args, "layers", sum(map(len, models.values()))) as advance:
        for layers in models.values():
            store, found, stored_bytes = _seal(layers, args.device)
            parts += found
            stored += stored_bytes
            for index, layer in enumerate(layers):
                attention.append(_attend(store, index, layer))
                advance()
    whole = census.totals(parts, stored)
    capacity = _capacity(models["qwen2.5-coder-1.5b"])
    _print(args, parts, whole, attention, capacity)
    output.write_json(
        args,
        "demo",
        {
            "env": environment.environment(),
            "device": args.device,
            "backend": {"pages": store.backend, "attention": "reference"},
            "tensors": [part.record() for part in parts],
            "totals": whole,
            "attention": attention,
            "capacity": capacity,
        },
    )
    fine = whole["bitwise_equal"] and all(entry["ok"] for entry in attention)
    return Exit.DONE if fine else Exit.NO


def _shape(layers: list[SampleLayer]) -> KVShape:
    from zf_cute import KVShape

    _, kv_heads, head_dim = layers[0].k.shape
    return KVShape(len(layers), layers[0].q.shape[1], kv_heads, head_dim, PAGE_SIZE)


def _seal(layers: list[SampleLayer], device: str) -> tuple[PageStore, list[Census], int]:
    """Append and seal every layer's tokens.

    Returns the store, a census of each K and V, and the bytes of the sealed pages with spans
    aligned.  Pages past those of the tokens are free, one for each query.
    """
    import torch

    from zf_cute import PageStore
    from zf_profile.census import Census, aligned_bytes

    shape, tokens = _shape(layers), len(layers[0].k)
    pages = torch.arange(tokens // PAGE_SIZE, device=device)
    store = PageStore(shape, len(pages) + len(layers[0].q), device=device)
    found, stored = [], 0
    for index, layer in enumerate(layers):
        k, v = layer.k.to(device), layer.v.to(device)
        store.append(index, k, v, torch.arange(tokens, device=device))
        store.seal(index, pages)
        descriptors = store.descriptors(index, pages)
        for axis, (part, given, read) in enumerate(
            zip("kv", (k, v), store.read(index, pages), strict=True)
        ):
            equal = torch.equal(read.view(torch.int16), given.view(torch.int16))
            name = f"{layer.name}/{part}"
            found.append(Census.of(name, descriptors[:, :, axis], shape.layout, equal))
        stored += aligned_bytes(store.places[index, pages, :, 1])
    return store, found, stored


def _attend(store: PageStore, index: int, layer: SampleLayer) -> dict[str, Any]:
    """Attention of the sample's queries over sealed pages, against float64.

    Query i is a request of its own that attends tokens 0 to 448 + i: it shares the sealed pages,
    and its last, partly filled page is a raw one of its own.
    """
    import torch

    from zf_cute import BatchAttention
    from zf_profile.sample import FIRST_QUERY

    device, batch = store.device, len(layer.q)
    lengths = FIRST_QUERY + 1 + torch.arange(batch)
    shared = len(layer.k) // PAGE_SIZE
    table = torch.arange(shared).repeat(batch, 1)
    rows: list[int] = []
    slots: list[int] = []
    for i, length in enumerate(lengths.tolist()):
        full, rest = divmod(length, PAGE_SIZE)
        if rest:
            own = shared + i
            table[i, full] = own
            rows += range(full * PAGE_SIZE, length)
            slots += range(own * PAGE_SIZE, own * PAGE_SIZE + rest)
    k, v, q = (x.to(device) for x in (layer.k, layer.v, layer.q))
    store.append(index, k[rows], v[rows], torch.tensor(slots, device=device))
    attend = BatchAttention(store.shape, batch, device=device)
    attend.plan(table.int().to(device), lengths.int().to(device))
    out = attend.run(q, store.layer(index))

    exact = _dense(q, k, v, lengths, torch.float64)
    error = _worst(out, exact)
    bf16_error = _worst(_dense(q, k, v, lengths, torch.bfloat16), exact)
    # Twice what BF16 torch makes, and one unit in the last place of the largest output.
    ulp = 2.0 ** (math.floor(math.log2(float(exact.abs().max()))) - 7)
    bound = 2 * bf16_error + ulp
    return {
        "name": layer.name,
        "requests": batch,
        "max_abs_err": error,
        "bf16_torch_max_abs_err": bf16_error,
        "bound": bound,
        "ok": error <= bound,
    }


def _dense(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, dtype: Any) -> Tensor:
    """Attention over the original tensors; with bfloat16, P is rounded to it and sums are FP32."""
    import torch

    compute = torch.float64 if dtype == torch.float64 else torch.float32
    keys, values = k.to(compute), v.to(compute)
    grouped = q.to(compute).view(len(q), keys.shape[1], -1, keys.shape[2])
    scores = torch.einsum("bhgd,thd->bhgt", grouped, keys) * keys.shape[2] ** -0.5
    hidden = torch.arange(len(keys), device=q.device) >= lengths.to(q.device)[:, None]
    scores = scores.masked_fill(hidden[:, None, None], -math.inf)
    weights = torch.softmax(scores, -1).to(dtype).to(compute)
    return torch.einsum("bhgt,thd->bhgd", weights, values).to(dtype).flatten(1, 2)


def _worst(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max())


def _capacity(layers: list[SampleLayer]) -> dict[str, Any]:
    """What fits for the 8B models, whose pages have 8 heads of 128 dims.

    Their ratio comes from pages of the sample's four Qwen layers, 2 heads each, side by side.
    """
    import torch

    from zf_cute.reference import encode_pages
    from zf_profile import capacity
    from zf_profile.census import aligned_bytes
    from zf_profile.models import LLAMA_3_1_8B, QWEN3_8B

    layout = LLAMA_3_1_8B.shape.layout
    k, v = (
        torch.cat([getattr(layer, part) for layer in layers], 1)
        .contiguous()
        .view(-1, PAGE_SIZE, layout.num_kv_heads, layout.head_dim)
        for part in "kv"
    )
    _, lengths = encode_pages(k, v, layout)
    place_bytes = 8 * layout.spans
    page = 2 * layout.page_values
    sealed = (aligned_bytes(lengths) / len(k) + place_bytes) / page
    raw = (layout.page_stride + place_bytes) / page
    load = capacity.Load()
    return {
        "source": "the sample's four Qwen2.5-Coder-1.5B layers of 2 KV heads, joined to 8 heads",
        "assumption": "their caches compress as that model's does; the sample has no QK norm, "
        "which Qwen3 has",
        "sealed_ratio": sealed,
        "raw_ratio": raw,
        "prefix_tokens": load.prefix_tokens,
        "new_tokens": load.new_tokens,
        "memory_fraction": load.fraction,
        "formula": capacity.formula(load, sealed, raw),
        "cases": [
            capacity.fit(model, gb * 1e9, load, sealed, raw)
            for model in (LLAMA_3_1_8B, QWEN3_8B)
            for gb in GPU_GB
        ],
    }


def _print(
    args: argparse.Namespace,
    parts: list[Census],
    whole: dict[str, Any],
    attention: list[dict[str, Any]],
    capacity: dict[str, Any],
) -> None:
    from zf_profile.census import tensor_table

    out = console.stdout(args)
    out.print(
        f"Keys, values and queries of two trained models, 512 tokens, in pages on {args.device}\n"
    )
    console.print_table(out, tensor_table(parts, whole))
    out.print(
        f"stored / BF16: {whole['ratio']:.4f} with all metadata, {whole['stored_ratio']:.4f} with "
        "spans aligned to 128 bytes too (2 and 3 KV heads a page here; more heads lose less)\n"
    )
    table = console.new_table("Decode attention over the sealed pages: max |error| against float64")
    table.add_column("layer")
    for name in ("requests", "zf_cute", "BF16 torch", "within bound"):
        table.add_column(name, justify="right")
    for entry in attention:
        table.add_row(
            entry["name"],
            str(entry["requests"]),
            f"{entry['max_abs_err']:.2e}",
            f"{entry['bf16_torch_max_abs_err']:.2e}",
            "yes" if entry["ok"] else "[red]NO[/red]",
        )
    console.print_table(out, table)
    out.print(
        "BF16 torch: the same formula in torch with BF16 inputs, P rounded to BF16 and FP32 sums.  "
        "Bound: twice its error, and one BF16 ulp of the largest output.\n"
    )
    prefix, new = capacity["prefix_tokens"], capacity["new_tokens"]
    table = console.new_table(f"Requests of {prefix} + {new} tokens that fit: BF16, and zf_cute")
    for name in ("model", "GPU"):
        table.add_column(name)
    for name in ("requests", "zf_cute", "tokens", "zf_cute", "gain"):
        table.add_column(name, justify="right")
    for case in capacity["cases"]:
        before, after = case["uncompressed"], case["compressed"]
        table.add_row(
            case["model"],
            f"{case['gpu_bytes'] / 1e9:.0f} GB",
            str(before["requests"]),
            str(after["requests"]),
            f"{before['tokens']:,.0f}",
            f"{after['tokens']:,.0f}",
            f"{case['token_gain']:.3f}x",
        )
    console.print_table(out, table)
    out.print()
    out.print(capacity["formula"])
    out.print(f"Ratio from {capacity['source']}.\nAssumed: {capacity['assumption']}.")
    out.print(
        "By arithmetic: this version seals pages in place, and does not yet lend what it frees."
    )
