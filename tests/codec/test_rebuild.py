"""The rebuild routine, bit for bit, in its three op sets that need no GPU.

Every result is held against `oracle_*`: loops over bytes in numpy, written from FORMAT.md
section 5 and not from the code.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bits import SELECTORS, entry

from zf_cute.kernels import rebuild as routine
from zf_cute.kernels.rebuild import JOIN_FIRST, JOIN_SECOND, IntegerOps, signed_word

Run = Callable[[str, np.ndarray], np.ndarray]


# ---- the three op sets -------------------------------------------------------------------------
def _call(name: str, x: list, ops: IntegerOps) -> tuple:
    """Call a routine on columns of words."""
    if name == "rebuild":
        return routine.rebuild((x[0], x[1]), x[2], x[3], ops)
    if name == "rebuild_entries":
        return routine.rebuild((x[0], x[1]), x[2], x[3], ops, fragment=x[4], entries=tuple(x[5:]))
    if name == "high_bytes":
        return routine.high_bytes(x[0], x[1], ops)
    if name == "join":
        return routine.join((x[0], x[1]), (x[2], x[3]), ops)
    return (routine.patch(x[0], x[1], tuple(x[2:]), ops),)


def _in_numpy(name: str, words: np.ndarray) -> np.ndarray:
    columns = [np.ascontiguousarray(column) for column in words.T]
    with np.errstate(over="ignore"):  # constants are numpy scalars, which warn where arrays wrap
        result = _call(name, columns, IntegerOps(np.uint32))
    assert all(column.dtype == np.uint32 for column in result)  # no promotion to 64 bits
    return np.stack(result, 1)


def _in_torch(name: str, words: np.ndarray) -> np.ndarray:
    columns = torch.from_numpy(words.view(np.int32)).unbind(1)
    result = _call(name, list(columns), IntegerOps(signed_word))
    assert all(column.dtype == torch.int32 for column in result)
    return torch.stack(result, 1).numpy().view(np.uint32)


def _in_cpu_jit(name: str, words: np.ndarray) -> np.ndarray:
    import rebuild_cpu  # here, so that the other two op sets do not wait for the DSL

    columns = {"rebuild": 4, "rebuild_entries": 4, "high_bytes": 2, "join": 4, "patch": 1}[name]
    return rebuild_cpu.run(name, words, columns)


@pytest.fixture(params=[_in_numpy, _in_torch, _in_cpu_jit], ids=["numpy", "torch", "cpu_jit"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a routine on rows of uint32 words."""
    return request.param


