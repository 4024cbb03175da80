"""What a compiled kernel takes of a GPU, read from its cubin: an ELF file of NVIDIA's.

Registers and the stack frame are attributes in ``.nv.info``, records of a format byte, an attribute
byte and a length or a value; shared memory is the size of ``.nv.shared.NAME``; code that of the
``.text`` sections.  Tested against what ptxas itself prints.

Limits   64-bit little-endian ELF with symbol-indexed attributes, as ptxas 12 and 13 write them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

RESERVED_SMEM_BYTES = 1024
"""Shared memory of every block that CUDA keeps for itself from sm_90 on: ``.nv.shared`` counts it,
ptxas and a launch do not."""

_ENTRY = 0x10  # st_other of a symbol: a kernel, not a device function
_SIZED = 0x04  # format of an attribute that is followed by as many bytes as its value says
_FRAME_SIZE, _MIN_STACK_SIZE, _REGCOUNT = 0x11, 0x12, 0x2F


class Resources(NamedTuple):
    """What one thread (registers, local memory) and one block (shared memory) take."""

    entry: str
    registers: int
    local_bytes: int  # stack frame: spilled registers, and arrays indexed at run time
    smem_bytes: int  # static; what a launch asks for comes on top
    code_bytes: int  # all code of the cubin, padding included


class _Section(NamedTuple):
    name: str
    kind: int
    size: int
    link: int
    data: bytes


def read(cubin: bytes) -> dict[str, Resources]:
    """Resources of every kernel in a cubin, by name; ValueError if it is none."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no cubin: not a 64-bit little-endian ELF file")
    try:
        return _read(cubin)
    except (struct.error, LookupError, ValueError) as error:
        raise ValueError(f"this cubin ends early or is damaged ({error!r})") from None


def _read(cubin: bytes) -> dict[str, Resources]:
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    code_bytes = sum(s.size for s in sections if s.name.startswith(".text."))
    attributes: dict[tuple[int, int], int] = {}
    for attribute, value in _attributes(by_name[".nv.info"].data):
        if len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            attributes[attribute, symbol] = number
    found = {}
    for index, name in _entries(sections):
        frame = max(attributes.get((a, index), 0) for a in (_FRAME_SIZE, _MIN_STACK_SIZE))
        local = by_name.get(f".nv.local.{name}")
        shared = by_name.get(f".nv.shared.{name}")
        found[name] = Resources(
            name,
            attributes[_REGCOUNT, index],
            frame + (local.size if local else 0),
            max(0, shared.size - RESERVED_SMEM_BYTES) if shared else 0,
            code_bytes,
        )
    return found


def _sections(elf: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    sections = []
    for name, kind, _, _, offset, size, link, _, _, _ in headers:
        no_bits = kind in (0, 8)  # nothing, or memory that starts without contents
        data = b"" if no_bits else elf[offset : offset + size]
        if not no_bits and len(data) != size:
            raise IndexError(f"section at {offset} has {len(data)} of {size} bytes")
        sections.append(_Section(_text(elf, names_at + name), kind, size, link, data))
    return sections


def _entries(sections: list[_Section]) -> Iterator[tuple[int, str]]:
    """(index, name) of each symbol that is a kernel."""
    for table in sections:
        if table.kind != 2:  # symbols
            continue
        names = sections[table.link].data
        for index in range(len(table.data) // 24):
            name, info, other = struct.unpack_from("<IBB", table.data, 24 * index)
            if info & 0xF == 2 and other & _ENTRY:  # a function
                yield index, _text(names, name)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of each record with a value that has a size of its own."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            yield attribute, info[at : at + size]
            at += size


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("ascii")
