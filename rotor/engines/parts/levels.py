"""Programs of one part for several amounts of kept memory, and several peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rotor.engines.graph.actions import Action, Kind
from rotor.engines.graph.lowering import Lowered
from rotor.engines.graph.pricing import build_graph
from rotor.engines.graph.profile import Cost
from rotor.errors import InfeasibleError
from rotor.graph import planner
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program

__all__ = ["fetched_last", "free_graph", "read_before_made", "search_levels"]

_LEVELS = 7
_PEAKS = 4
"""Peaks below that of the order of the model, for programs with a second tier."""


def free_graph(lowered: Lowered, costs: list[Cost], workspace: int, *, moves: bool) -> Graph:
    """Return the cost model of a part, whose outputs are not pinned.

    The workspace is that of what runs between its forward and its backward. With `moves`, values
    may move to a second tier, but not the outputs, which others hold.
    """
    held = lowered.tasks[lowered.loss].inputs if moves else ()
    return build_graph(lowered, costs, workspace, moves=moves, held=held)


def search_levels(
    lowered: Lowered,
    costs: list[Cost],
    link: Link | None,
    options: dict[str, Any],
    kept_bytes: Callable[[Program], int],
) -> list[Program]:
    """Return programs of a part, beginning with the one that recomputes nothing.

    Outputs are not pinned. Programs that use the link to a second tier are added to others. The
    options are those of `rotor.graph.plan`; `kept_bytes` returns the bytes that a program keeps for
    its backward.
    """
    moves = link is not None
    free = free_graph(lowered, costs, 0, moves=moves)
    unplanned = Program(free, range(len(free)))
    found = [unplanned]
    loss = lowered.loss
    # With a loss this large the peak is at the loss, and the budget limits the kept memory.
    huge = sum(s.bytes for s in free.storages) + max(op.workspace_bytes for op in free.operations)
    handed = sum(
        free.storages[s].bytes
        for s in {*free.operations[loss].inputs, *free.operations[loss].outputs}
    )

    def add(workspace: int, budget: int, tier: Link | None = None) -> int | None:
        graph = free_graph(lowered, costs, workspace, moves=moves)
        try:
            program = planner.plan(graph, budget, link=tier, **options)
        except InfeasibleError as error:
            return error.minimum_bytes
        is_moved = len(program.actions) > len(program.ops)
        found.append(Program(free, program.actions, tier if is_moved else None))
        return None

    most = kept_bytes(unplanned)
    reached = add(huge, 1)
    least = 0 if reached is None else max(reached - huge - handed, 0)
    highest, lowest = unplanned.peak_bytes, add(0, 1) or 0
    caps = sorted({least + (most - least) * k // (_LEVELS - 1) for k in range(_LEVELS)})
    peaks = sorted({lowest + (highest - lowest) * k // 3 for k in range(3)})
    for cap in caps:
        add(huge, huge + cap + handed)
    for peak in peaks:
        for cap in caps[::3]:
            add(max(peak - cap - handed, 0), max(peak, 1))
    if link is None:
        return found
    # Values that cannot be made again may go to the tier, so that less memory is possible.
    caps = sorted({most * k // (_LEVELS - 1) for k in range(_LEVELS)})
    bound = planner.lower_bound(free, moves=True)
    peaks = sorted({bound + (highest - bound) * k // _PEAKS for k in range(_PEAKS)})
    for cap in caps:
        add(huge, huge + cap + handed, link)
    for peak in peaks:
        for cap in caps[::3]:
            add(max(peak - cap - handed, 0), max(peak, 1), link)
    return found


def read_before_made(actions: Iterable[Action]) -> set[int]:
    """Return the storages that a part of a program finds made, and reads."""
    read: set[int] = set()
    made: set[int] = set()
    for action in actions:
        read.update(s for s in action.reads if s not in made)
        made.update(action.makes)
    return read


def fetched_last(actions: Iterable[Action]) -> set[int]:
    """Return the storages that were fetched after their last making."""
    found: set[int] = set()
    for action in actions:
        if action.kind is Kind.FETCH:
            found.update(action.makes)
        else:
            found.difference_update(action.makes)
    return found
