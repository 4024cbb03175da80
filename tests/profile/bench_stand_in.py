"""The reference backend standing in for the kernels, so that ``bench`` runs whole without a GPU."""

from __future__ import annotations

import json
import time

import torch

from zf_cute import KVShape, PageStore, reference
from zf_cute.kernels.refusals import Refusal
from zf_cute.reference import writing
from zf_layouts.page import SPAN_ALIGNMENT
from zf_profile import bench, bench_cases, ceiling, codec_works, timing
from zf_profile.backend import Pool
from zf_profile.bench_cases import Case


class ReferenceLaunch:
    """`zf_cute.launch`, by the reference backend."""

    def append(self, kv, state, k, v, slot_mapping):
        writing.append(kv, state, k, v, slot_mapping)

    def encode(self, kv, state, pages, *, destinations=None, lengths=None):
        if lengths is None:
            lengths = torch.empty(len(pages), kv.layout.spans, dtype=torch.int32)
        lengths.zero_()
        open_pages = ~state.sealed[pages].any(1)
        state.refused[Refusal.PAGE_NOT_SEALABLE] += int((~open_pages).sum())
        some = pages[open_pages]
        if destinations is None:
            lengths[open_pages] = writing.encode(kv, state, some)
            return lengths
        spans, found = reference.encode_pages(*reference.decode_pages(kv, some), kv.layout)
        to = destinations[open_pages]
        rows = to[..., None].long() + torch.arange(spans.shape[-1] // SPAN_ALIGNMENT)
        kv.pool.view(-1, SPAN_ALIGNMENT)[rows] = spans.view(*rows.shape, SPAN_ALIGNMENT)
        kv.places[some] = torch.stack([to, found.int()], -1)
        state.sealed[some] = 1
        lengths[open_pages] = found.int()
        return lengths

    def decode_pages(self, kv, state, pages, *, k=None, v=None):
        made = reference.decode_pages(kv, pages)
        return tuple(
            got if given is None else given.copy_(got)
            for given, got in zip((k, v), made, strict=True)
        )


class ReferenceOperators(ReferenceLaunch):
    """`zf_cute.operators`: the same, with outputs of their own."""

    def encode(self, kv, state, pages, *, destinations=None):
        return super().encode(kv, state, pages, destinations=destinations)

    def decode_pages(self, kv, state, pages):
        return super().decode_pages(kv, state, pages)


class StandIn:
    """A `Backend` on the CPU."""

    def __init__(self, launch=None, operators=None, compiled=lambda: 3):
        self.device = torch.device("cpu")
        self.launch = launch or ReferenceLaunch()
        self.operators = operators or ReferenceOperators()
        self.compiled = compiled

    def new_pool(self, shape, num_pages):
        store = PageStore(shape, num_pages)
        return Pool(store.layer(0), store.state(0))


class HostStopwatch:
    """A `Stopwatch` of the host's own time."""

    late = False

    def flush(self):
        """Nothing to flush."""

    def lead(self):
        """The host is the device."""

    def synchronize(self):
        """Nothing runs behind the host's back."""

    def mark(self):
        return time.perf_counter()

    def passed(self, mark):
        return self.late

    def microseconds(self, start, end):
        return (end - start) * 1e6

    def capture(self, work):
        return lambda: work()


TINY = Case("tiny", "Tiny", KVShape(1, 4, 2, 64), 3, 64)
TINY_256 = Case("tiny-256", "Tiny", KVShape(1, 2, 1, 256, page_size=32), 2, 64)
TINY_128 = Case("tiny-128", "Tiny", KVShape(1, 8, 4, 128, heads_per_span=2), 2, 48)


def install(patch=setattr, backend=None, watch=None):
    """Let ``bench`` measure the stand-in, on small cases and with few repetitions."""
    made = backend or StandIn(), watch or HostStopwatch()
    patch(bench, "rig", lambda: made)
    patch(codec_works, "STEPS", 3)
    patch(timing, "HOST_CALLS", 4)
    patch(ceiling, "LARGE_BYTES", 1 << 16)
    cases = {case.name: case for case in (TINY, TINY_128, TINY_256)}
    known = {**bench_cases.CASES, **cases}
    patch(bench_cases, "CASES", known)
    patch(bench, "CASES", known)


FEW = ("--samples", "3")


def measured(tool, install, *words, launch=None, operators=None, watch=None, **backend):
    """Run ``bench`` on a stand-in of these parts; returns its exit code and document."""
    install(backend=StandIn(launch, operators, **backend), watch=watch)
    ran = tool("bench", "--case", "tiny", *FEW, *words, "--json", "-")
    return ran.code, json.loads(ran.out)


def entries(document, kernel, variant=None):
    """Records of a kernel, or of one of its variants."""
    return [
        entry
        for entry in document["cases"]
        if entry["kernel"] == kernel and variant in (None, entry["variant"])
    ]
