"""Saved programs for a step captured here."""

from __future__ import annotations

import os

from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.planned import GraphPlan, PlanningRecord
from rotor.engines.graph.pricing import build_graph
from rotor.errors import InfeasibleError
from rotor.graph.graph import Graph
from rotor.graph.program import Program
from rotor.units import exact_bytes

__all__ = ["loaded_plan"]


def loaded_plan(
    step: CapturedStep, source: Program | str | os.PathLike[str], limit_bytes: int
) -> GraphPlan:
    """Return the plan that runs a saved program: a program, its JSON text, or the path of a file.

    Raise ValueError if the file holds no program, or one of another graph, whose first difference
    the message has; InfeasibleError, with the need of the program, if that is more than the limit.
    """
    saved = source if isinstance(source, Program) else Program.from_json(source)
    graph = build_graph(step.lowered, step.costs, 0)
    difference = _difference(saved.graph, graph)
    if difference:
        raise ValueError(
            f"the program is one of another graph: {difference}. A program fits the model, the "
            "shapes of its arguments and the PyTorch version that it was made with"
        )
    loss_bytes = saved.graph.operations[step.lowered.loss].workspace_bytes
    link = None
    if len(saved.actions) > len(saved.ops):
        link = step.link
        if link is None:
            raise ValueError(
                "the program moves values to a second tier, and the model has none: give "
                'offload="disk" to Checkpointable'
            )
    program = Program(step.graph(loss_bytes), saved.actions, link)
    own = step.bytes_beside(program, limit_bytes)
    needed = program.peak_bytes + own
    if needed > limit_bytes:
        raise InfeasibleError(
            f"the program needs {exact_bytes(needed)}, and the limit is "
            f"{exact_bytes(limit_bytes)}: give at least {needed} bytes, or a program that was "
            "made for less",
            needed,
        )
    record = PlanningRecord("loaded")
    return GraphPlan(step, program.graph, program, limit_bytes, own, loss_bytes, record)


def _difference(saved: Graph, here: Graph) -> str:
    """Return the first difference of two graphs except times and workspaces; empty if equal."""
    if len(saved) != len(here):
        return f"it has {len(saved)} operations, the model has {len(here)}"
    if len(saved.storages) != len(here.storages):
        return f"it has {len(saved.storages)} storages, the model has {len(here.storages)}"
    names = ("name", "phase", "inputs", "outputs", "random", "once")
    for index, (one, other) in enumerate(zip(saved.operations, here.operations, strict=True)):
        for name in names:
            if getattr(one, name) != getattr(other, name):
                return (
                    f"{name} of operation {index} ({one.name}) is {getattr(one, name)!r} in it, "
                    f"{getattr(other, name)!r} in the model"
                )
    for index, (a, b) in enumerate(zip(saved.storages, here.storages, strict=True)):
        if (a.bytes, a.pinned) != (b.bytes, b.pinned):
            return f"storage {index} has {a.bytes} bytes in it, {b.bytes} in the model"
    return ""
