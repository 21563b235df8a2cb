"""The bytes that are live at the peak of a program, in parts, which set a step's least limit."""

from __future__ import annotations

import numpy as np

from rotor.algorithms.peaks import Peak
from rotor.graph.program import Program, uses_and_makings


def peak_of(program: Program) -> Peak:
    """Return the operation at the peak of a program, and its bytes in parts that add up to it.

    A transfer of a second tier belongs to the run that follows it.
    """
    graph, actions = program.graph, program.actions.tolist()
    n = len(graph)
    place = int(np.argmax(program.timeline().peak_bytes))
    number = next((k for k in actions[place:] if k < n), actions[-1])
    sizes = _live_before(program, place)
    made = uses_and_makings(graph, actions[place])[1]
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


def _padding(program: Program, action: int) -> int:
    is_run = action < len(program.graph)
    return 0 if is_run or program.link is None else program.link.padding_bytes


def _live_before(program: Program, place: int) -> dict[int, int]:
    """Return the bytes of the storages that are live when an action begins."""
    graph, actions = program.graph, program.actions.tolist()
    made: dict[int, int] = {}
    for action in actions[:place]:
        for s in uses_and_makings(graph, action)[1]:
            made[s] = graph.storages[s].bytes + _padding(program, action)
    found = {s: size for s, size in made.items() if graph.storages[s].pinned}
    for action in actions[place:]:
        uses, makes = uses_and_makings(graph, action)
        found.update({s: made[s] for s in uses if s in made})
        for s in makes:
            made.pop(s, None)
    return found
