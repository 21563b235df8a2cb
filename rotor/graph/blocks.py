"""Bytes that an accelerator's caching allocator counts and takes for a program.

`csrc/rotor/blocks.h` has the allocator's rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rotor import _core
from rotor.common.accounting import BLOCK_BYTES
from rotor.graph.graph import Graph, Operation
from rotor.graph.program import Program, uses_and_makings


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a sequence of allocations and frees."""

    allocated_peak_bytes: int
    """Most bytes of blocks in use; a block may be larger than what was asked for."""
    reserved_peak_bytes: int
    """Most bytes taken from the device."""


def replay(events: npt.NDArray[np.int64], *, expandable: bool = False) -> BlockBytes:
    """Return the bytes of a sequence of events, from an empty allocator.

    Events are bytes to allocate, not negative, or -1 - k for the free of the k-th allocation, int64
    [n]. With `expandable`, segments grow (``expandable_segments:True``).
    """
    figures, _ = _core.replay_blocks(events, expandable, 0, False)
    return BlockBytes(figures["allocated_peak_bytes"], figures["reserved_peak_bytes"])


SMALL_BYTES = 1 << 20
"""Largest block that comes from small segments."""

SMALL_SEGMENT_BYTES = 1 << 21
"""Bytes of one of these."""


def small_blocks(nbytes: int) -> list[int]:
    """Return bytes in blocks that come from small segments, as few as there can be."""
    whole, rest = divmod(nbytes, SMALL_BYTES)
    return [SMALL_BYTES] * whole + ([rest] if rest else [])


RESULT = 1 << 50
"""Number from which the entries of an order stand for results."""

Orders = Sequence[Sequence[int]]
"""Possible orders of the allocations within an operation.

An entry e allocates e bytes for the operation itself, ``RESULT + k`` is the allocation of its k-th
result, and -1 - k frees what the k-th allocation of the operation made.
"""


def program_bytes(
    program: Program,
    beside: Sequence[int] = (),
    *,
    orders: Sequence[Orders | None] | None = None,
    expandable: bool = False,
) -> BlockBytes:
    """Return the bytes of a program, the largest of several orders within its operations.

    These take the first or the last of each operation's known `orders`, or make its workspace one
    block, before its results or after them: a kernel need not do in a step what it did alone.
    `beside` are the bytes of blocks in use from the beginning to the end.
    """
    replayed = [
        replay(each.inside, expandable=expandable)
        for each in _every_order(program, (), beside, orders)
    ]
    return BlockBytes(
        max(one.allocated_peak_bytes for one in replayed),
        max(one.reserved_peak_bytes for one in replayed),
    )


def _every_order(
    program: Program,
    outliving: Collection[int],
    beside: Sequence[int],
    orders: Sequence[Orders | None] | None,
) -> list[_Events]:
    """Return the events of a program in each order to price: known ones, and without knowledge."""
    program.graph.require_plain("an account of blocks")
    return [
        split_events(program, outliving, beside, known, is_second)
        for known in ([None] if orders is None else [orders, None])
        for is_second in (False, True)
    ]


@dataclass(frozen=True)
class PoolBytes:
    """Bytes of a program that runs in a private pool, which is there before it begins."""

    piece_bytes: int
    """Bytes of the piece that the pool takes from the device for blocks above 1 MiB; 0: none."""
    small_segments: int
    """Number of segments that it takes for the others."""
    pool_bytes: int
    """Most bytes that the pool has taken, in the course of the program."""
    outside_bytes: int
    """Most bytes that are taken outside of the pool, for what outlives the program."""
    large_bytes: int
    """Most bytes of its blocks above 1 MiB at a time, which a piece without any hole has."""

    @property
    def reserved_peak_bytes(self) -> int:
        """Most bytes taken from the device."""
        return self.pool_bytes + self.outside_bytes

    @property
    def blocks(self) -> list[int]:
        """Blocks that take all segments from the device if they are allocated together."""
        own = [self.piece_bytes] if self.piece_bytes else []
        return own + [SMALL_BYTES] * (2 * self.small_segments)


def pool_bytes(
    program: Program,
    outliving: Collection[int],
    beside: Sequence[int] = (),
    *,
    orders: Sequence[Orders | None] | None = None,
) -> PoolBytes:
    """Return the bytes of a program in a private pool, the largest of `program_bytes`' orders.

    Results in the storages `outliving` are made outside of the pool, or copied there. The blocks
    beside the program may be in the pool, or outside.
    """
    found = _every_order(program, outliving, beside, orders)
    outside_bytes = max(replay(each.outside).reserved_peak_bytes for each in found)
    fitted = {0, *(_core.fit_piece(each.inside)["bytes"] for each in found)}
    large = max(_large_bytes(each.inside) for each in found)
    best: PoolBytes | None = None
    for piece in sorted(fitted):
        replayed = [_after_piece(piece, each.inside) for each in found]
        small = max(one["reserved_small_bytes"] for one in replayed) // SMALL_SEGMENT_BYTES
        most = max(one["reserved_peak_bytes"] for one in replayed)
        if best is None or most <= best.pool_bytes:
            best = PoolBytes(piece, small, most, outside_bytes, large)
    assert best is not None
    return best


