"""What ``bench`` says of kernels that are wrong, fail, refuse, compile or seem too fast."""

import re
from functools import partial

import bench_stand_in
import pytest
import torch
from bench_stand_in import HostStopwatch, ReferenceLaunch, ReferenceOperators, entries

from zf_profile import bytes_model, timing


@pytest.fixture
def measure(tool, monkeypatch):
    """Run ``bench`` on a stand-in and return its exit code and document."""
    install = partial(bench_stand_in.install, monkeypatch.setattr)
    return partial(bench_stand_in.measured, tool, install)


class WrongDecode(ReferenceLaunch):
    """Flips a bit of the last value."""

    def decode_pages(self, kv, state, pages, **options):
        k, v = super().decode_pages(kv, state, pages, **options)
        v.view(torch.int16)[-1, -1, -1, -1] ^= 1
        return k, v


def test_a_wrong_bit_is_never_timed(measure):
    code, document = measure("--kernel", "decode_pages", launch=WrongDecode())
    assert code == 1
    for entry in entries(document, "decode_pages"):
        assert (entry["match"], entry["valid"], entry["failed"]) == (False, False, False)
        assert entry["time_us"] is entry["gbps"] is entry["host_us"] is None
        assert re.fullmatch(r"1 of \d+ values of v differ", entry["reason"])
        assert entry["time_us_reason"] == entry["reason"]
    assert all(entry["valid"] for entry in entries(document, "copy"))


class WrongBytes(ReferenceLaunch):
    """Decodes right, and is not what FORMAT.md says: a code of no meaning changes."""

    def encode(self, kv, state, pages, **options):
        lengths = super().encode(kv, state, pages, **options)
        # Padding at the end of a head's metadata, which no reader looks at.
        start = kv.places[pages, 0, 0].long() * 128
        kv.pool[start + kv.layout.head_metadata_bytes - 1] = 1
        return lengths


def test_bytes_are_held_against_the_reference(measure, monkeypatch):
    code, document = measure("--kernel", "encode", launch=WrongBytes())
    layout = bench_stand_in.TINY.shape.layout
    assert 2 * (4 + layout.descriptor_bytes) == layout.head_metadata_bytes  # no padding at d64 ...
    assert code == 1  # ... so it is the last descriptor of V that changes
    for entry in entries(document, "encode"):
        assert entry["match"] is False
        assert "differ" in entry["reason"] or "failed" in entry["reason"]


class LongerLengths(ReferenceLaunch):
    def encode(self, kv, state, pages, **options):
        return super().encode(kv, state, pages, **options).add_(16)


class Refuses(ReferenceLaunch):
    """Refuses everything, as a kernel does: without a word."""

    def encode(self, kv, state, pages, *, destinations=None, lengths=None):
        state.refused[3] += len(pages)
        return lengths.zero_() if lengths is not None else torch.zeros(len(pages), 1).int()


@pytest.mark.parametrize(
    ("launch", "reason"),
    [(LongerLengths, "places hold other lengths"), (Refuses, "refused: counters [0, 0, 0, 12")],
)
def test_lengths_and_refusals(measure, launch, reason):
    code, document = measure("--kernel", "encode", launch=launch())
    assert code == 1
    for entry in entries(document, "encode"):
        assert entry["match"] is False
        assert entry["reason"].startswith(reason)


class SkipsTheLastRow(ReferenceLaunch):
    def append(self, kv, state, k, v, slots):
        super().append(kv, state, k[:-1], v[:-1], slots[:-1])


class WritesOneTooMany(ReferenceLaunch):
    """Writes a row past those it was given."""

    def append(self, kv, state, k, v, slots):
        super().append(kv, state, k, v, slots)
        free = torch.ones(kv.num_pages * kv.layout.page_size, dtype=torch.bool)
        free[slots] = False
        if free.any():
            super().append(kv, state, k[:1], v[:1], free.nonzero()[0])


@pytest.mark.parametrize(
    ("launch", "wrong"),
    [
        (SkipsTheLastRow, {"prefill", "unaligned", "step-64", "step-256"}),
        (WritesOneTooMany, {"unaligned", "step-64", "step-256"}),
    ],
)
def test_appends_of_too_little_and_too_much(measure, launch, wrong):
    code, document = measure("--kernel", "append", launch=launch())
    assert code == 1
    found = {entry["variant"] for entry in entries(document, "append") if not entry["match"]}
    assert found == wrong


