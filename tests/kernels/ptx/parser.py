"""PTX text to a `Program`: instructions with resolved operands, parameters, shared variables.

Knows the grammar and no instruction: an opcode is a list of parts, an operand one of the small
classes below.  Names declared in a ``{ }`` scope, as inline assembly does, are their own registers
and labels, so the same block may appear many times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = r"[%\w$]+"
REGISTER_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}
REGISTER_BITS |= {f"{sign}{bits}": bits for sign in "us" for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Register:
    """A declared register: its place in the register file and its width, 1 for a predicate."""

    index: int
    name: str
    bits: int


@dataclass(frozen=True)
class Immediate:
    """A constant, of any sign; the bits of it if it was written as ``0f`` or ``0d``."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A variable, a label or a special register: what a name is depends on where it stands."""

    name: str
    scope: Scope


@dataclass(frozen=True)
class Negated:
    """A predicate operand with ``!`` before it."""

    register: Register


@dataclass(frozen=True)
class Sequence:
    """``{a, b}``, or ``a|b`` with `paired`."""

    items: tuple[Operand, ...]
    paired: bool = False


@dataclass(frozen=True)
class Address:
    """``[base+offset]``."""

    base: Operand
    offset: int


class Sink:
    """The operand ``_``: a result nobody wants."""


Operand = Register | Immediate | Symbol | Negated | Sequence | Address | Sink


@dataclass(eq=False)
class Scope:
    """The names between two braces."""

    parent: Scope | None = None
    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def register(self, name: str) -> Register | None:
        """Find the register of a name here or further out."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> int:
        """Find the instruction number of a label here or further out."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        raise KeyError(f"label {name} is not declared")


@dataclass(frozen=True)
class Instruction:
    """One statement: ``@predicate opcode operands;``."""

    opcode: str
    operands: tuple[Operand, ...]
    predicate: Register | Negated | None
    text: str
    line: int

    def __str__(self) -> str:
        """Return the statement with its line number, as errors show it."""
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class Variable:
    """A ``.shared``, ``.global`` or ``.const`` array; `size` is None for ``.extern name[]``."""

    name: str
    align: int
    size: int | None
    data: bytes | None = None


@dataclass(frozen=True)
class Param:
    """A parameter of the entry and where the kernel reads it.

    Attributes
    ----------
    name : str
    size, align : int
        In bytes.
    loads : tuple of (int, str)
        Byte offset and type of every ``ld.param`` of it, in ascending order.  For the struct that
        a dynamic tensor becomes, this shows where its pointer, extents and strides lie.
    """

    name: str
    size: int
    align: int
    loads: tuple[tuple[int, str], ...] = ()


@dataclass
class Program:
    """An entry and what it refers to."""

    name: str
    instructions: list[Instruction]
    params: list[Param]
    shared: list[Variable]
    module: list[Variable]
    register_bits: list[int]
    block: tuple[int, int, int] | None


def parse(ptx: str, entry: str | None = None) -> Program:
    """Parse one entry of a module.

    Parameters
    ----------
    ptx : str
        The text of the module.
    entry : str, optional
        Its name; may be left out where there is only one.

    Returns
    -------
    Program
    """
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), ptx, flags=re.DOTALL)
    ptx = re.sub(r"^[ \t]*\.loc\b[^\n]*", "", ptx, flags=re.MULTILINE)  # has no semicolon
    found = {m[1]: m for m in re.finditer(r"\.entry\s+([\w$]+)", ptx)}
    if entry is None:
        if len(found) != 1:
            raise ValueError(f"name one of the entries: {', '.join(found) or 'there is none'}")
        (entry,) = found
    if entry not in found:
        raise ValueError(f"no entry {entry}, only {', '.join(found) or 'nothing'}")
    start = ptx.index("{", found[entry].end())
    end = _closing_brace(ptx, start)
    head = ptx[found[entry].end() : start]

    body = _Body(ptx, start + 1, end)
    outside = "".join(_top_level(ptx))
    block = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head)
    return Program(
        name=entry,
        instructions=body.instructions,
        params=_params(head, body.instructions),
        shared=_variables(outside, "shared") + body.shared,
        module=_variables(outside, "global") + _variables(outside, "const"),
        register_bits=body.register_bits,
        block=tuple(int(size or 1) for size in block.groups()) if block else None,
    )


def _closing_brace(ptx: str, start: int) -> int:
    depth = 0
    for found in re.compile(r"[{}]").finditer(ptx, start):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.start()
    raise ValueError("a brace is not closed")


def _top_level(ptx: str) -> Iterator[str]:
    """Yield the text outside function bodies; the braces of initialisers stay."""
    position = 0
    for found in re.finditer(r"\.(?:entry|func)\b[^;{]*\{", ptx):
        if found.start() >= position:
            yield ptx[position : found.start()]
            position = _closing_brace(ptx, found.end() - 1) + 1
    yield ptx[position:]


