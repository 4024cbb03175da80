"""The bytes model of ``bench`` on numbers small enough to count by hand."""

from zf_layouts import PageLayout
from zf_profile import bytes_model
from zf_profile.ceiling import gbps, over

# Two heads of 64 dims, 16 tokens a page: K and V of a head are 2 blocks each, 2 KiB.
# Metadata of a head: 2 * (4 + 4) = 16 bytes.  One span a page, 2 * (16 + 4096) bytes raw.
ONE_SPAN = PageLayout(2, 64)
TWO_SPANS = PageLayout(2, 64, heads_per_span=1)


def test_the_layouts_are_what_the_numbers_below_assume():
    assert (ONE_SPAN.spans, ONE_SPAN.raw_span_bytes, ONE_SPAN.page_values) == (1, 8224, 4096)
    assert (TWO_SPANS.spans, TWO_SPANS.raw_span_bytes) == (2, 4112)


def test_copy():
    traffic = bytes_model.copy(1000)
    assert traffic.total == 2000
    assert traffic.record() == {
        "read": {"source": 1000},
        "written": {"destination": 1000},
        "read_total": 1000,
        "written_total": 1000,
        "total": 2000,
    }


def test_append():
    # A row: 2 heads * 64 dims * 2 bytes, for K and for V: 512 bytes.
    traffic = bytes_model.append(ONE_SPAN, rows=10, pages=3)
    assert traffic.read == {
        "rows": 5120,
        "slots": 80,  # 8 each
        "places": 24,  # 8 a page
        "state": 36,  # 8 for what is written, 4 for whether it is sealed
    }
    assert traffic.written == {"rows": 5120, "state": 24}
    assert traffic.total == 5120 + 80 + 24 + 36 + 5120 + 24
    two = bytes_model.append(TWO_SPANS, rows=10, pages=3)
    assert two.read["places"] == 48
    assert two.read["state"] == 3 * (8 + 2 * 4)


def test_encode_to_a_new_place():
    traffic = bytes_model.encode(ONE_SPAN, [6176, 8224], in_place=False)
    assert traffic.read == {
        "blocks": 2 * 8192,  # without the metadata of raw pages
        "page_ids": 16,
        "places": 16,
        "state": 2 * (8 + 4),
        "destinations": 8,
    }
    assert traffic.written == {"spans": 14400, "places": 16, "state": 8, "lengths": 8}


def test_encode_in_place():
    traffic = bytes_model.encode(ONE_SPAN, [6176, 8224], in_place=True)
    assert "destinations" not in traffic.read
    # The second span stays raw: nothing of it has to be written.
    assert traffic.written == {"spans": 6176, "places": 16, "state": 8, "lengths": 8}


def test_encode_of_pages_of_two_spans():
    traffic = bytes_model.encode(TWO_SPANS, [3088, 4112], in_place=False)
    assert traffic.read == {
        "blocks": 8192,
        "page_ids": 8,
        "places": 16,
        "state": 8 + 2 * 4,
        "destinations": 8,
    }
    assert traffic.written == {"spans": 7200, "places": 16, "state": 8, "lengths": 8}


def test_decode_pages():
    traffic = bytes_model.decode_pages(TWO_SPANS, [3088, 4112, 3088, 3088])
    assert traffic.read == {"spans": 13376, "page_ids": 16, "places": 32}
    assert traffic.written == {"values": 2 * 8192}


def test_the_target_case():
    """32 requests of 8192 tokens, 8 heads of 128: 1 GiB of K and V, metadata far below 1 %."""
    layout = PageLayout(8, 128)
    raw = 1 << 30
    append = bytes_model.append(layout, 32 * 8192, 32 * 512)
    assert append.read["rows"] == append.written["rows"] == raw
    assert append.total < 2.003 * raw
    sealed = [49000] * (32 * 512)
    decode = bytes_model.decode_pages(layout, sealed)
    assert decode.written["values"] == raw
    encode = bytes_model.encode(layout, sealed, in_place=False)
    assert encode.read["blocks"] == raw
    assert encode.written["spans"] == decode.read["spans"] == 49000 * 32 * 512
    assert encode.total < 1.002 * (raw + 49000 * 32 * 512)


def test_rates():
    assert gbps(2_000_000, 1000) == 2.0  # 2 MB in a millisecond


def test_over_the_ceiling_beyond_noise():
    assert over(4000, 4000) == over(4079, 4000) == ""
    assert over(4081, 4000).startswith("102.0% of the measured ceiling")
