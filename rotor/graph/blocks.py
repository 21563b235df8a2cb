"""Bytes that an accelerator's caching allocator counts and takes for a program.

`csrc/rotor/blocks.h` has the allocator's rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rotor import _core
from rotor.graph.graph import Graph, Operation
from rotor.graph.program import Program

__all__ = ["BlockBytes", "program_bytes", "program_events", "replay"]

_FETCH = "<fetch>"


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a sequence of allocations and frees.

    Attributes
    ----------
    allocated_peak_bytes
        Most bytes of blocks in use; a block may be larger than what was asked for.
    reserved_peak_bytes
        Most bytes taken from the device.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int


def replay(events: npt.NDArray[np.int64], *, expandable: bool = False) -> BlockBytes:
    """Return the bytes of a sequence of events, from an empty allocator.

    Parameters
    ----------
    events
        Bytes to allocate, not negative, or -1 - k for the free of the k-th allocation, int64 [n].
    expandable
        True if segments grow (``expandable_segments:True``).
    """
    figures, _ = _core.replay_blocks(events, expandable, 0, False)
    return BlockBytes(figures["allocated_peak_bytes"], figures["reserved_peak_bytes"])


def program_bytes(
    program: Program, beside_bytes: int = 0, *, expandable: bool = False
) -> BlockBytes:
    """Return the bytes of a program, the larger of two orders within its operations.

    The workspace of an operation is one block, made before its results or after them.

    Parameters
    ----------
    program
        Program of known storages.
    beside_bytes
        Bytes in use from the beginning to the end.
    expandable
        As of `replay`.
    """
    found = [
        replay(program_events(program, beside_bytes, workspace_first=first), expandable=expandable)
        for first in (False, True)
    ]
    return BlockBytes(
        max(one.allocated_peak_bytes for one in found),
        max(one.reserved_peak_bytes for one in found),
    )


def program_events(
    program: Program, beside_bytes: int = 0, *, workspace_first: bool = False
) -> npt.NDArray[np.int64]:
    """Return the allocations and frees of a program, in order, as events of `replay`.

    Parameters
    ----------
    program, beside_bytes
        As of `program_bytes`.
    workspace_first
        True if the workspace of an operation is allocated before its results.
    """
    graph, padding = program.graph, 0 if program.link is None else program.link.padding_bytes
    actions = [_action(graph, number) for number in program.actions.tolist()]
    writer = _Writer(graph)
    writer.take(beside_bytes)
    for action, kept, dying in zip(actions, *_deaths(graph, actions), strict=True):
        writer.run(action, kept, workspace_first, padding if action.name == _FETCH else 0)
        writer.drop(dying)
    return np.array(writer.events, dtype=np.int64)


def _action(graph: Graph, number: int) -> Operation:
    """Return an action of a program as an operation."""
    storage = (number - len(graph)) % len(graph.storages)
    if number < len(graph):
        return graph.operations[number]
    if number < len(graph) + len(graph.storages):
        return Operation("finish", 0, (storage,), ())
    return Operation(_FETCH, 0, (), (storage,))


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.events: list[int] = []
        self._sizes = [storage.bytes for storage in graph.storages]
        self._count = 0
        self._places: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Allocate; return the number of the allocation."""
        self.events.append(nbytes)
        self._count += 1
        return self._count - 1

    def drop(self, storages: Iterable[int]) -> None:
        """Free storages, where they exist."""
        for storage in storages:
            place = self._places.pop(storage, None)
            if place is not None:
                self.events.append(-1 - place)

    def run(
        self, operation: Operation, kept: set[int], workspace_first: bool, padding: int
    ) -> None:
        """Allocate for a run; free the workspace, and the results that nothing reads."""
        workspace = max(operation.workspace_bytes, 0)
        scratch = self.take(workspace) if workspace_first else -1
        made = [(s, self.take(self._sizes[s] + padding)) for s in operation.outputs]
        if not workspace_first:
            scratch = self.take(workspace)
        self.events.append(-1 - scratch)
        for storage, place in made:
            if storage in kept:
                self._places[storage] = place
            else:
                self.events.append(-1 - place)


def _deaths(graph: Graph, actions: Sequence[Operation]) -> tuple[list[set[int]], list[list[int]]]:
    """Return per position the results that are used, and the storages read for the last time."""
    pinned = [storage.pinned for storage in graph.storages]
    first = {s: p for p in range(len(actions) - 1, -1, -1) for s in actions[p].outputs}
    needed: set[int] = set()
    kept: list[set[int]] = []
    dying: list[list[int]] = []
    for position in range(len(actions) - 1, -1, -1):
        operation = actions[position]
        kept.append(
            {s for s in operation.outputs if (first[s] == position if pinned[s] else s in needed)}
        )
        needed.difference_update(operation.outputs)
        last = [s for s in dict.fromkeys(operation.inputs) if s not in needed and not pinned[s]]
        needed.update(operation.inputs)
        dying.append(last)
    return kept[::-1], dying[::-1]
