"""Cost models of captured operations, and the search for programs of them."""

from __future__ import annotations

from typing import Any

from rotor.engines.graph.lowering import Lowered
from rotor.engines.graph.profile import Cost
from rotor.errors import InfeasibleError
from rotor.graph import planner
from rotor.graph.graph import Graph, Operation
from rotor.graph.program import Program
from rotor.units import exact_bytes

__all__ = ["build_graph", "search", "sizes_of"]


def build_graph(lowered: Lowered, costs: list[Cost], loss_bytes: int) -> Graph:
    """Return the cost model of captured operations, with `loss_bytes` of workspace in the loss."""
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
    pinned = [is_pinned for _, is_pinned in lowered.storages]
    return Graph(sizes_of(lowered, costs), pinned, operations)


def sizes_of(lowered: Lowered, costs: list[Cost]) -> list[int]:
    """Return the bytes of every storage, as its operation makes it."""
    sizes = [size for size, _ in lowered.storages]
    for task, cost in zip(lowered.tasks, costs, strict=True):
        for storage, size in zip(task.made.values(), cost.made_bytes, strict=True):
            sizes[storage] = size
    return sizes


def search(graph: Graph, budget: int, options: dict[str, Any], progress: Any) -> Program:
    """Return the planner's program; retry with more effort if a low one misses an existing one."""
    try:
        return planner.plan(graph, budget, progress=progress, **options)
    except InfeasibleError as error:
        if budget == 1:
            raise
        minimum = error.minimum_bytes
    try:
        planner.plan(graph, 1, progress=progress, **options)
    except InfeasibleError as error:
        minimum = min(minimum, error.minimum_bytes)
    if minimum <= budget:
        return planner.plan(graph, budget, progress=progress, **options | {"effort": "default"})
    raise InfeasibleError(f"no program was found within {exact_bytes(budget)}", minimum)
