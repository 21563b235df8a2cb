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


SMALL_BYTES = 1 << 20
"""Largest block that comes from small segments."""


def small_blocks(nbytes: int) -> list[int]:
    """Return bytes in blocks that come from small segments, as few as there can be."""
    whole, rest = divmod(nbytes, SMALL_BYTES)
    return [SMALL_BYTES] * whole + ([rest] if rest else [])


def program_bytes(
    program: Program, beside: Sequence[int] = (), *, expandable: bool = False
) -> BlockBytes:
    """Return the bytes of a program, the larger of two orders within its operations.

    The workspace of an operation is one block, made before its results or after them.

    Parameters
    ----------
    program
        Program of known storages.
    beside
        Bytes of blocks in use from the beginning to the end.
    expandable
        As of `replay`.
    """
    found = [
        replay(program_events(program, beside, workspace_first=first), expandable=expandable)
        for first in (False, True)
    ]
    return BlockBytes(
        max(one.allocated_peak_bytes for one in found),
        max(one.reserved_peak_bytes for one in found),
    )


def program_events(
    program: Program, beside: Sequence[int] = (), *, workspace_first: bool = False
) -> npt.NDArray[np.int64]:
    """Return the allocations and frees of a program, in order, as events of `replay`.

    Parameters
    ----------
    program, beside
        As of `program_bytes`.
    workspace_first
        True if the workspace of an operation is allocated before its results.
    """
    graph, actions = program.graph, program.actions.tolist()
    writer = _Writer(graph)
    for nbytes in beside:
        writer.take(nbytes)
    for action, kept, dying in zip(actions, *_deaths(graph, actions), strict=True):
        if action < len(graph):
            writer.run(graph.operations[action], kept, workspace_first)
        elif kept and program.link is not None:
            writer.fetch(next(iter(kept)), program.link.padding_bytes)
        writer.drop(dying)
    return np.array(writer.events, dtype=np.int64)


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

    def fetch(self, storage: int, padding_bytes: int) -> None:
        """Allocate for what comes back from a second tier."""
        self._places[storage] = self.take(self._sizes[storage] + padding_bytes)

    def run(self, operation: Operation, kept: set[int], workspace_first: bool) -> None:
        """Allocate for a run; free the workspace, and the results that nothing reads."""
        workspace = max(operation.workspace_bytes, 0)
        scratch = self.take(workspace) if workspace_first else -1
        made = [(storage, self.take(self._sizes[storage])) for storage in operation.outputs]
        if not workspace_first:
            scratch = self.take(workspace)
        self.events.append(-1 - scratch)
        for storage, place in made:
            if storage in kept:
                self._places[storage] = place
            else:
                self.events.append(-1 - place)


def _uses_and_makings(graph: Graph, action: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the storages that a run, a finish or a fetch uses, and those that it makes."""
    count, total = len(graph), len(graph.storages)
    if action < count:
        operation = graph.operations[action]
        return operation.inputs, operation.outputs
    if action < count + total:
        return (action - count,), ()
    return (), (action - count - total,)


def _deaths(graph: Graph, actions: Sequence[int]) -> tuple[list[set[int]], list[list[int]]]:
    """Return per position the results that are used, and the storages used for the last time."""
    pinned = [storage.pinned for storage in graph.storages]
    events = [_uses_and_makings(graph, action) for action in actions]
    first = {s: p for p in range(len(actions) - 1, -1, -1) for s in events[p][1]}
    needed: set[int] = set()
    kept: list[set[int]] = []
    dying: list[list[int]] = []
    for position in range(len(actions) - 1, -1, -1):
        uses, makes = events[position]
        kept.append({s for s in makes if (first[s] == position if pinned[s] else s in needed)})
        needed.difference_update(makes)
        last = [s for s in dict.fromkeys(uses) if s not in needed and not pinned[s]]
        needed.update(uses)
        dying.append(last)
    return kept[::-1], dying[::-1]
