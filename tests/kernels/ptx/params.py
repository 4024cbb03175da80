"""Values of kernel parameters."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from .parser import Param

Value = int | bytes | Mapping[int, int]


def tensor(
    address: int,
    shape: Sequence[int] = (),
    strides: Sequence[int] = (),
    *,
    shape_bits: int = 32,
    stride_bits: int = 64,
) -> bytes:
    """Return the struct that CuTe DSL passes for a tensor: pointer, extents, strides.

    Parameters
    ----------
    address : int
        Of its first element, from `Simulator.alloc`.
    shape, strides : sequence of int
        The extents, and the strides in elements, that are not known when the kernel is compiled,
        in their order.  The others are not passed.
    shape_bits, stride_bits : {32, 64}
        Width of each: as ``sym_int`` or ``sym_int64`` and the fake tensor declare them.

    Returns
    -------
    bytes
    """
    letter = {32: "i", 64: "q"}
    fields = f"P{len(shape)}{letter[shape_bits]}{len(strides)}{letter[stride_bits]}0P"
    return struct.pack(f"@{fields}", address, *shape, *strides)


def param_bytes(param: Param, value: Value) -> tuple[bytearray, bytearray]:
    """Return the bytes of a parameter, and which of them have a value."""
    data, known = bytearray(param.size), bytearray(param.size)
    if isinstance(value, (bytes, bytearray)):
        fields = [(0, bytes(value))]
        if len(value) != param.size:
            raise ValueError(f"{len(value)} bytes for {param}")
    else:
        ints = dict(value) if isinstance(value, Mapping) else {0: value}
        stops = [*sorted(ints)[1:], param.size]
        fields = []
        for (offset, number), stop in zip(sorted(ints.items()), stops, strict=True):
            width = min(stop - offset, 8)
            number = int(number)
            if not -(1 << 8 * width - 1) <= number < 1 << 8 * width:
                raise OverflowError(f"{number} does not fit the {width} bytes at {offset}")
            fields.append((offset, (number % (1 << 8 * width)).to_bytes(width, "little")))
    for offset, raw in fields:
        data[offset : offset + len(raw)] = raw
        known[offset : offset + len(raw)] = b"\1" * len(raw)
    return data, known
