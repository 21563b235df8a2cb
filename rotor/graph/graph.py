"""Graphs of operations on storages, for programs and the planner. Needs no PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rotor import _core
from rotor.chain import Saved, check_header

FORMAT = "rotor.graph"
VERSION = 1
VERSION_WITH_TAPES = 2
Pinned = bool | Literal["first"]
FIRST: Literal["first"] = "first"
Clock = Literal["compute", "read", "write"]
CLOCKS: tuple[Clock, ...] = ("compute", "read", "write")
PHASES = ("forward", "loss", "backward")
LARGEST = 1 << 42
_ONCE, _RANDOM = 1, 2


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a graph.

    Parameters
    ----------
    name
        Name for people.
    cost_ns
        Time of one run, nanoseconds.
    inputs, outputs
        Numbers of the storages that it reads and makes.
    workspace_bytes
        Bytes that it needs beside them while it runs; negative, down to minus the bytes of its
        outputs, where these come to be as inputs go.
    phase
        "forward", "loss" or "backward".
    random
        It draws random numbers; further runs draw the same ones.
    once
        It must run exactly once; operations of the loss always do.
    module
        Path of the module that it belongs to.
    extra
        Further fields, kept in JSON.
    light_bytes
        Workspace of a run that does not make its lazy output; ``None``: `workspace_bytes`.
    clock
        "compute"; "read" of an operation that brings its one output from a second tier, where it
        stays; or "write" of one that runs once and writes to the tier, after the write of the
        operation before it. Where a program has a link, the times of the latter two are those of
        transfers, for whose ends computing waits where it needs them.
    """

    name: str
    cost_ns: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace_bytes: int = 0
    phase: str = "forward"
    random: bool = False
    once: bool = False
    module: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    light_bytes: int | None = None
    clock: Clock = "compute"

    @property
    def workspaces(self) -> tuple[int, int]:
        """Bytes of a run that makes all outputs, and of one without its lazy output."""
        return (
            self.workspace_bytes,
            self.workspace_bytes if self.light_bytes is None else self.light_bytes,
        )


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage of a graph.

    Parameters
    ----------
    bytes
        Its size.
    pinned
        True if it stays once it is made: outputs, gradients of parameters. A copy that a later run
        makes goes at once; with "first", with its last use.
    extra
        Further fields, kept in JSON.
    movable
        False if it must not move to a second tier of memory. Pinned storages, empty ones, lazy ones
        and those of the loss never do.
    lazy
        True for the tape of an operation, what autograd keeps of a stage: a run makes it only where
        something reads it before the next run. It holds the inputs of its making, so these must not
        be made again before it is read.
    """

    bytes: int
    pinned: Pinned = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    movable: bool = True
    lazy: bool = False

    @property
    def keeping(self) -> int:
        """Number in the core for the copies that stay: 0 none, 1 the first, 2 also ones in use."""
        return 2 if self.pinned == FIRST else int(self.pinned)


def _whole(what: str, value: Any, owner: object = "", least: int = 0) -> int:
    """Return a whole number; errors name it and its owner, whose text is made only for them."""
    if type(value) is int and least <= value <= LARGEST:
        return value
    where = f"{what} {owner}".strip()
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{where} must be a whole number, got {value!r}")
    if not least <= number <= LARGEST:
        raise ValueError(f"{where} = {number}, expected {least} to {LARGEST}")
    return number


class _Place(NamedTuple):
    """Operation as errors name it."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"operation {self.number} ({self.name})"


_Numbers = npt.NDArray[np.int64]
_Structure = tuple[_Numbers, _Numbers, _Numbers, _Numbers, _Numbers, _Numbers]