def _large_bytes(events: npt.NDArray[np.int64]) -> int:
    """Return the most bytes at a time of blocks above 1 MiB."""
    sizes = events[events >= 0]
    sizes = np.where(sizes > SMALL_BYTES, -(-sizes // BLOCK_BYTES) * BLOCK_BYTES, 0)
    changes = np.empty_like(events)
    changes[events >= 0] = sizes
    changes[events < 0] = -sizes[-1 - events[events < 0]]
    return int(np.cumsum(changes).max(initial=0))


def _after_piece(piece: int, events: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return the figures of events after a piece that is allocated and freed; 0: none."""
    if piece:
        events = np.concatenate([[piece, -1], np.where(events < 0, events - 1, events)])
    return _core.replay_blocks(events, False, 0, False)[0]


def runs_outside(
    is_loss: bool, workspace_bytes: int, kept_bytes: Mapping[int, int], outliving: Collection[int]
) -> bool:
    """Return whether a run takes all its memory outside of the pool of its program.

    It does if all used results outlive the program, and its workspace is not larger than these. Of
    other runs, the results that outlive the program are copied. `kept_bytes` has the sizes of the
    used results by number of the storage; `outliving` are such numbers.
    """
    if is_loss:
        return True
    return (
        bool(kept_bytes)
        and all(storage in outliving for storage in kept_bytes)
        and workspace_bytes <= sum(kept_bytes.values())
    )


class _Events(NamedTuple):
    """Events of a program in a private pool and outside of it, int64."""

    inside: npt.NDArray[np.int64]
    outside: npt.NDArray[np.int64]


def split_events(
    program: Program,
    outliving: Collection[int],
    beside: Sequence[int],
    orders: Sequence[Orders | None] | None,
    is_second: bool,
) -> _Events:
    """Return the events of a program in a private pool, and outside of it.

    Without results that outlive the program all of them are in the pool.
    """
    graph, actions = program.graph, program.actions.tolist()
    writers = _Writer(graph), _Writer(graph)
    for nbytes in beside:
        for writer in writers:
            writer.take(nbytes)
    deaths = zip(*_deaths(graph, actions), strict=True)
    for action, (kept, dying) in zip(actions, deaths, strict=True):
        if action < len(graph):
            operation = graph.operations[action]
            sizes = {storage: graph.storages[storage].bytes for storage in kept}
            is_out = bool(outliving) and runs_outside(
                operation.phase == "loss", operation.workspace_bytes, sizes, outliving
            )
            writer = writers[is_out]
            copied = set() if is_out else kept.intersection(outliving)
            known = None if orders is None else orders[action]
            order = known[-is_second] if known else _assumed(operation, is_second)
            for storage, place in writer.run(operation, kept, copied, order):
                writers[True].keep(storage)
                writer.events.append(-1 - place)
        elif kept and program.link is not None:
            writers[False].fetch(next(iter(kept)), program.link.padding_bytes)
        for writer in writers:
            writer.drop(dying)
    inside, outside = [np.array(writer.events, dtype=np.int64) for writer in writers]
    return _Events(inside, outside)


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

    def keep(self, storage: int) -> None:
        """Allocate for a storage."""
        self._places[storage] = self.take(self._sizes[storage])

    def drop(self, storages: Iterable[int]) -> None:
        """Free storages, where they exist."""
        for storage in storages:
            place = self._places.pop(storage, None)
            if place is not None:
                self.events.append(-1 - place)

    def fetch(self, storage: int, padding_bytes: int) -> None:
        """Allocate for what comes back from a second tier."""
        self._places[storage] = self.take(self._sizes[storage] + padding_bytes)

    def run(
        self, operation: Operation, kept: set[int], copied: set[int], order: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Allocate for a run, in an order; free the results that nothing reads.

        Returns the results that are copied, with their allocations, which have still to be freed.
        """
        places: list[int] = []
        made: dict[int, int] = {}
        for entry in order:
            if entry < 0:
                self.events.append(-1 - places[-1 - entry])
            elif entry < RESULT:
                places.append(self.take(entry))
            else:
                storage = operation.outputs[entry - RESULT]
                made[storage] = self.take(self._sizes[storage])
                places.append(made[storage])
        for storage in operation.outputs:
            if storage not in made:
                made[storage] = self.take(self._sizes[storage])
            if storage not in kept:
                self.events.append(-1 - made[storage])
            elif storage not in copied:
                self._places[storage] = made[storage]
        return [(storage, place) for storage, place in made.items() if storage in copied]


def _assumed(operation: Operation, workspace_first: bool) -> list[int]:
    """Return an order in which the workspace is one block, before the results or after them."""
    results = [RESULT + k for k in range(len(operation.outputs))]
    workspace = max(operation.workspace_bytes, 0)
    if workspace_first:
        return [workspace, *results, -1]
    return [*results, workspace, -1 - len(results)]


def _deaths(graph: Graph, actions: Sequence[int]) -> tuple[list[set[int]], list[list[int]]]:
    """Return per position the results that are used, and the storages used for the last time."""
    pinned = [storage.pinned for storage in graph.storages]
    events = [uses_and_makings(graph, action) for action in actions]
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