def _variables(text: str, space: str) -> list[Variable]:
    pattern = (
        rf"\.{space}\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)((?:\[\d*\])?)\s*(?:=([^;]*))?;"
    )
    found = []
    for align, kind, name, length, init in re.findall(pattern, text):
        width = REGISTER_BITS[kind] // 8
        data = None
        if init:
            values = [int(value, 0) for value in re.findall(r"-?\w+", init)]
            data = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in values)
        size = None if length == "[]" else width * int(length[1:-1] or 1) if length else width
        found.append(Variable(name, int(align or width), size, data))
    return found


def _params(head: str, instructions: list[Instruction]) -> list[Param]:
    loads: dict[str, set[tuple[int, str]]] = {}
    for instruction in instructions:
        if instruction.opcode.startswith("ld.param"):
            address = instruction.operands[1]
            if isinstance(address, Address) and isinstance(address.base, Symbol):
                kind = instruction.opcode.removeprefix("ld.param.")
                loads.setdefault(address.base.name, set()).add((address.offset, kind))
    params = []
    for declared in re.findall(r"\.param\s+([^,)]*)", head):
        align = re.match(r"\.align\s+(\d+)", declared)
        kind = re.search(r"\.([busf]\d+)\b", declared)
        name = re.search(r"([\w$]+)\s*(?:\[(\d+)\])?\s*$", declared)
        if kind is None or name is None:
            raise NotImplementedError(f".param {declared}")
        width = REGISTER_BITS[kind[1]] // 8
        size = width * int(name[2] or 1)
        used = tuple(sorted(loads.get(name[1], ())))
        params.append(Param(name[1], size, int(align[1]) if align else width, used))
    return params


class _Body:
    """The statements of a function body, parsed in order."""

    def __init__(self, ptx: str, start: int, end: int) -> None:
        """Parse ``ptx[start:end]``."""
        self.instructions: list[Instruction] = []
        self.shared: list[Variable] = []
        self.register_bits: list[int] = []
        scope = Scope()
        position, line = start, ptx.count("\n", 0, start) + 1
        token = re.compile(r"\s+|[{}]|([\w$]+)\s*:(?!:)|[^;]*;")
        while position < end:
            found = token.match(ptx, position, end)
            if found is None:
                raise ValueError(f"line {line}: cannot parse {ptx[position:end][:60]!r}")
            text = found[0].strip()
            if text == "{":
                scope = Scope(scope)
            elif text == "}":
                if scope.parent is None:
                    raise ValueError(f"line {line}: a brace too many")
                scope = scope.parent
            elif found[1]:
                scope.labels[found[1]] = len(self.instructions)
            elif text.startswith("."):
                self._directive(text, scope, line)
            elif text and text != ";":
                self._instruction(text[:-1], scope, line)
            line += found[0].count("\n")
            position = found.end()

    def _directive(self, text: str, scope: Scope, line: int) -> None:
        kind = text.split()[0]
        if kind == ".reg":
            width, names = re.match(r"\.reg\s+\.(\w+)\s+([^;]*);", text).groups()
            for name in names.split(","):
                stem, count = re.match(rf"\s*({NAME})\s*(?:<(\d+)>)?\s*$", name).groups()
                for each in [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]:
                    bits = REGISTER_BITS[width]
                    scope.registers[each] = Register(len(self.register_bits), each, bits)
                    self.register_bits.append(bits)
        elif kind == ".shared":
            self.shared += _variables(text, "shared")
        elif kind != ".pragma":
            raise NotImplementedError(f"line {line}: {text}")

    def _instruction(self, text: str, scope: Scope, line: int) -> None:
        text = " ".join(text.split())
        predicate = None
        found = re.match(rf"@(!?)\s*({NAME})\s+", text)
        rest = text
        if found:
            register = scope.register(found[2])
            if register is None:
                raise ValueError(f"line {line}: predicate {found[2]} is not declared")
            predicate = Negated(register) if found[1] else register
            rest = text[found.end() :]
        opcode, _, operands = rest.partition(" ")
        parsed = tuple(self._operand(each, scope, line) for each in _split(operands))
        self.instructions.append(Instruction(opcode, parsed, predicate, text, line))

    def _operand(self, text: str, scope: Scope, line: int) -> Operand:
        if text.startswith("{"):
            return Sequence(tuple(self._operand(p, scope, line) for p in _split(text[1:-1])))
        if text.startswith("["):
            found = re.fullmatch(rf"\[\s*({NAME})\s*(?:\+?\s*(-?\s*\w+))?\s*\]", text)
            if found is None:
                raise NotImplementedError(f"line {line}: address {text}")
            base = self._operand(found[1], scope, line)
            return Address(base, int((found[2] or "0").replace(" ", ""), 0))
        if "|" in text:
            items = tuple(self._operand(p.strip(), scope, line) for p in text.split("|"))
            return Sequence(items, paired=True)
        if text == "_":
            return Sink()
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            return Immediate(int(text.removesuffix("U"), 0))
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
            return Immediate(int(text[2:], 16))
        if text.startswith("!"):
            register = scope.register(text[1:].strip())
            if register is None:
                raise ValueError(f"line {line}: {text[1:]} is not declared")
            return Negated(register)
        return scope.register(text) or Symbol(text, scope)


def _split(text: str) -> list[str]:
    """Split operands at the commas outside braces and brackets."""
    return [each.strip() for each in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]
