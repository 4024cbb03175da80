"""From an instruction to a step: what every instruction's decoding shares.

A step is a function of the warp that carries one instruction out.  `operation` enters the function
that makes it into `TABLE` by opcode; that function takes modifiers and operands off a `Decoder`.
Whatever it leaves raises NotImplementedError, so no modifier is ignored by accident.

Values are vectors of 32 lanes, unsigned and as wide as the instruction's type (bool for a
predicate).  They are never changed in place: registers share them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import Unwritten
from .parser import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Program,
    Register,
    Sequence,
    Sink,
    Symbol,
)

if TYPE_CHECKING:
    from .warp import Warp

LANES = 32
ALL = 0xFFFFFFFF
BLOCKED = -1  # the instruction waits: try it again later
DIVERGED = -2  # the step has set the program counters itself
YIELDED = -3  # done, and perhaps one turn of a loop that waits for other lanes or warps
UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}

Step = Callable[["Warp"], "int | None"]
Fetch = Callable[["Warp"], np.ndarray]
Put = Callable[["Warp", np.ndarray], None]

TABLE: dict[str, Callable[[Decoder], Step]] = {}
PREDICATES_ITSELF: set[str] = set()


def operation(*opcodes: str, predicates_itself: bool = False) -> Callable:
    """Enter a decoding function into `TABLE`.

    `predicates_itself`: it makes a step that heeds the instruction's predicate, as branches do,
    because they differ from skipping where the predicate is false.
    """

    def enter(function: Callable[[Decoder], Step]) -> Callable[[Decoder], Step]:
        for opcode in opcodes:
            TABLE[opcode] = function
            if predicates_itself:
                PREDICATES_ITSELF.add(opcode)
        return function

    return enter


class Kind(NamedTuple):
    """A type such as ``.s32``: its letter (``p`` for a predicate) and width."""

    letter: str
    bits: int

    @property
    def signed(self) -> bool:
        """Whether values compare, divide, shift and widen with a sign."""
        return self.letter == "s"

    @property
    def dtype(self) -> type:
        """The numpy type of values of this type."""
        return (SIGNED if self.signed else UNSIGNED)[self.bits]


def kind_of(part: str) -> Kind | None:
    """Return the `Kind` of an opcode part, None if it is something else."""
    if part == "pred":
        return Kind("p", 1)
    found = re.fullmatch(r"([usbf])(8|16|32|64)", part)
    return Kind(found[1], int(found[2])) if found else None


def constant(value: int, bits: int) -> np.ndarray:
    """Return a vector that has `value` in every lane."""
    vector = np.full(LANES, value & ((1 << bits) - 1), UNSIGNED[bits])
    vector.flags.writeable = False
    return vector


def columns(*values: np.ndarray) -> np.ndarray:
    """Return vectors side by side: row l holds what lane l has."""
    table = np.empty((values[0].size, len(values)), values[0].dtype)
    for column, value in enumerate(values):
        table[:, column] = value
    return table


class Layout(NamedTuple):
    """What operands need to know beyond the instruction."""

    program: Program
    symbols: dict[str, int]


class Decoder:
    """An instruction of which modifiers and operands are taken."""

    def __init__(self, instruction: Instruction, layout: Layout, pc: int) -> None:
        """Start with all modifiers; `pc` is the instruction's number."""
        self.instruction = instruction
        self.layout = layout
        self.pc = pc
        self.name, *self.parts = re.split(r"\.(?=[^.])", instruction.opcode)
        self.operands = list(instruction.operands)

    # Modifiers.

    def flag(self, *names: str) -> bool:
        """Take a modifier; True if one of the names was there."""
        for name in names:
            if name in self.parts:
                self.parts.remove(name)
                return True
        return False

    def choice(self, *names: str) -> str | None:
        """Take the one modifier of a group, None if there is none."""
        for part in self.parts:
            if part in names:
                self.parts.remove(part)
                return part
        return None

    def discard(self, pattern: str) -> None:
        """Drop modifiers that change no result, such as cache hints."""
        self.parts = [part for part in self.parts if not re.fullmatch(pattern, part)]

    def kind(self, default: str | None = None) -> Kind:
        """Take the last type of the opcode."""
        for part in reversed(self.parts):
            kind = kind_of(part)
            if kind:
                self.parts.reverse()
                self.parts.remove(part)
                self.parts.reverse()
                return kind
        if default:
            return kind_of(default)
        raise self.unknown()

    def unknown(self) -> NotImplementedError:
        """Make the error for an instruction that is not modelled."""
        return NotImplementedError(str(self.instruction))

    def expect(self, count: int, *more: int) -> None:
        """Refuse a number of operands that the decoding does not know."""
        if len(self.operands) not in (count, *more):
            raise self.unknown()

    # Operands.

    def fetch(self, which: int | Operand, kind: Kind | int, *, narrow: bool = False) -> Fetch:
        """Make the function that reads an operand as a vector of a type.

        `narrow`: the register may be wider than the type, as ``st`` and ``cvt`` allow.
        """
        operand = self.operands[which] if isinstance(which, int) else which
        if isinstance(kind, int):
            kind = Kind("b", kind)
        if isinstance(operand, Negated):
            inner = self.fetch(operand.register, 1)
            return lambda w: ~inner(w)
        if isinstance(operand, Register):
            return self._register(operand, kind, narrow)
        if isinstance(operand, Immediate):
            value = constant(operand.value, kind.bits)
        elif isinstance(operand, Symbol):
            if operand.name.startswith("%"):
                return self._special(operand.name, kind)
            if operand.name not in self.layout.symbols:
                raise NotImplementedError(f"{operand.name} in {self.instruction}")
            value = constant(self.layout.symbols[operand.name], kind.bits)
        else:
            raise self.unknown()
        value = value.view(kind.dtype)
        return lambda w: value

    def _register(self, operand: Register, kind: Kind, narrow: bool) -> Fetch:
        index, dtype = operand.index, kind.dtype
        wider = operand.bits > kind.bits
        if operand.bits < kind.bits or (wider and (not narrow or kind.bits == 1)):
            raise NotImplementedError(f"width of {operand.name} in {self.instruction}")

        def plain(w: Warp) -> np.ndarray:
            if w.unset[index] & w.mask:
                raise w.unwritten(operand)
            return w.registers[index]

        if wider:
            return lambda w: plain(w).astype(dtype)
        if kind.signed:

            def signed(w: Warp) -> np.ndarray:
                if w.unset[index] & w.mask:
                    raise w.unwritten(operand)
                return w.registers[index].view(dtype)

            return signed
        return plain

    def _special(self, name: str, kind: Kind) -> Fetch:
        from .warp import SPECIAL

        if name not in SPECIAL or kind.bits != 32:
            raise NotImplementedError(f"{name} in {self.instruction}")
        dtype = kind.dtype
        return lambda w: w.special[name].view(dtype)

    def put(self, which: int | Operand, kind: Kind | int, *, widen: bool = False) -> Put:
        """Make the function that writes a vector of a type to an operand, in active lanes.

        `widen`: the register may be wider than the type, as ``ld`` and ``cvt`` allow.
        """
        operand = self.operands[which] if isinstance(which, int) else which
        if isinstance(kind, int):
            kind = Kind("b", kind)
        if isinstance(operand, Sink):
            return lambda w, value: None
        if not isinstance(operand, Register):
            raise self.unknown()
        index, bits = operand.index, operand.bits
        if bits < kind.bits or (bits > kind.bits and not widen):
            raise NotImplementedError(f"width of {operand.name} in {self.instruction}")
        dtype = UNSIGNED[bits]

        def plain(w: Warp, value: np.ndarray) -> None:
            if w.full:
                w.registers[index] = value
                w.unset[index] = 0
            else:
                w.registers[index] = np.where(w.active, value, w.registers[index])
                w.unset[index] &= ~w.mask

        if bits > kind.bits:
            widened = SIGNED[bits] if kind.signed else dtype

            def extend(w: Warp, value: np.ndarray) -> None:
                plain(w, value.view(kind.dtype).astype(widened).view(dtype))

            return extend
        if kind.signed:
            return lambda w, value: plain(w, value.view(dtype))
        return plain

    def items(self, which: int | Operand) -> tuple[Operand, ...]:
        """Return the parts of ``{a, b}``, or the operand itself as the only one."""
        operand = self.operands[which] if isinstance(which, int) else which
        return operand.items if isinstance(operand, Sequence) else (operand,)

    def address(self, which: int) -> Fetch:
        """Make the function that computes the address of a ``[base+offset]`` operand."""
        operand = self.operands[which]
        if not isinstance(operand, Address):
            raise self.unknown()
        bits = operand.base.bits if isinstance(operand.base, Register) else 64
        base = self.fetch(operand.base, bits)
        if not operand.offset:
            return base
        offset = constant(operand.offset, bits)
        return lambda w: base(w) + offset

    def uniform(self, which: int, kind: Kind | int = 32) -> Callable[[Warp], int]:
        """Make the function that reads an operand that all active lanes must agree on."""
        fetch = self.fetch(which, kind)

        def read(w: Warp) -> int:
            values = fetch(w) if w.full else fetch(w)[w.active]
            if (values != values[0]).any():
                raise NotImplementedError(f"lanes disagree on an operand of {self.instruction}")
            return int(values[0])

        return read


