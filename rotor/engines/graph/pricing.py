"""Cost models of captured operations, and the search for programs of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rotor.engines.graph.actions import movable
from rotor.engines.graph.lowering import Lowered
from rotor.engines.graph.profile import Cost
from rotor.graph import planner
from rotor.graph.graph import Graph, Operation, Storage
from rotor.graph.program import Program

__all__ = ["build_graph", "search", "sizes_of"]


def build_graph(
    lowered: Lowered,
    costs: list[Cost],
    loss_bytes: int,
    *,
    moves: bool = False,
    held: Collection[int] = (),
) -> Graph:
    """Return the cost model of captured operations, with `loss_bytes` of workspace in the loss.

    With `moves`, storages that no second tier may take are marked, also those in `held`, which
    others hold although they are not pinned.
    """
    operations = []
    for index, (task, cost) in enumerate(zip(lowered.tasks, costs, strict=True)):
        operations.append(
            Operation(
                name=task.name,
                cost_ns=cost.ns,
                workspace_bytes=loss_bytes if index == lowered.loss else cost.workspace_bytes,
                phase=task.phase,
                inputs=tuple(task.inputs),
                outputs=tuple(task.made.values()),
                random=task.random,
                once=task.once,
                module=task.module,
                extra={"source": task.source} if task.source else {},
            )
        )
    sizes = sizes_of(lowered, costs)
    if moves:
        may_move = movable(lowered, sizes, 1)
        storages = [
            Storage(size, is_pinned, movable=(may_move[s] and s not in held) or is_pinned)
            for s, (size, (_, is_pinned)) in enumerate(zip(sizes, lowered.storages, strict=True))
        ]
        return Graph(storages, None, operations)
    return Graph(sizes, [is_pinned for _, is_pinned in lowered.storages], operations)


def sizes_of(lowered: Lowered, costs: list[Cost]) -> list[int]:
    """Return the bytes of every storage, as its operation makes it."""
    sizes = [size for size, _ in lowered.storages]
    for task, cost in zip(lowered.tasks, costs, strict=True):
        for storage, size in zip(task.made.values(), cost.made_bytes, strict=True):
            sizes[storage] = size
    return sizes


def search(
    graph: Graph,
    budget: int,
    options: dict[str, Any],
    progress: Any,
) -> Program:
    """Return the planner's program."""
    return planner.plan(graph, budget, progress=progress, **options)
