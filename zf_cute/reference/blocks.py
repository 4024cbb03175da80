"""Encode and decode blocks of 512 values, thousands at a time.

A block comes as 512 bit patterns ordered by position and leaves as a row of 1024 bytes, of which
the first `BlockKind.nbytes` count.  Byte for byte the same as `zf_layouts.encode_block`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute.errors import FormatError
from zf_cute.kernels.rebuild import IntegerOps, rebuild, signed_word
from zf_cute.reference.tables import device_table
from zf_layouts import bf16, block
from zf_layouts.block import BLOCK_VALUES, FRAGMENT, KINDS, LANES, TILES

ROW_BYTES = block.RAW_KIND.nbytes
"""Bytes of the row that holds any encoded block."""

_OPS = IntegerOps(signed_word)
_INVALID = len(KINDS)
_PLANE_WORDS = (block.LOW_PLANE + block.CODE_PLANE) // 4


@device_table
def _kind_table(device: torch.device) -> Tensor:
    """Index into KINDS by descriptor."""
    kinds = (block.kind_of(descriptor) for descriptor in range(256))
    return torch.tensor([KINDS.index(kind) if kind else _INVALID for kind in kinds], device=device)


@device_table
def _bytes_table(device: torch.device) -> Tensor:
    """Stored bytes by descriptor."""
    kinds = (block.kind_of(descriptor) for descriptor in range(256))
    return torch.tensor([kind.nbytes if kind else 0 for kind in kinds], device=device)


def block_kinds(descriptors: Tensor) -> Tensor:
    """Index into `KINDS` of each descriptor (int64); ``len(KINDS)`` where it names no kind."""
    return _kind_table(descriptors.device)[descriptors.long()]


def block_bytes(descriptors: Tensor) -> Tensor:
    """Stored bytes of each block (int64); 0 where the descriptor names no kind."""
    return _bytes_table(descriptors.device)[descriptors.long()]


def outlier_counts(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Base of each block and how many of its values lie outside the window.

    Parameters
    ----------
    bits : Tensor
        [blocks, 512] int32 bit patterns (0 to 65535), ordered in any way.

    Returns
    -------
    base, outliers : Tensor
        [blocks] int32, by the rules of FORMAT.md section 6.
    """
    exponents = bits >> 7 & 0xFF
    least = exponents.amin(1) & ~1
    base, outliers = least, torch.zeros_like(least)
    wide = torch.nonzero(exponents.amax(1) >= least + bf16.WINDOW).flatten()
    if len(wide):
        pairs = exponents[wide] >> 1  # windows start at even exponents: count fields in pairs
        size = (len(wide), 128 + bf16.WINDOW // 2)
        histogram = torch.zeros(size, dtype=torch.int32, device=bits.device)
        histogram.scatter_add_(1, pairs.long(), torch.ones_like(pairs))
        summed = histogram.cumsum(1, dtype=torch.int32)
        below = torch.nn.functional.pad(summed, (1, 0))
        held = below[:, bf16.WINDOW // 2 :][:, :128] - below[:, :128]
        # Ties go to the lowest base, on every device: make each score unique.
        score = held * 128 + torch.arange(127, -1, -1, dtype=torch.int32, device=bits.device)
        best = score.amax(1)
        base = base.index_copy(0, wide, (127 - best % 128) * 2)
        outliers = outliers.index_copy(0, wide, BLOCK_VALUES - best // 128)
    return base, outliers


def encode_blocks(bits: Tensor, max_exceptions: int) -> tuple[Tensor, Tensor]:
    """Encode blocks.

    Parameters
    ----------
    bits : Tensor
        [blocks, 512] int32 bit patterns (0 to 65535), ordered by position.
    max_exceptions : int
        0 to 4.

    Returns
    -------
    descriptors : Tensor
        [blocks] uint8.
    rows : Tensor
        [blocks, 1024] uint8; bytes past the block's size are unspecified.

    References
    ----------
    layouts/FORMAT.md, sections 5 and 6.
    """
    base, outliers = outlier_counts(bits)
    rows = torch.empty(len(bits), ROW_BYTES, dtype=torch.uint8, device=bits.device)

    raw = outliers > max_exceptions
    chosen = torch.nonzero(raw).flatten()
    rows[chosen] = _raw_rows(bits[chosen])

    chosen = torch.nonzero(~raw).flatten()
    values, base_of = bits[chosen], base[chosen, None]
    rows[chosen, : block.COMPRESSED_KIND.nbytes] = _compressed_rows(values, base_of)

    patched = torch.nonzero(~raw & (outliers > 0)).flatten()
    start = block.COMPRESSED_KIND.nbytes
    rows[patched, start : block.EXCEPTIONS_KIND.nbytes] = _entry_rows(
        bits[patched], base[patched, None], outliers[patched, None]
    )
    descriptors = (base >> 1) + block.EXCEPTIONS * (outliers > 0)
    return torch.where(raw, block.RAW, descriptors).to(torch.uint8), rows


def _raw_rows(bits: Tensor) -> Tensor:
    tiles = bits.view(-1, LANES, TILES, FRAGMENT).transpose(1, 2).reshape(-1, BLOCK_VALUES)
    return tiles.to(torch.int16).view(torch.uint8)


def _compressed_rows(bits: Tensor, base: Tensor) -> Tensor:
    offset = (bits >> 7 & 0xFF) - base
    offset = torch.where((offset < 0) | (offset >= bf16.WINDOW), 0, offset >> 1)
    sign, offset = (x.view(-1, BLOCK_VALUES // 8, 2, 4) for x in (bits >> 15, offset))
    codes = sign[:, :, 0] << 7 | sign[:, :, 1] << 6 | offset[:, :, 1] << 3 | offset[:, :, 0]
    return torch.cat([bits & 0xFF, codes.flatten(1)], 1).to(torch.uint8)


def _entry_rows(bits: Tensor, base: Tensor, outliers: Tensor) -> Tensor:
    offset = (bits >> 7 & 0xFF) - base
    outside = (offset < 0) | (offset >= bf16.WINDOW)
    # Outliers first, each group by position: a stable sort of "is inside".
    order = torch.argsort((~outside).to(torch.uint8), dim=1, stable=True)
    slots = torch.arange(block.MAX_EXCEPTIONS, device=bits.device, dtype=torch.int32)
    used = torch.minimum(slots[None], outliers - 1)  # unused entries repeat the last used one
    at = order.gather(1, used.long())
    high = bits.gather(1, at) >> 8
    byte = (at & 3).to(torch.int32)
    selector = block.IDENTITY_SELECTOR + ((7 - byte) << 4 * byte)
    entry = selector | (at >> 2).to(torch.int32) << 16 | high << 24
    return entry.to(torch.int32).view(torch.uint8)


def decode_blocks(descriptors: Tensor, rows: Tensor, max_exceptions: int) -> Tensor:
    """Decode blocks: inverse of `encode_blocks`.

    Parameters
    ----------
    descriptors : Tensor
        [blocks] uint8.
    rows : Tensor
        [blocks, 1024] uint8; bytes past the block's size are ignored.
    max_exceptions : int
        0 to 4: what the layout allows.

    Returns
    -------
    Tensor
        [blocks, 512] int32 bit patterns (0 to 65535), ordered by position.

    Raises
    ------
    FormatError
        If a descriptor or an exception entry is one that no writer makes.
    """
    kinds = block_kinds(descriptors)
    check_descriptors(kinds, descriptors, max_exceptions)
    words = torch.empty(len(rows), BLOCK_VALUES // 2, dtype=torch.int32, device=rows.device)

    chosen = torch.nonzero(kinds == KINDS.index(block.RAW_KIND)).flatten()
    raw = rows[chosen].view(torch.int32).view(-1, TILES, LANES, FRAGMENT // 2)
    words[chosen] = raw.transpose(1, 2).reshape(-1, BLOCK_VALUES // 2)

    for kind in (block.COMPRESSED_KIND, block.EXCEPTIONS_KIND):
        chosen = torch.nonzero(kinds == KINDS.index(kind)).flatten()
        half_base = (descriptors[chosen] & 0x7F).to(torch.int32)
        data = rows[chosen, : kind.nbytes].contiguous().view(torch.int32)
        words[chosen] = _rebuilt_words(data, half_base, max_exceptions)
    low, high = words & 0xFFFF, words >> 16 & 0xFFFF
    return torch.stack([low, high], 2).flatten(1)


def _rebuilt_words(data: Tensor, half_base: Tensor, max_exceptions: int) -> Tensor:
    """[blocks, 256] words of two values, from rows of 192 words (196 with exceptions)."""
    low, codes, entries = data.split(
        [block.LOW_PLANE // 4, block.CODE_PLANE // 4, data.shape[1] - _PLANE_WORDS], 1
    )
    _check_entries(entries, max_exceptions)
    low = low.view(-1, BLOCK_VALUES // FRAGMENT, 2)
    registers = rebuild(
        (low[..., 0], low[..., 1]),
        codes,
        half_base[:, None],
        _OPS,
        fragment=torch.arange(BLOCK_VALUES // FRAGMENT, dtype=torch.int32, device=data.device),
        entries=tuple(entry[:, None] for entry in entries.unbind(1)),
    )
    return torch.stack(registers, 2).flatten(1)


def check_descriptors(kinds: Tensor, descriptors: Tensor, max_exceptions: int) -> None:
    """Raise FormatError if a descriptor names no kind or one that `max_exceptions` forbids."""
    wrong = kinds == _INVALID
    if max_exceptions == 0:
        wrong = wrong | (kinds == KINDS.index(block.EXCEPTIONS_KIND))
    if wrong.any():
        raise FormatError(
            f"block descriptor {int(descriptors[wrong][0])} is one that no writer makes with "
            f"max_exceptions={max_exceptions}: the page is damaged, or of another layout"
        )


def _check_entries(entries: Tensor, max_exceptions: int) -> None:
    """Raise FormatError unless [blocks, 4] int32 entries are as FORMAT.md section 5 says."""
    if not entries.shape[1]:
        return
    selector, top = entries & 0xFFFF, entries >> 16 & 0xFF
    byte = torch.full_like(entries, -1)
    for i in range(4):
        byte[selector == block.pack_entry(i, 0)] = i
    at = top << 2 | byte
    repeats = entries[:, 1:] == entries[:, :-1]
    ascends = at[:, 1:] > at[:, :-1]
    ended = repeats.cumsum(1) - repeats.long() > 0  # an earlier entry was a repetition already
    fine = (byte >= 0).all(1) & (top < 128).all(1)
    fine &= (repeats | (ascends & ~ended)).all(1)
    fine &= block.MAX_EXCEPTIONS - repeats.sum(1) <= max_exceptions
    if not fine.all():
        wrong = [f"{entry & 0xFFFFFFFF:#010x}" for entry in entries[~fine][0].tolist()]
        raise FormatError(
            f"exception entries {', '.join(wrong)} are malformed or more than "
            f"max_exceptions={max_exceptions}: the page is damaged, or of another layout"
        )