# ---- oracles -----------------------------------------------------------------------------------
def pack_codes(sign: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """[n, 8] signs and offsets to the four code bytes of a fragment, as [n] uint32."""
    codes = np.zeros((len(sign), 4), np.uint8)
    for i in range(4):
        codes[:, i] |= (sign[:, i] << 7 | sign[:, i + 4] << 6).astype(np.uint8)
        codes[:, i] |= (offset[:, i + 4] << 3 | offset[:, i]).astype(np.uint8)
    return codes.view("<u4")[:, 0]


def words_of(values: np.ndarray) -> np.ndarray:
    """[n, 8] 16-bit patterns to [n, 4] words of two."""
    return np.ascontiguousarray(values.astype("<u2")).view("<u4")


# ---- data --------------------------------------------------------------------------------------
def _every_code() -> tuple[np.ndarray, ...]:
    """Fragments in which each value slot sees every (half_base, offset, sign, low byte) there is.

    For each of the 128 bases the valid (offset, sign, low) triples, in another order for each of
    the eight slots: so a carry or a mask that leaks from one value shows in varied neighbours.
    """
    rng = np.random.default_rng(7)
    parts = []
    for half_base in range(128):
        # half_base + offset <= 127: above it no writer makes a block.
        offsets = np.arange(min(8, 128 - half_base))
        triples = np.stack(np.meshgrid(offsets, [0, 1], np.arange(256), indexing="ij"), -1)
        triples = triples.reshape(-1, 3)
        slots = np.stack([triples[rng.permutation(len(triples))] for _ in range(8)], 1)
        parts.append((np.full(len(triples), half_base), *(slots[..., i] for i in range(3))))
    half_base, offset, sign, low = (np.concatenate(x) for x in zip(*parts, strict=True))
    return half_base, offset, sign, low


@pytest.fixture(scope="module")
def codes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs [n, 4] of `rebuild` (low, low, codes, half_base), its result and the high bytes."""
    half_base, offset, sign, low = _every_code()
    low_words = np.ascontiguousarray(low.astype(np.uint8)).view("<u4")
    words = [low_words[:, 0], low_words[:, 1], pack_codes(sign, offset), half_base]
    high = sign * 128 + half_base[:, None] + offset
    values = high * 256 + low
    assert values.max() < 1 << 16
    for slot in range(8):  # the data is what it claims: every bit pattern there is, in each slot
        assert np.bincount(values[:, slot], minlength=1 << 16).all()
    high_words = np.ascontiguousarray(high.astype(np.uint8)).view("<u4")
    return np.stack(words, 1).astype(np.uint32), words_of(values), high_words


# ---- rebuild -----------------------------------------------------------------------------------
def test_rebuild_every_pattern_base_and_offset(run: Run, codes: tuple) -> None:
    words, want, _ = codes
    np.testing.assert_array_equal(run("rebuild", words), want)


def test_high_bytes(run: Run, codes: tuple) -> None:
    words, _, high = codes
    half_base_x4 = words[:, 3] * np.uint32(0x01010101)
    np.testing.assert_array_equal(run("high_bytes", np.stack([words[:, 2], half_base_x4], 1)), high)


def test_join_puts_every_byte_in_its_place(run: Run) -> None:
    # Sixteen source bytes to sixteen places.  Random bytes: equal neighbours cannot hide a swap.
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (4096, 16), np.uint8)
    low, high = data[:, :8].astype(int), data[:, 8:].astype(int)
    got = run("join", np.ascontiguousarray(data).view("<u4"))
    np.testing.assert_array_equal(got, words_of(high * 256 + low))


@pytest.mark.parametrize("selector", [JOIN_FIRST, JOIN_SECOND, 0x3210, 0x7654, 0x0123, 0x4444])
def test_prmt_picks_bytes(selector: int) -> None:
    # The two selectors in use, and ones that keep, replace, reverse and repeat.
    data = np.random.default_rng(5).integers(0, 256, (1000, 8), np.uint8)
    want = data[:, [selector >> 4 * i & 7 for i in range(4)]]
    words = np.ascontiguousarray(data).view("<u4")
    got = IntegerOps(np.uint32).prmt(words[:, 0], words[:, 1], selector)
    np.testing.assert_array_equal(got, np.ascontiguousarray(want).view("<u4")[:, 0])
    signed = torch.from_numpy(words.view(np.int32))
    got = IntegerOps(signed_word).prmt(signed[:, 0], signed[:, 1], selector)
    np.testing.assert_array_equal(got.numpy().view(np.uint32), want.copy().view("<u4")[:, 0])


def test_rebuild_with_entries(run: Run, codes: tuple) -> None:
    """Codes, entries and join together: each fragment gets the entries of its own positions."""
    words, values, _ = codes
    rng = np.random.default_rng(29)
    some = rng.permutation(len(words))[:20_000]
    words, values = words[some], values[some].copy().view(np.uint16)
    fragment = rng.integers(0, 64, len(some))
    # Half of the entries are of this fragment, the others of any: those must change nothing.
    at = rng.integers(0, 512, (len(some), 4))
    own = rng.random(at.shape) < 0.5
    at = np.where(own, fragment[:, None] * 8 + at % 8, at)
    high = rng.integers(0, 256, at.shape)
    selector = np.array([0x3217, 0x3270, 0x3710, 0x7210])[at & 3]
    entries = selector | at >> 2 << 16 | high << 24
    for i in range(4):  # in order: where positions repeat, the last entry is the one that stays
        mine = np.flatnonzero(at[:, i] // 8 == fragment)
        v = at[mine, i] % 8
        values[mine, v] = high[mine, i] << 8 | values[mine, v] & 0xFF
    rows = np.concatenate([words, fragment[:, None], entries], 1).astype(np.uint32)
    np.testing.assert_array_equal(run("rebuild_entries", rows), words_of(values))


# ---- patch -------------------------------------------------------------------------------------
def _exception_blocks(distinct: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
    """[n, 4] ascending positions and high bytes; from `distinct` on they repeat the last used one.

    Row h of 256 gives position p the high byte h + 37 p, so that all rows together pair every
    position with every high byte.  Even rows put four neighbours in a block, hence all bytes of one
    word; odd rows scatter them.
    """
    rng = np.random.default_rng(11)
    positions = []
    for h in rows:
        order = np.arange(512) if h % 2 == 0 else rng.permutation(512)
        positions.append(np.sort(order.reshape(128, 4), 1))
    high = np.concatenate([(p * 37 + h) % 256 for h, p in zip(rows, positions, strict=True)])
    at = np.concatenate(positions)
    column = np.minimum(np.arange(4), distinct - 1)
    return at[:, column], high[:, column]


def _patch_words(at: np.ndarray, number: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Word of high bytes for each (block, word number): random bytes."""
    return rng.integers(0, 256, (len(at), number.shape[1], 4), np.uint8)


def oracle_patch(
    high: np.ndarray, number: np.ndarray, at: np.ndarray, value: np.ndarray
) -> np.ndarray:
    """Byte by byte: the byte of position 4 * number + i becomes the value of the entry for it."""
    result = high.copy()
    for e in range(at.shape[1]):
        for i in range(4):
            hit = number * 4 + i == at[:, e, None]
            result[..., i] = np.where(hit, value[:, e, None], result[..., i])
    return result


@pytest.mark.parametrize(
    ("distinct", "rows"),
    [
        pytest.param(4, range(256), id="4-all-positions-and-high-bytes"),
        # Repeats: patching twice must be patching once.  Two rows of each kind are enough.
        pytest.param(3, range(4), id="3-and-a-repeat"),
        pytest.param(2, range(4), id="2-and-repeats"),
        pytest.param(1, range(4), id="1-and-repeats"),
    ],
)
def test_patch(run: Run, distinct: int, rows: range) -> None:
    at, value = _exception_blocks(distinct, rows)
    if distinct == 4:
        assert len(np.unique(at.ravel() * 256 + value.ravel())) == 512 * 256
    rng = np.random.default_rng(13)
    # The words that the entries name, and others: above, below and word 0, which the field of an
    # entry would name if it were masked away.
    owner = at >> 2
    number = np.concatenate([owner, (owner[:, :2] + 1) % 128, (owner[:, 2:] + 64) % 128], 1)
    number = np.concatenate([number, np.zeros((len(at), 1), int)], 1)
    _assert_patched(run, at, value, number, rng)


def test_patch_every_word_of_a_block(run: Run) -> None:
    # All 128 words of 64 blocks: exactly the words that are named change.
    at, value = _exception_blocks(4, range(256))
    some = np.random.default_rng(17).choice(len(at), 64, replace=False)
    number = np.broadcast_to(np.arange(128), (64, 128))
    _assert_patched(run, at[some], value[some], number, np.random.default_rng(19))


def _assert_patched(
    run: Run, at: np.ndarray, value: np.ndarray, number: np.ndarray, rng: np.random.Generator
) -> None:
    selector = np.array(SELECTORS)[at & 3]
    entries = selector | (at >> 2) << 16 | value << 24
    assert int(entries[0, 0]) == entry(int(at[0, 0]), int(value[0, 0]))
    high = _patch_words(at, number, rng)
    want = oracle_patch(high, number, at, value)
    rows = np.concatenate(
        [
            high.view("<u4")[..., 0][..., None],
            number[..., None],
            np.broadcast_to(entries[:, None], (*number.shape, 4)),
        ],
        2,
    )
    got = run("patch", rows.reshape(-1, 6).astype(np.uint32))
    np.testing.assert_array_equal(got[:, 0], want.view("<u4").reshape(-1))


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_patch_takes_any_number_of_entries(count: int) -> None:
    # A kernel passes as many entries as the layout allows, not always four.
    at, value = _exception_blocks(4, range(2))
    number = at >> 2
    high = _patch_words(at, number, np.random.default_rng(23))
    want = oracle_patch(high, number, at[:, :count], value[:, :count])
    ops = IntegerOps(np.uint32)
    entries = (np.array(SELECTORS)[at & 3] | number << 16 | value << 24).astype(np.uint32)
    each = tuple(entries[:, e, None] for e in range(count))
    with np.errstate(over="ignore"):
        got = routine.patch(high.view("<u4")[..., 0], number.astype(np.uint32), each, ops)
    np.testing.assert_array_equal(got, want.view("<u4")[..., 0])


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFF, 0x80000000, 0x87878787, 0xFFFFFFFF])
def test_signed_word_is_the_same_32_bits(value: int) -> None:
    signed = torch.tensor(signed_word(value), dtype=torch.int32)  # raises if it does not fit
    assert int(signed) & 0xFFFFFFFF == value
