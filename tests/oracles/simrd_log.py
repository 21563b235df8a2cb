"""Logs of eager programs in plain Python: what happened, as a schedule for `oracles.simrd`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE, GET, PIN, RELEASE = "compute", "get", "pin", "release"


@dataclass
class Operation:
    """Inputs are tensors; output k is tensor `first + k`, of `sizes[k]` bytes (0 for an alias).

    `aliases[k]` is the input whose storage output k shares, -1 for a storage of its own.
    """

    name: str
    cost: int
    inputs: list[int]
    sizes: list[int]
    aliases: list[int]
    first: int


@dataclass
class Program:
    """Operations, and the commands (what, number of an operation or tensor) in order."""

    operations: list[Operation] = field(default_factory=list)
    commands: list[tuple[str, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of tensors
    ignored_releases: int = 0


class _Reader:
    def __init__(self) -> None:
        self.program = Program()
        self.bound: dict[str, int] = {}  # names in the order of their first definition
        self.references: list[int] = []  # of tensors
        self.storage_sizes: list[int] = []  # of tensors

    def operation(
        self, name: str, cost: int, inputs: list[int], outputs: list[tuple[str, int, int]]
    ) -> list[int]:
        first = len(self.references)
        for label, size, alias in outputs:
            shared = alias >= 0
            self.storage_sizes.append(self.storage_sizes[inputs[alias]] if shared else size)
            self.references.append(1)
            self.program.names.append(label)
        self.program.commands.append((COMPUTE, len(self.program.operations)))
        self.program.operations.append(
            Operation(
                name,
                cost,
                inputs,
                [0 if alias >= 0 else size for _, size, alias in outputs],
                [alias for _, _, alias in outputs],
                first,
            )
        )
        return list(range(first, len(self.references)))

    def get(self, tensor: int) -> None:
        self.references[tensor] += 1
        self.program.commands.append((GET, tensor))

    def release(self, tensor: int) -> None:
        self.references[tensor] -= 1
        self.program.commands.append((RELEASE, tensor))

    def rebind(self, name: str, tensor: int) -> None:
        self.release(self.bound[name])
        self.bound[name] = tensor

    def mutate(self, line: dict[str, Any]) -> None:
        """Copy on write: the names of the mutated arguments stand for new tensors from here."""
        inputs = [self.bound[name] for name in line["ARGS"]]
        mutated = [int(index) for index in line["MUTATE"]]
        made = self.operation(
            line["NAME"],
            int(line["TIME"]),
            inputs,
            [(line["ARGS"][i] + "$", self.storage_sizes[inputs[i]], -1) for i in mutated],
        )
        for i, tensor in zip(mutated, made, strict=True):
            self.rebind(line["ARGS"][i], tensor)

    def read(self, lines: Iterator[dict[str, Any]]) -> None:
        for line in lines:
            match line["INSTRUCTION"]:
                case "CONSTANT":
                    size = int(_follower(lines, "MEMORY", line["NAME"]))
                    (tensor,) = self.operation("constant", 0, [], [(line["NAME"], size, -1)])
                    self.bound[line["NAME"]] = tensor
                    self.program.commands.append((PIN, tensor))
                case "CALL":
                    inputs = [self.bound[name] for name in line["ARGS"]]
                    outputs = []
                    for name in line["RESULT"]:
                        size = int(_follower(lines, "MEMORY", name))
                        outputs.append((name, size, int(_follower(lines, "ALIAS", name))))
                    made = self.operation(line["NAME"], int(line["TIME"]), inputs, outputs)
                    self.bound.update(zip(line["RESULT"], made, strict=True))
                case "MUTATE":
                    self.mutate(line)
                case "COPY":
                    self.bound[line["DST"]] = self.bound[line["SRC"]]
                    self.get(self.bound[line["SRC"]])
                case "COPY_FROM":
                    tensor = self.bound[line["SRC"]]
                    self.rebind(line["DST"], tensor)
                    self.get(tensor)
                case "RELEASE" if line["NAME"] in self.bound:
                    self.release(self.bound[line["NAME"]])
                case "RELEASE":
                    self.program.ignored_releases += 1
                case "PIN":
                    self.program.commands.append((PIN, self.bound[line["NAME"]]))
                case "ANNOTATE":
                    if line["ANNOTATION"] == "START":
                        self.__init__()  # type: ignore[misc]
                case other:
                    raise ValueError(f"unknown instruction {other!r}")
        for tensor in self.bound.values():
            if self.references[tensor] > 0:
                self.program.commands.append((PIN, tensor))


def _follower(lines: Iterator[dict[str, Any]], kind: str, name: str) -> str:
    line = next(lines)
    if (line["INSTRUCTION"], line["NAME"]) != (kind, name):
        raise ValueError(f"found {line}, expected {kind} of {name}")
    return line[kind]


def read_log(source: str | bytes | Path) -> Program:
    """The program in a log: its text, or the path of its file.

    START drops what came before it; names that hold a reference at the end are pinned, in the
    order in which they were first defined.
    """
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    reader = _Reader()
    reader.read(json.loads(line) for line in text.splitlines() if line.strip())
    return reader.program