class WrongOperators(ReferenceOperators):
    def decode_pages(self, kv, state, pages, **options):
        return tuple(x.neg() for x in super().decode_pages(kv, state, pages, **options))


def test_the_operator_is_checked_too(measure):
    code, document = measure("--kernel", "decode_pages", operators=WrongOperators())
    assert code == 1
    for entry in entries(document, "decode_pages"):
        assert entry["match"] is False
        assert entry["reason"].startswith("through the torch operator: ")
        assert entry["operator_host_us"] is None


class Broken(ReferenceLaunch):
    def encode(self, kv, state, pages, **options):
        raise RuntimeError("an illegal memory access was encountered\nmore lines")


def test_a_launch_that_fails(measure):
    code, document = measure(launch=Broken())
    assert code == 5
    for entry in document["cases"]:
        broken = entry["kernel"] == "encode" or entry["kernel"] == "decode_pages"
        assert entry["failed"] == broken
        assert entry["valid"] != broken
        if broken:
            assert entry["match"] is None
            assert entry["reason"].endswith(
                "failed: RuntimeError: an illegal memory access was encountered"
            )


class BreaksWhileTimed(HostStopwatch):
    """The device fails once everything has been checked."""

    def mark(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_fails_while_timed(measure):
    code, document = measure(watch=BreaksWhileTimed())
    assert code == 5
    for entry in document["cases"]:
        assert (entry["match"], entry["failed"], entry["valid"]) == (True, True, False)
        assert entry["time_us"] is entry["gbps"] is entry["host_us"] is None
        assert entry["reason"].startswith("failed while all were timed: RuntimeError: CUDA error")
        assert entry["bytes"]["total"] > 0


def test_a_case_that_does_not_fit(measure, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("zf_profile.contents.make", full)
    code, document = measure()
    assert code == 5
    assert {entry["content"] for entry in document["cases"]} == {None}
    for entry in document["cases"]:
        assert "OutOfMemoryError: CUDA out of memory" in entry["reason"]


class EmptyGraphs(HostStopwatch):
    def capture(self, work):
        return lambda: None


def test_an_empty_graph_is_found(measure):
    code, document = measure(watch=EmptyGraphs())
    assert code == 1
    for entry in document["cases"]:
        assert entry["match"] == (entry["kernel"] == "copy")
        if not entry["match"]:
            assert entry["reason"].startswith("replayed from a graph: ")


class NoGraphs(HostStopwatch):
    def capture(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_captured_has_no_graph_time(measure):
    code, document = measure("--kernel", "encode", watch=NoGraphs())
    assert code == 0
    for entry in entries(document, "encode"):
        assert entry["graph_us"] is None
        assert "not permitted when stream is capturing" in entry["graph_us_reason"]
        assert entry["time_us"]["n"] == 3


class Late(HostStopwatch):
    late = True


def test_samples_that_the_gpu_may_have_waited_in(measure):
    code, document = measure("--kernel", "decode_pages", watch=Late())
    assert code == 0
    assert document["ceiling"] is None
    for entry in document["cases"]:
        assert entry["time_us"] is None
        assert entry["late_samples"] == 3 * timing.ATTEMPTS
        assert "host fell behind" in entry["time_us_reason"]


def test_a_call_that_compiles_is_an_error(measure):
    count = iter(range(1000))
    code, document = measure("--kernel", "append", compiled=lambda: next(count))
    assert code == 1
    for entry in entries(document, "append"):
        assert entry["match"] is True
        assert entry["valid"] is False
        assert entry["reason"] == "1 kernels were compiled by calls like those before them"


class Fast(HostStopwatch):
    """Every launch takes 1 us, however many bytes it moves."""

    def microseconds(self, start, end):
        return 1.0


def test_more_than_the_ceiling_is_an_error_and_no_result(measure, monkeypatch):
    code, document = measure(watch=Fast())
    assert code == 0  # the larger copy moved more bytes than any kernel in the same time
    monkeypatch.setattr(
        "zf_profile.bytes_model.copy", lambda n: bytes_model.Traffic({"source": n // 16}, {})
    )
    code, document = measure(watch=Fast())
    assert code == 1
    for entry in document["cases"]:
        over = entry["kernel"] != "copy" and not entry["variant"].startswith("step")
        assert entry["match"] is True
        assert entry["valid"] != over
        if over:
            assert entry["pct_measured_peak"] > 102
            assert "of the measured ceiling: an error of the bytes model" in entry["reason"]
