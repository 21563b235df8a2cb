"""The bytes that are live at the peak of a program, in parts, which set a step's least limit."""

from __future__ import annotations

import numpy as np

from rotor.algorithms.peaks import Peak
from rotor.graph.graph import Graph
from rotor.graph.program import Program


def peak_of(program: Program) -> Peak:
    """Return the operation at the peak of a program, and its bytes in parts that add up to it.

    A transfer of a second tier belongs to the run that follows it.
    """
    graph, actions = program.graph, program.actions.tolist()
    n = len(graph)
    place = int(np.argmax(program.timeline().peak_bytes))
    number = next((k for k in actions[place:] if k < n), actions[-1])
    sizes = _live_before(program, place)
    made = _makings(graph, actions[place])
    for s in made:
        sizes[s] = graph.storages[s].bytes + _padding(program, actions[place])
    operation = graph.operations[min(number, n - 1)]
    read = operation.inputs if actions[place] < n else ()
    parts: dict[str, int] = {}
    for s, size in sizes.items():
        is_late = graph.operations[graph.producers[s]].phase == "backward"
        part = "inputs" if s in read else "kept for later"
        if s in made:
            part = "outputs"
        elif graph.storages[s].pinned:
            part = Peak.GRADIENTS if is_late else "outputs of the model"
        parts[part] = parts.get(part, 0) + size
    if actions[place] < n:
        parts["workspace"] = operation.workspace_bytes
    return Peak(f"{operation.name} in the {operation.phase}", operation.module, parts)


def _makings(graph: Graph, action: int) -> tuple[int, ...]:
    n, m = len(graph), len(graph.storages)
    if action < n:
        return graph.operations[action].outputs
    return (action - n - m,) if action >= n + m else ()


def _uses(graph: Graph, action: int) -> tuple[int, ...]:
    n, m = len(graph), len(graph.storages)
    if action < n:
        return graph.operations[action].inputs
    return (action - n,) if action < n + m else ()


def _padding(program: Program, action: int) -> int:
    is_run = action < len(program.graph)
    return 0 if is_run or program.link is None else program.link.padding_bytes


def _live_before(program: Program, place: int) -> dict[int, int]:
    """Return the bytes of the storages that are live when an action begins."""
    graph, actions = program.graph, program.actions.tolist()
    made: dict[int, int] = {}
    for action in actions[:place]:
        for s in _makings(graph, action):
            made[s] = graph.storages[s].bytes + _padding(program, action)
    found = {s: size for s, size in made.items() if graph.storages[s].pinned}
    for action in actions[place:]:
        for s in _uses(graph, action):
            if s in made:
                found[s] = made[s]
        for s in _makings(graph, action):
            made.pop(s, None)
    return found