def decode(instruction: Instruction, layout: Layout, pc: int) -> Step:
    """Make the step of an instruction.

    Raises
    ------
    NotImplementedError
        If the opcode, a modifier or the form of an operand is not modelled.
    """
    decoder = Decoder(instruction, layout, pc)
    if decoder.name not in TABLE:
        raise decoder.unknown()
    try:
        step = TABLE[decoder.name](decoder)
    except NotImplementedError as error:
        if str(instruction) in str(error):
            raise
        raise NotImplementedError(f"{error} in {instruction}") from None
    if decoder.parts:
        raise NotImplementedError(f".{'.'.join(decoder.parts)} of {instruction}")
    if instruction.predicate is None or decoder.name in PREDICATES_ITSELF:
        return step
    predicate = decoder.fetch(instruction.predicate, 1)

    def guarded(w: Warp) -> int | None:
        taken = predicate(w) & w.active
        count = taken.tobytes().count(1)
        if count == w.count:
            return step(w)
        if not count:
            return None
        before = w.narrow(taken)
        result = step(w)
        w.restore(before)
        return result

    return guarded


def unwritten(register: Register, lanes: int) -> Unwritten:
    """Make the error for a register that active lanes read before writing it."""
    lane = (lanes & -lanes).bit_length() - 1
    return Unwritten(f"{register.name} is read before it is written, in lane {lane}")
