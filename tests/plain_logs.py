"""Lines of logs, and the parser again in plain Python."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from rotor.simrd.logs import CommandKind, Log

COMPUTE, GET, PIN, RELEASE = CommandKind


def lines(*instructions: dict[str, object]) -> bytes:
    return b"".join(json.dumps(i, sort_keys=True).encode() + b"\n" for i in instructions)


def constant(name: str, size: object = "8") -> bytes:
    return lines({"INSTRUCTION": "CONSTANT", "NAME": name}) + memory(name, size)


def memory(name: str, size: object = "8") -> bytes:
    return lines({"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": size})


def alias(name: str, index: object = "-1") -> bytes:
    return lines({"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": index})


def call(args: list[str], results: list[str], time: object = "5", name: str = "f") -> bytes:
    return lines(
        {"INSTRUCTION": "CALL", "NAME": name, "ARGS": args, "RESULT": results, "TIME": time}
    )


def other(kind: str, **fields: object) -> bytes:
    return lines({"INSTRUCTION": kind, **fields})


@dataclass
class Plain:
    """The parser again, as plainly as can be."""

    operations: list[tuple[str, int, list[int]]] = field(default_factory=list)
    tensors: list[tuple[str, int, int, bool]] = field(default_factory=list)
    storages: list[tuple[int, int]] = field(default_factory=list)
    commands: list[tuple[int, int]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    references: list[int] = field(default_factory=list)
    ignored: int = 0

    def operate(self, name, time, args, outputs):
        self.commands.append((COMPUTE, len(self.operations)))
        made = []
        for result, size, view in outputs:
            made.append(len(self.tensors))
            storage = len(self.storages) if view < 0 else self.tensors[args[view]][2]
            self.tensors.append((result, len(self.operations), storage, view >= 0))
            if view < 0:
                self.storages.append((size, made[-1]))
            self.references.append(1)
        self.operations.append((name, time, args))
        return made

    def release(self, tensor):
        self.references[tensor] -= 1
        self.commands.append((RELEASE, tensor))

    def get(self, tensor):
        self.references[tensor] += 1
        self.commands.append((GET, tensor))

    def read(self, text: bytes) -> Plain:
        rest = iter([json.loads(line) for line in text.splitlines() if line.strip()])
        for line in rest:
            kind, name = line["INSTRUCTION"], line.get("NAME")
            args = [self.names[arg] for arg in line.get("ARGS", [])]
            match kind:
                case "ANNOTATE":
                    if line["ANNOTATION"] == "START":
                        self.__init__()  # type: ignore[misc]
                case "CONSTANT":
                    (made,) = self.operate(
                        "constant", 0, [], [(name, int(next(rest)["MEMORY"]), -1)]
                    )
                    self.names[name] = made
                    self.commands.append((PIN, made))
                case "CALL":
                    outputs = [
                        (result, int(next(rest)["MEMORY"]), int(next(rest)["ALIAS"]))
                        for result in line["RESULT"]
                    ]
                    made = self.operate(name, int(line["TIME"]), args, outputs)
                    self.names.update(zip(line["RESULT"], made, strict=True))
                case "MUTATE":
                    mutated = [line["ARGS"][int(i)] for i in line["MUTATE"]]
                    sizes = [self.storages[self.tensors[self.names[m]][2]][0] for m in mutated]
                    outputs = [(f"{m}$", size, -1) for m, size in zip(mutated, sizes, strict=True)]
                    made = self.operate(name, int(line["TIME"]), args, outputs)
                    for old, new in zip(mutated, made, strict=True):
                        self.release(self.names[old])
                        self.names[old] = new
                case "COPY" | "COPY_FROM":
                    if kind == "COPY_FROM":
                        self.release(self.names[line["DST"]])
                    self.names[line["DST"]] = self.names[line["SRC"]]
                    self.get(self.names[line["SRC"]])
                case "RELEASE" if name not in self.names:
                    self.ignored += 1
                case "RELEASE":
                    self.release(self.names[name])
                case "PIN":
                    self.commands.append((PIN, self.names[name]))
        self.commands += [(PIN, t) for t in self.names.values() if self.references[t] > 0]
        return self


def assert_reads_as(log: Log, plain: Plain) -> None:
    assert log.operation_count == len(plain.operations)
    assert log.commands.tolist() == plain.commands
    assert log.storages.tolist() == plain.storages
    assert log.tensors[["operation", "storage", "is_alias"]].tolist() == [
        tensor[1:] for tensor in plain.tensors
    ]
    assert [log.tensor_name(i) for i in range(log.tensor_count)] == [t[0] for t in plain.tensors]
    for i, (name, time, args) in enumerate(plain.operations):
        row = log.operations[i]
        first = row["first_input"]
        assert log.operation_name(i) == name
        assert row["cost_ns"] == time
        assert log.inputs[first : first + row["input_count"]].tolist() == args
    assert [log.references(i) for i in range(log.tensor_count)] == plain.references
    assert {name: log.lookup(name) for name in plain.names} == plain.names
    assert log.ignored_releases == plain.ignored


def assert_equal(a: Log, b: Log) -> None:
    for what in ("operations", "inputs", "tensors", "storages", "commands"):
        np.testing.assert_array_equal(getattr(a, what), getattr(b, what))
    assert a.line_count == b.line_count
    assert a.backward_command == b.backward_command
    assert a.output_bytes == b.output_bytes
    names = [[log.tensor_name(i) for i in range(log.tensor_count)] for log in (a, b)]
    assert names[0] == names[1]


WHOLE = (
    constant("w", "100")
    + call(["w", "w"], ["a", "b"], "7")
    + memory("a", "30")
    + alias("a")
    + memory("b", "99")
    + alias("b", "1")
    + other("COPY", DST="c", SRC="a")
    + other("MUTATE", NAME="m_", ARGS=["w", "a"], MUTATE=[1], TIME="5")
    + other("ANNOTATE", ANNOTATION="BACKWARD")
    + other("COPY_FROM", DST="c", SRC="b")
    + other("RELEASE", NAME="a")
    + other("PIN", NAME="w")
)