class Graph(Saved):
    """Operations on storages, in an order in which every input is made before it is read.

    Each storage is made by one operation. Tensors that exist before and after the step (parameters,
    buffers, the input batch) are no storages; views share the storage of their base.

    Parameters
    ----------
    storages
        Sizes in bytes, or `Storage` objects.
    pinned
        Flags of the storages that stay once they are made; ``None`` for none, or for objects.
    operations
        The operations in order.
    name
        Name for people.
    extra
        Further fields, kept in JSON.

    Raises
    ------
    ValueError
        No operations; a number out of range; a storage read before it is made, made twice or
        never; an unknown phase. The message names the operation or storage.
    TypeError
        A value is not of the expected type.
    """

    def __init__(
        self,
        storages: Iterable[int | Storage],
        pinned: Iterable[bool] | None,
        operations: Iterable[Operation],
        *,
        name: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        listed = list(storages)
        flags = [False] * len(listed) if pinned is None else [bool(flag) for flag in pinned]
        if len(flags) != len(listed):
            raise ValueError(f"pinned has {len(flags)} entries, expected {len(listed)}")
        self.storages = tuple(
            storage if isinstance(storage, Storage) else Storage(storage, flag)
            for storage, flag in zip(listed, flags, strict=True)
        )
        self.operations = tuple(operations)
        self.name = name
        self.extra = dict(extra or {})
        self._check()
        self.core = self._build_core()

    def _check(self) -> None:
        if not self.operations:
            raise ValueError("a graph needs at least one operation")
        for s, storage in enumerate(self.storages):
            _whole("bytes of storage", storage.bytes, s)
            if storage.lazy and storage.pinned:
                raise ValueError(f"storage {s} is lazy and pinned: a tape goes with its last use")
        makers: dict[int, int] = {}
        phase = 0
        for k, op in enumerate(self.operations):
            where = _Place(k, op.name)
            if op.phase not in PHASES:
                raise ValueError(
                    f"phase of {where} is {op.phase!r}, expected one of {', '.join(PHASES)}"
                )
            before, phase = phase, PHASES.index(op.phase)
            if phase < before:
                raise ValueError(
                    f"{where} is of phase {op.phase!r} and comes after one of phase "
                    f"{PHASES[before]!r}: expected forward, loss, backward in order"
                )
            _whole("cost_ns of", op.cost_ns, where)
            for s in (*op.inputs, *op.outputs):
                if _whole("a storage of", s, where) >= len(self.storages):
                    raise ValueError(f"{where} names storage {s}, there are {len(self.storages)}")
            for s in op.inputs:
                if s not in makers:
                    raise ValueError(f"{where} reads storage {s} before any operation makes it")
            for s in op.outputs:
                if s in makers:
                    raise ValueError(f"{where} makes storage {s}, which {makers[s]} made already")
                makers[s] = k
            self._check_workspaces(op, where)
            self._check_clock(op, where)
        for s in range(len(self.storages)):
            if s not in makers:
                raise ValueError(f"no operation makes storage {s}")
        self.producers: tuple[int, ...] = tuple(makers[s] for s in range(len(self.storages)))

    def _check_workspaces(self, op: Operation, where: _Place) -> None:
        outputs = [self.storages[s] for s in op.outputs]
        tapes = [storage.bytes for storage in outputs if storage.lazy]
        if len(tapes) > 1:
            raise ValueError(f"{where} makes {len(tapes)} lazy storages, expected one at most")
        most = sum(storage.bytes for storage in outputs)
        full, light = op.workspaces
        _whole("workspace_bytes of", full, where, -most)
        _whole("light_bytes of", light, where, sum(tapes) - most)

    def _check_clock(self, op: Operation, where: _Place) -> None:
        if op.clock not in CLOCKS:
            raise ValueError(
                f"clock of {where} is {op.clock!r}, expected one of {', '.join(CLOCKS)}"
            )
        made = [self.storages[s] for s in op.outputs]
        if op.clock == "read" and (
            op.inputs or len(made) != 1 or made[0].pinned or made[0].lazy or op.once or op.random
        ):
            raise ValueError(
                f"{where} reads from a second tier: expected no inputs, one output that is neither "
                "pinned nor lazy, and neither once nor random"
            )
        if op.clock == "write" and (made or not op.once):
            raise ValueError(f"{where} writes to a second tier: expected once, and no outputs")

    @property
    def is_plain(self) -> bool:
        """False with lazy storages, negative workspaces, or storages pinned as "first"."""
        return self.core.is_plain

    def require_plain(self, what: str) -> None:
        """Raise ValueError, which names what asks for it, for a graph that is not plain."""
        if not self.is_plain:
            raise ValueError(
                f"{what} takes no graph with lazy storages, negative workspaces, or storages "
                f'pinned as "{FIRST}"; rotor.graph.simulate does'
            )

    def _build_core(self) -> _core.Dataflow:
        parts = (
            array_of(op.cost_ns for op in self.operations),
            array_of(op.workspace_bytes for op in self.operations),
            *self.structure(),
            array_of(storage.bytes for storage in self.storages),
            array_of(storage.keeping for storage in self.storages),
            array_of(int(not storage.movable) for storage in self.storages),
            array_of(int(storage.lazy) for storage in self.storages),
            array_of(op.workspaces[1] for op in self.operations),
            array_of(CLOCKS.index(op.clock) for op in self.operations),
        )
        return _core.Dataflow(*parts)

    def structure(self) -> _Structure:
        """Return phases, flags, inputs and outputs of the operations, as the core takes them."""
        ops = self.operations
        return (
            array_of(PHASES.index(op.phase) for op in ops),
            array_of(_ONCE * bool(op.once) + _RANDOM * bool(op.random) for op in ops),
            array_of(np.cumsum([0, *(len(op.inputs) for op in ops)])),
            array_of(s for op in ops for s in op.inputs),
            array_of(np.cumsum([0, *(len(op.outputs) for op in ops)])),
            array_of(s for op in ops for s in op.outputs),
        )

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.operations)

    @property
    def total_time(self) -> float:
        """Seconds of every operation once, but for those that read from a tier or write to it."""
        return sum(op.cost_ns for op in self.operations if op.clock == "compute") / 1e9

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Graph of {len(self)} operations and {len(self.storages)} storages, "
            f"{self.total_time:.6g} s>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (Graph.from_dict, (self.to_dict(),))

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as plain data, for JSON; the version is 2 where it is not plain."""
        data: dict[str, Any] = {
            **self.extra,
            "format": FORMAT,
            "version": VERSION if self.is_plain else VERSION_WITH_TAPES,
            "storages": [
                {
                    **s.extra,
                    "bytes": int(s.bytes),
                    "pinned": s.pinned if s.pinned == FIRST else bool(s.pinned),
                    **({} if s.movable else {"movable": False}),
                    **({"lazy": True} if s.lazy else {}),
                }
                for s in self.storages
            ],
            "ops": [
                {
                    **op.extra,
                    "name": op.name,
                    "cost_ns": int(op.cost_ns),
                    "workspace_bytes": int(op.workspace_bytes),
                    **({} if op.light_bytes is None else {"light_bytes": int(op.light_bytes)}),
                    **({} if op.clock == "compute" else {"clock": op.clock}),
                    "phase": op.phase,
                    "inputs": [int(s) for s in op.inputs],
                    "outputs": [int(s) for s in op.outputs],
                    "random": bool(op.random),
                    "once": bool(op.once),
                    "module": op.module,
                }
                for op in self.operations
            ],
        }
        return {**data, "name": self.name} if self.name else data

    @classmethod
    def from_dict(cls, data: Any) -> Graph:
        """Return the graph that `to_dict` wrote; unknown fields are kept.

        Raises ValueError for another format or version, wrong fields, or an impossible graph.
        """
        fields = check_header(data, FORMAT, VERSION, VERSION_WITH_TAPES)
        storages = _objects("storages", fields.pop("storages", None))
        operations = _objects("ops", fields.pop("ops", None))
        name = fields.pop("name", "")
        try:
            return cls(
                [_storage(k, item) for k, item in enumerate(storages)],
                None,
                [_operation(k, item) for k, item in enumerate(operations)],
                name=str(name),
                extra=fields,
            )
        except TypeError as error:
            raise ValueError(f"malformed graph: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph as JSON to a file."""
        self.to_json(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Graph:
        """Return a graph from a file: JSON, or the text format ``.g``.

        The format ``.g``: ``n_ops n_storages``; a line ``bytes pinned`` per storage; a line
        ``cost_ns workspace_bytes is_backward n_in in... n_out out...`` per operation. Costs are
        rounded to whole nanoseconds.

        Raises
        ------
        ValueError
            The file is in neither format; the message has the number of the line.
        """
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip()[:1] in ("{", "["):
            return cls.from_json(text)
        return cls.from_g(text, Path(path).stem)

    @classmethod
    def from_g(cls, text: str, name: str = "graph") -> Graph:
        """Return a graph from text in the format ``.g``, as `to_g` writes it.

        Raises ValueError, with `name` and the line, if the text is not in this format.
        """
        lines = [(k, line.split()) for k, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not lines:
            raise ValueError(f"{name}: an empty file is no graph")
        header = _integers(name, *lines[0])
        if len(header) != 2:
            raise ValueError(f"{name}, line {lines[0][0]}: expected n_ops and n_storages")
        count, storage_count = header
        if len(lines) != 1 + count + storage_count:
            raise ValueError(
                f"{name}: expected {1 + count + storage_count} lines for {count} operations and "
                f"{storage_count} storages, got {len(lines)}"
            )
        storages = []
        for number, words in lines[1 : 1 + storage_count]:
            values = _integers(name, number, words)
            if len(values) != 2 or values[1] not in (0, 1):
                raise ValueError(f"{name}, line {number}: expected bytes and pinned (0 or 1)")
            storages.append(Storage(values[0], bool(values[1])))
        operations = [
            _parse_operation(name, number, words, k)
            for k, (number, words) in enumerate(lines[1 + storage_count :])
        ]
        return cls(storages, None, operations, name=name)

    def to_g(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the graph in the format ``.g``; also written to `path` when one is given.

        Names, flags and the loss phase are not part of it: the loss becomes a forward operation.

        Raises
        ------
        ValueError
            The graph is not plain.
        """
        self.require_plain("the format .g")
        lines = [f"{len(self)} {len(self.storages)}"]
        lines += [f"{s.bytes} {int(s.pinned)}" for s in self.storages]
        for op in self.operations:
            numbers = [op.cost_ns, op.workspace_bytes, int(op.phase == "backward")]
            numbers += [len(op.inputs), *op.inputs, len(op.outputs), *op.outputs]
            lines.append(" ".join(str(number) for number in numbers))
        text = "\n".join(lines) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def array_of(values: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return whole numbers as the core takes them."""
    return np.array(list(values), dtype=np.int64)


def _integers(name: str, number: int, words: Sequence[str]) -> list[int]:
    try:
        return [int(word) for word in words]
    except ValueError:
        raise ValueError(f"{name}, line {number}: expected whole numbers") from None


def _parse_operation(name: str, number: int, words: list[str], index: int) -> Operation:
    try:
        cost = float(words[0])
    except ValueError:
        raise ValueError(f"{name}, line {number}: {words[0]!r} is no cost in ns") from None
    if not 0 <= cost <= LARGEST:
        raise ValueError(f"{name}, line {number}: a cost of {words[0]} ns is out of range")
    values = _integers(name, number, words[1:])
    count = values[2] if len(values) > 2 else -1
    outputs = values[4 + count :] if count >= 0 and len(values) > 3 + count else None
    if outputs is None or values[3 + count] != len(outputs) or values[1] not in (0, 1):
        raise ValueError(
            f"{name}, line {number}: expected cost_ns workspace_bytes is_backward n_in in... "
            "n_out out..."
        )
    return Operation(
        name=f"op{index}",
        cost_ns=round(cost),
        inputs=tuple(values[3 : 3 + count]),
        outputs=tuple(outputs),
        workspace_bytes=values[0],
        phase="backward" if values[1] else "forward",
    )


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"a graph needs the field {name!r}, a list of objects")
    return [dict(item) for item in value]


def _take(where: str, fields: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    if name not in fields and default is None:
        raise ValueError(f"{where} needs the field {name!r}, and it is missing")
    value = fields.pop(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where}: {name!r} is {value!r}, which is of the wrong type")
    return value


def _storage(index: int, fields: dict[str, Any]) -> Storage:
    where = f"storage {index}"
    size = _take(where, fields, "bytes", int)
    pinned = fields.pop("pinned", False)
    if pinned != FIRST and not isinstance(pinned, bool):
        raise ValueError(f"{where}: 'pinned' is {pinned!r}, expected true, false or {FIRST!r}")
    movable = _take(where, fields, "movable", bool, True)
    lazy = _take(where, fields, "lazy", bool, False)
    return Storage(size, pinned, fields, movable, lazy)


def _operation(index: int, fields: dict[str, Any]) -> Operation:
    where = f"operation {index}"
    return Operation(
        name=_take(where, fields, "name", str),
        cost_ns=_take(where, fields, "cost_ns", int),
        inputs=tuple(_take(where, fields, "inputs", list)),
        outputs=tuple(_take(where, fields, "outputs", list)),
        workspace_bytes=_take(where, fields, "workspace_bytes", int, 0),
        phase=_take(where, fields, "phase", str, "forward"),
        random=_take(where, fields, "random", bool, False),
        once=_take(where, fields, "once", bool, False),
        module=_take(where, fields, "module", str, ""),
        light_bytes=_take(where, fields, "light_bytes", int) if "light_bytes" in fields else None,
        clock=_take(where, fields, "clock", str, "compute"),
        extra=fields,
    )
