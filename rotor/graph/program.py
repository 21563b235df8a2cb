"""Programs: the operations of a graph in the order in which they run, with repeats and actions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rotor.chain import Saved, check_header
from rotor.graph.graph import Graph, Operation
from rotor.graph.link import Link

FORMAT = "rotor.program"
VERSION = 1
VERSION_WITH_ACTIONS = 2
_NS = 1_000_000_000
_LARGEST = (1 << 31) - 1
Priced = tuple[int, int, Any, Any, int, int, int]
"""Nanoseconds, peak, int64 bytes before and during each action; nanoseconds of the runs and of the
link, and the most bytes on the second tier."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes along a program.

    Attributes
    ----------
    before_bytes
        Bytes that are live when each action begins, int64 [length].
    peak_bytes
        The most bytes live while it lasts; outputs and workspace of a run counted, int64 [length].
    """

    before_bytes: npt.NDArray[np.int64]
    peak_bytes: npt.NDArray[np.int64]


class Program(Saved):
    """A program, checked and priced by the simulator.

    A storage is live from its making to the last use before it is made again; a pinned one stays
    from its first making on. While an operation runs, everything live before it, all its outputs,
    and its workspace are in memory.

    With n operations and m storages, action k is the run of operation k below n; the finish of the
    offload of storage k - n below n + m; the start of the fetch of storage k - n - m from there on.
    A finish waits until the second tier has the storage and is a use of it. A fetch is another
    making, of its bytes and the link's padding. An offload starts when the last run that makes the
    storage before the finish ends, a fetch is complete before the first use after its start. The
    memory depends on the order of the actions alone, never on the speed of the link.

    Parameters
    ----------
    graph
        The graph of its operations.
    actions
        Numbers of operations in the order in which they run, with repeats, and of actions of a
        second tier.
    link
        The link to the second tier; ``None`` for a program of runs alone.

    Attributes
    ----------
    graph
        The graph.
    link
        The link, or None.
    actions
        The numbers, int32 [length].
    ops
        The runs alone, int32 [runs].

    Raises
    ------
    InvalidSequenceError
        An input is not in memory, a phase begins before another ends, an operation runs too
        often or never; a storage moves that cannot, is fetched before its offload is finished or
        without a use, or the tier holds too much; ``position`` says where.
    """

    def __init__(
        self, graph: Graph, actions: Iterable[int] | npt.NDArray[np.int32], link: Link | None = None
    ) -> None:
        if link is not None and not isinstance(link, Link):
            raise TypeError(f"link must be a rotor.graph.Link or None, got {link!r}")
        self.graph = graph
        self.link = link
        self.actions = _numbers(actions)
        self.actions.flags.writeable = False
        time_ns, peak, before, peaks, compute_ns, link_ns, host = self._priced()
        self.ops = self.actions
        if link is not None:
            self.ops = self.actions[self.actions < len(graph)]
            self.ops.flags.writeable = False
        self._time_ns = time_ns
        self._compute_ns = compute_ns
        self._link_ns = link_ns
        self._host_peak_bytes = host
        self._peak_bytes = peak
        self._timeline = Timeline(
            np.frombuffer(before, dtype=np.int64), np.frombuffer(peaks, dtype=np.int64)
        )

    def _priced(self) -> Priced:
        """Return the figures of the core's simulator, which refuses an invalid program."""
        link = None if self.link is None else self.link.core
        return self.graph.core.simulate(self.actions, link)

    @property
    def unplanned(self) -> Program:
        """Program that recomputes nothing, in the order of the graph."""
        return Program(self.graph, range(len(self.graph)))

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
    def waited(self) -> float:
        """Seconds of one step in which computing waits for the second tier."""
        return (self._time_ns - self._compute_ns) / _NS

    @property
    def link_time(self) -> float:
        """Seconds that the transfers of one step take, both directions together."""
        return self._link_ns / _NS

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes that the second tier holds at any moment."""
        return self._host_peak_bytes

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are written to the second tier in one step."""
        return self._moved(0)

    @property
    def fetched_bytes(self) -> int:
        """Bytes that are read from the second tier in one step."""
        return self._moved(1)

    @cached_property
    def run_ns(self) -> npt.NDArray[np.int64]:
        """Nanoseconds of a run of each operation on the clock of computing, int64 [operations]."""
        operations, is_linked = self.graph.operations, self.link is not None
        return np.array(
            [0 if is_linked and op.clock != "compute" else op.cost_ns for op in operations],
            dtype=np.int64,
        )

    def _moved(self, direction: int) -> int:
        first = len(self.graph) + direction * len(self.graph.storages)
        numbers = self.actions[self.actions >= first] - first
        storages = self.graph.storages
        moved: int = sum(storages[s].bytes for s in numbers.tolist() if s < len(storages))
        operations = self.graph.operations
        if direction == 0:
            return moved + sum(map(written_bytes, operations))
        reads = [op.outputs[0] if op.clock == "read" else None for op in operations]
        return moved + sum(
            int(count) * storages[s].bytes
            for s, count in zip(reads, self.runs, strict=True)
            if s is not None
        )

    @property
    def slowdown(self) -> float:
        """Time against the time of every operation once; 1 if nothing takes any time."""
        total = round(self.graph.total_time * _NS)
        return self._time_ns / total if total else 1.0

    @property
    def runs(self) -> npt.NDArray[np.int64]:
        """Return the number of times that each operation runs, int64 [operations]."""
        return np.bincount(self.ops, minlength=len(self.graph))

    def timeline(self, *, runs_only: bool = False) -> Timeline:
        """Return the live bytes along the program.

        Parameters
        ----------
        runs_only
            True for an entry for each of `ops`: the peak of a run counts the actions of a second
            tier right before it, and that of the last run the ones after it.

        Returns
        -------
        Timeline
            Bytes before each position, and the most during it.
        """
        if not runs_only or len(self.ops) == len(self.actions):
            return self._timeline
        runs = np.flatnonzero(self.actions < len(self.graph))
        begins = np.concatenate([[0], runs[:-1] + 1])
        peaks = np.maximum.reduceat(self._timeline.peak_bytes, begins)
        return Timeline(self._timeline.before_bytes[runs], peaks)

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.ops)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return np.array_equal(self.actions, other.actions) and self.link == other.link

    def __hash__(self) -> int:
        return hash(self.actions.tobytes())

    def __repr__(self) -> str:
        moves = len(self.actions) - len(self.ops)
        return (
            f"<Program of {len(self)} runs of {len(self.graph)} operations, "
            f"{f'{moves} actions of a second tier, ' if moves else ''}{self.makespan:.6g} s, "
            f"{self.peak_bytes} bytes>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the program with its graph as plain data, for JSON.

        The version is 2, with "actions" for "ops", where the program uses a second tier.
        """
        moves = len(self.actions) > len(self.ops)
        link = {} if self.link is None else {"link": self.link.to_dict()}
        return {
            "format": FORMAT,
            "version": VERSION_WITH_ACTIONS if moves else VERSION,
            "actions" if moves else "ops": self.actions.tolist(),
            **link,
            "graph": self.graph.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Program:
        """Return the program that `to_dict` wrote.

        Raises ValueError for another format or version, wrong fields, or an invalid program.
        """
        fields = check_header(data, FORMAT, VERSION, VERSION_WITH_ACTIONS)
        name = "actions" if data["version"] == VERSION_WITH_ACTIONS else "ops"
        ops = fields.get(name)
        if not isinstance(ops, list) or "graph" not in fields:
            raise ValueError(f"a program needs the fields {name!r}, a list, and 'graph'")
        try:
            numbers = _numbers(ops)
        except TypeError as error:
            raise ValueError(f"malformed program: {error}") from error
        given = fields.get("link")
        link = None if given is None else Link.from_dict(given)
        return cls(Graph.from_dict(fields["graph"]), numbers, link)


def written_bytes(operation: Operation) -> int:
    """Return the bytes that an operation writes to a second tier."""
    return int(operation.extra.get("bytes", 0)) if operation.clock == "write" else 0


def uses_and_makings(graph: Graph, action: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the storages that a run, a finish or a fetch uses, and those that it makes."""
    count, total = len(graph), len(graph.storages)
    if action < count:
        operation = graph.operations[action]
        return operation.inputs, operation.outputs
    if action < count + total:
        return (action - count,), ()
    return (), (action - count - total,)


def _numbers(ops: Iterable[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    array = np.array(ops if isinstance(ops, np.ndarray) else list(ops))
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError("a program must be a list of numbers of operations")
    if array.size and (array.min() < -_LARGEST or array.max() > _LARGEST):
        raise ValueError("a number of an operation does not fit in 32 bits")
    return array.astype(np.int32)


def simulate(
    graph: Graph, actions: Iterable[int] | npt.NDArray[np.int32], link: Link | None = None
) -> Program:
    """Check and price a program.

    Parameters
    ----------
    graph
        The graph of its operations.
    actions
        Numbers of operations in the order in which they run, with repeats, and of actions of a
        second tier, as `Program` says.
    link
        The link to the second tier; ``None`` for a program of runs alone.

    Returns
    -------
    Program
        The program with its time, its peak and its timeline.

    Raises
    ------
    InvalidSequenceError
        The program is not valid; ``position`` says where.
    """
    return Program(graph, actions, link)
