"""Graphs of operations on storages, for programs and the planner. Needs no PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rotor import _core
from rotor.chain import check_header, read_json, write_json

FORMAT = "rotor.graph"
VERSION = 1
PHASES = ("forward", "loss", "backward")
_LARGEST = 1 << 42
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
        Bytes that it needs beside them while it runs.
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


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage of a graph.

    Parameters
    ----------
    bytes
        Its size.
    pinned
        True if it stays once it is made: outputs, gradients of parameters.
    extra
        Further fields, kept in JSON.
    movable
        False if it must not move to a second tier of memory. Pinned storages, empty ones and those
        of the loss never do.
    """

    bytes: int
    pinned: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    movable: bool = True


def _whole(what: str, value: Any, owner: object = "", largest: int = _LARGEST) -> int:
    """Return a whole number; the errors name it and its owner, which has a text only then."""
    if type(value) is int and 0 <= value <= largest:
        return value
    where = f"{what} {owner}".strip()
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{where} must be a whole number, got {value!r}")
    if not 0 <= number <= largest:
        raise ValueError(f"{where} = {number}, expected 0 to {largest}")
    return number


class _Place(NamedTuple):
    """Operation as errors name it."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"operation {self.number} ({self.name})"


_Numbers = npt.NDArray[np.int64]
_Structure = tuple[_Numbers, _Numbers, _Numbers, _Numbers, _Numbers, _Numbers]


class Graph:
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
            _whole("workspace_bytes of", op.workspace_bytes, where)
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
        for s in range(len(self.storages)):
            if s not in makers:
                raise ValueError(f"no operation makes storage {s}")
        self.producers: tuple[int, ...] = tuple(makers[s] for s in range(len(self.storages)))

    def _build_core(self) -> _core.Dataflow:
        parts = (
            _array(op.cost_ns for op in self.operations),
            _array(op.workspace_bytes for op in self.operations),
            *self._structure(),
            _array(storage.bytes for storage in self.storages),
            _array(int(storage.pinned) for storage in self.storages),
            _array(int(not storage.movable) for storage in self.storages),
        )
        return _core.Dataflow(*parts)

    def _structure(self) -> _Structure:
        """Return phases, flags, inputs and outputs of the operations, as the core takes them."""
        ops = self.operations
        return (
            _array(PHASES.index(op.phase) for op in ops),
            _array(_ONCE * bool(op.once) + _RANDOM * bool(op.random) for op in ops),
            _array(np.cumsum([0, *(len(op.inputs) for op in ops)])),
            _array(s for op in ops for s in op.inputs),
            _array(np.cumsum([0, *(len(op.outputs) for op in ops)])),
            _array(s for op in ops for s in op.outputs),
        )

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.operations)

    @property
    def total_time(self) -> float:
        """Seconds of every operation once."""
        return sum(op.cost_ns for op in self.operations) / 1e9

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
        """Return the graph as plain data, for JSON."""
        data: dict[str, Any] = {
            **self.extra,
            "format": FORMAT,
            "version": VERSION,
            "storages": [
                {
                    **s.extra,
                    "bytes": int(s.bytes),
                    "pinned": bool(s.pinned),
                    **({} if s.movable else {"movable": False}),
                }
                for s in self.storages
            ],
            "ops": [
                {
                    **op.extra,
                    "name": op.name,
                    "cost_ns": int(op.cost_ns),
                    "workspace_bytes": int(op.workspace_bytes),
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

        Raises
        ------
        ValueError
            Another format or version; a field missing or wrong, an impossible graph.
        """
        fields = check_header(data, FORMAT, VERSION)
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

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the graph as JSON text; also written to `path` when one is given."""
        return write_json(self.to_dict(), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph as JSON to a file."""
        self.to_json(path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Graph:
        """Return a graph from JSON text, or from the file at a path.

        Raises
        ------
        ValueError
            Not JSON, another format or version, a field missing or wrong.
        """
        return cls.from_dict(read_json(source))

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
        """Return a graph from text in the format ``.g``.

        Parameters
        ----------
        text
            As `to_g` writes it.
        name
            The graph's name in error messages.

        Raises
        ------
        ValueError
            The text is not in this format; the message has the number of the line.
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
        """
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


class Resizing:
    """Source of graphs of the same operations on storages of other sizes, at other costs.

    Parameters
    ----------
    graph
        Graph to begin with; a program of it is one of every graph made here.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._structure = graph._structure()
        self._pinned = _array(int(storage.pinned) for storage in graph.storages)
        self._fixed = _array(int(not storage.movable) for storage in graph.storages)

    def graph(
        self,
        storage_bytes: npt.NDArray[np.int64],
        cost_ns: npt.NDArray[np.int64],
        workspace_bytes: npt.NDArray[np.int64],
    ) -> Graph:
        """Return the graph of these sizes and costs, in a time that no check of it needs.

        Parameters
        ----------
        storage_bytes
            Size of each storage.
        cost_ns, workspace_bytes
            Time and workspace of each operation.

        Raises
        ------
        ValueError
            A number is missing, or out of range.
        """
        counts = (len(self._graph.storages), len(self._graph), len(self._graph))
        for name, values, count in zip(
            ("storage_bytes", "cost_ns", "workspace_bytes"),
            (storage_bytes, cost_ns, workspace_bytes),
            counts,
            strict=True,
        ):
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries, expected {count}")
            if count and not 0 <= values.min() <= values.max() <= _LARGEST:
                raise ValueError(f"{name} has numbers out of range, expected 0 to {_LARGEST}")
        core = _core.Dataflow(
            cost_ns, workspace_bytes, *self._structure, storage_bytes, self._pinned, self._fixed
        )
        return _Resized(self._graph, core, storage_bytes, cost_ns, workspace_bytes)


class _Resized(Graph):
    """Graph with the structure of another one; objects are made when they are asked for."""

    def __init__(
        self,
        origin: Graph,
        core: _core.Dataflow,
        storage_bytes: npt.NDArray[np.int64],
        cost_ns: npt.NDArray[np.int64],
        workspace_bytes: npt.NDArray[np.int64],
    ) -> None:
        self.name, self.extra = origin.name, dict(origin.extra)
        self.producers = origin.producers
        self.core = core
        self._origin = origin
        self._sizes = storage_bytes
        self._costs = (cost_ns, workspace_bytes)

    def __len__(self) -> int:
        return len(self._origin)

    @property
    def total_time(self) -> float:
        return int(self._costs[0].sum()) / 1e9

    @cached_property
    def storages(self) -> tuple[Storage, ...]:  # type: ignore[override]
        return tuple(
            Storage(size, storage.pinned, movable=storage.movable)
            for size, storage in zip(self._sizes.tolist(), self._origin.storages, strict=True)
        )

    @cached_property
    def operations(self) -> tuple[Operation, ...]:  # type: ignore[override]
        times, workspaces = (values.tolist() for values in self._costs)
        return tuple(
            replace(op, cost_ns=ns, workspace_bytes=workspace)
            for op, ns, workspace in zip(self._origin.operations, times, workspaces, strict=True)
        )


def _array(values: Iterable[int]) -> npt.NDArray[np.int64]:
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
    if not 0 <= cost <= _LARGEST:
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
    pinned = _take(where, fields, "pinned", bool, False)
    movable = _take(where, fields, "movable", bool, True)
    return Storage(size, pinned, fields, movable)


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
        extra=fields,
    )
