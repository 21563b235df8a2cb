"""Programs: the operations of a graph in the order in which they run, with repeats."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rotor.chain import check_header, read_json, write_json
from rotor.graph.graph import Graph

FORMAT = "rotor.program"
VERSION = 1
_NS = 1_000_000_000
_LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Timeline:
    """Live bytes along a program.

    Attributes
    ----------
    before_bytes
        Bytes that are live when each operation begins, int64 [length].
    peak_bytes
        The most bytes live while it runs, its outputs and workspace counted, int64 [length].
    """

    before_bytes: npt.NDArray[np.int64]
    peak_bytes: npt.NDArray[np.int64]


class Program:
    """A program, checked and priced by the simulator.

    A storage is live from its making to the last use before it is made again; a pinned one stays
    from its first making on. While an operation runs, everything live before it, all its outputs,
    and its workspace are in memory.

    Parameters
    ----------
    graph
        The graph of its operations.
    ops
        Numbers of operations in the order in which they run, with repeats.

    Attributes
    ----------
    graph
        The graph.
    ops
        The numbers, int32 [length].

    Raises
    ------
    InvalidSequenceError
        An input is not in memory, a phase begins before another ends, an operation runs too
        often or never; ``position`` says where.
    """

    def __init__(self, graph: Graph, ops: Iterable[int] | npt.NDArray[np.int32]) -> None:
        self.graph = graph
        self.ops = _numbers(ops)
        self.ops.flags.writeable = False
        time_ns, peak, before, peaks = graph.core.simulate(self.ops)
        self._time_ns = time_ns
        self._peak_bytes = peak
        self._timeline = Timeline(
            np.frombuffer(before, dtype=np.int64), np.frombuffer(peaks, dtype=np.int64)
        )

    @property
    def time_ns(self) -> int:
        """Nanoseconds of one step."""
        return self._time_ns

    @property
    def makespan(self) -> float:
        """Seconds of one step."""
        return self._time_ns / _NS

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are live at any moment."""
        return self._peak_bytes

    @property
    def slowdown(self) -> float:
        """Time against the time of every operation once; 1 if nothing takes any time."""
        total = sum(op.cost_ns for op in self.graph.operations)
        return self._time_ns / total if total else 1.0

    @property
    def runs(self) -> npt.NDArray[np.int64]:
        """Return the number of times that each operation runs, int64 [operations]."""
        return np.bincount(self.ops, minlength=len(self.graph))

    def timeline(self) -> Timeline:
        """Return the live bytes along the program."""
        return self._timeline

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.ops)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return np.array_equal(self.ops, other.ops)

    def __hash__(self) -> int:
        return hash(self.ops.tobytes())

    def __repr__(self) -> str:
        return (
            f"<Program of {len(self)} runs of {len(self.graph)} operations, {self.makespan:.6g} s, "
            f"{self.peak_bytes} bytes>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the program with its graph as plain data, for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "ops": self.ops.tolist(),
            "graph": self.graph.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Program:
        """Return the program that `to_dict` wrote.

        Raises
        ------
        ValueError
            Another format or version, a field missing or wrong, or a program that is not valid.
        """
        fields = check_header(data, FORMAT, VERSION)
        ops = fields.get("ops")
        if not isinstance(ops, list) or "graph" not in fields:
            raise ValueError("a program needs the fields 'ops', a list, and 'graph'")
        try:
            numbers = _numbers(ops)
        except TypeError as error:
            raise ValueError(f"malformed program: {error}") from error
        return cls(Graph.from_dict(fields["graph"]), numbers)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the program with its graph as JSON text; write it to `path` too if given."""
        return write_json(self.to_dict(), path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Program:
        """Return a program from JSON text, or from the file at a path.

        Raises
        ------
        ValueError
            Not JSON, another format or version, a field missing or wrong.
        """
        return cls.from_dict(read_json(source))


def _numbers(ops: Iterable[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    array = np.array(ops if isinstance(ops, np.ndarray) else list(ops))
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError("a program must be a list of numbers of operations")
    if array.size and (array.min() < -_LARGEST or array.max() > _LARGEST):
        raise ValueError("a number of an operation does not fit in 32 bits")
    return array.astype(np.int32)


def simulate(graph: Graph, ops: Iterable[int] | npt.NDArray[np.int32]) -> Program:
    """Check and price a program.

    Parameters
    ----------
    graph
        The graph of its operations.
    ops
        Numbers of operations in the order in which they run, with repeats.

    Returns
    -------
    Program
        The program with its time, its peak and its timeline.

    Raises
    ------
    InvalidSequenceError
        The program is not valid; ``position`` says where.
    """
    return Program(graph, ops)
