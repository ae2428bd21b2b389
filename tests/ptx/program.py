"""A kernel's PTX as a list of instructions. Knows the text's form; knows nothing of what an instruction does.

Labels and registers that inline assembly declares in braces of its own are renamed, so that a name is one thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 add.s32 %r1, %r2, 3;`: name "add.s32", args ("%r1", "%r2", "3"), predicate "%p1", negated."""

    name: str
    args: tuple[str, ...]
    predicate: str | None = None
    negated: bool = False

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.predicate} " if self.predicate else ""
        return f"{guard}{self.name} {', '.join(self.args)}"


@dataclass(frozen=True)
class Program:
    """`labels`: the index of the instruction behind each; `tables`: targets of each `brx.idx`; `registers`: the bits of
    each name, a predicate's 1; `params`: names in the order of the arguments."""

    name: str
    num_threads: int
    params: tuple[str, ...]
    registers: Mapping[str, int]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    tables: Mapping[str, tuple[str, ...]]

    def find(self, wanted: Callable[[Instruction], bool]) -> list[int]:
        """The indices of the instructions that are wanted."""
        return [index for index, instruction in enumerate(self.instructions) if wanted(instruction)]

    def changed(self, index: int, instruction: Instruction | None) -> Program:
        """With another instruction in that place, or without the one that is there."""
        instructions = list(self.instructions)
        instructions[index] = instruction or Instruction("nop", ())
        return replace(self, instructions=tuple(instructions))


def split_operands(text: str) -> tuple[str, ...]:
    """At commas outside of brackets.

    >>> split_operands("{%r1, %r2}, [%rd1 + 8], 3")
    ('{%r1, %r2}', '[%rd1 + 8]', '3')
    """
    return tuple(part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip())


def parse(ptx: str) -> Program:
    """Of the text's only kernel."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    text = "\n".join(line for line in lines if not re.match(r"\.(loc|file)\b", line))
    text = text.split(".section")[0]
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*(.*?)\{", text, re.S)
    assert entry is not None, "the text has no kernel"
    params = tuple(re.findall(rf"{re.escape(entry[1])}_param_\d+", entry[2]))
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    assert threads is not None, "the kernel does not say how many threads it has"
    reader = _Reader()
    for statement in text[entry.end() :].split(";"):
        reader.take(statement.strip())
    return Program(
        entry[1], int(threads[1]), params, reader.registers, tuple(reader.instructions), reader.labels, reader.tables
    )


class _Reader:
    """Statement by statement. `_scopes`: of each open brace, its number and the names it declares."""

    def __init__(self) -> None:
        self.registers: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self._scopes: list[tuple[int, set[str]]] = []
        self._num_scopes = 0

    def take(self, statement: str) -> None:
        while statement:
            if statement[0] == "{":
                self._num_scopes += 1
                self._scopes.append((self._num_scopes, set()))
                statement = statement[1:].strip()
            elif statement[0] == "}":
                if self._scopes:  # the last one is the kernel's
                    self._scopes.pop()
                statement = statement[1:].strip()
            elif label := re.match(r"([$\w]+):(?!:)\s*", statement):
                statement = statement[label.end() :]
                if statement.startswith(".branchtargets"):
                    self.tables[label[1]] = split_operands(statement.removeprefix(".branchtargets"))
                    return
                self.labels[self._own(label[1])] = len(self.instructions)
            else:
                self._instruction(statement)
                return

    def _own(self, label: str) -> str:
        return label if label.startswith("$") or not self._scopes else f"{label}@{self._scopes[-1][0]}"

    def _instruction(self, statement: str) -> None:
        if statement.startswith(".reg"):
            _, kind, names = statement.split(None, 2)
            for name in names.split(","):
                self._declare(name.strip(), 1 if kind == ".pred" else int(re.sub(r"\D", "", kind)))
        if statement.startswith("."):
            return
        for number, names in reversed(self._scopes):
            for name in names:
                statement = re.sub(rf"(?<![\w%.]){re.escape(name)}(?![\w.@])", f"{name}@{number}", statement)
        match = re.match(r"(?:@(!?)([%\w@]+)\s+)?([\w.:]+)\s*(.*)$", statement, re.S)
        assert match is not None, f"no instruction: {statement}"
        args = split_operands(match[4])
        if match[3].split(".")[0] == "bra":
            args = (self._own(args[0]),)
        self.instructions.append(Instruction(match[3], args, match[2], match[1] == "!"))

    def _declare(self, name: str, bits: int) -> None:
        many = re.match(r"(.+)<(\d+)>$", name)
        for one in [f"{many[1]}{index}" for index in range(int(many[2]))] if many else [name]:
            if self._scopes:
                number, names = self._scopes[-1]
                names.add(one)
                one = f"{one}@{number}"
            self.registers[one] = bits
