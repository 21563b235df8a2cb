"""Plans of wrapped models, read from files and written as pages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rotor.errors import InfeasibleError
from rotor.graph.contraction import places
from rotor.graph.emit import emit
from rotor.graph.engine import GraphPlan, build_graph
from rotor.graph.graph import Graph
from rotor.graph.program import Program
from rotor.graph.summaries import summarise
from rotor.graphed import GraphCheckpointable
from rotor.report.html import plan_page

__all__ = ["load_program", "write_report"]


def write_report(model: GraphCheckpointable, path: str | os.PathLike[str]) -> Path:
    """Write a page on a model's plan: figures, timeline, operations, what is recomputed most.

    Parameters
    ----------
    model
        A `Checkpointable` that has planned a graph.
    path
        The file to write, HTML that needs nothing else.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        No plan was made yet, or the model runs without a graph.
    """
    plan = _planned(model)
    path = Path(path)
    page = plan_page(plan, places(plan.graph), summarise(plan.program))
    path.write_text(page, encoding="utf-8")
    return path


def _planned(model: GraphCheckpointable) -> GraphPlan:
    _check_engine(model)
    return model._graph_plan()


def _check_engine(model: Any) -> None:
    if not isinstance(model, GraphCheckpointable):
        raise TypeError(
            f"expected a Checkpointable of the graph engine, got {type(model).__name__}: give "
            'engine="graph"'
        )


def load_program(model: GraphCheckpointable, source: Program | str | os.PathLike[str]) -> Program:
    """Have a model run a program that was saved, instead of planning one.

    The model was measured (`Checkpointable.measure`, or a step). The program must be one of the
    same operations on the same storages; times may differ. Should a step need more than predicted,
    it is planned again, as any.

    Parameters
    ----------
    model
        A `Checkpointable` of the graph engine.
    source
        A program, its JSON text, or the file at a path: what ``model.program.to_json(path)`` wrote.

    Returns
    -------
    Program
        The program, priced with the times measured here.

    Raises
    ------
    ValueError
        Nothing was measured; the file holds no program; it is one of another graph, and the
        message has the first difference.
    InfeasibleError
        It needs more than the model's limit; ``minimum_bytes`` is what it needs.
    """
    _check_engine(model)
    key = model._measured_key()
    if key not in model._steps:
        raise ValueError(f"the model runs without a graph: {model._reasons[key][1]}")
    step = model._steps[key]
    saved = source if isinstance(source, Program) else Program.from_json(source)
    graph = build_graph(step.lowered, step.costs, 0)
    difference = _difference(saved.graph, graph)
    if difference:
        raise ValueError(
            f"the program is one of another graph: {difference}. A program fits the model, the "
            "shapes of its arguments and the PyTorch version that it was made with"
        )
    loss_bytes = saved.graph.operations[step.lowered.loss].workspace_bytes
    program = Program(build_graph(step.lowered, step.costs, loss_bytes), saved.ops)
    emitted = emit(step.lowered, program.ops.tolist())
    own = step.own_bytes(emitted.replayed)
    limit = model._limit_on(step.device)
    needed = program.peak_bytes + own
    if needed > limit:
        raise InfeasibleError(
            f"the program needs {needed} bytes, and the limit is {limit} bytes: give at least "
            f"{needed} bytes, or a program that was made for less",
            needed,
        )
    plan = GraphPlan(step, program.graph, program, emitted, limit, own, loss_bytes)
    model._plans[key] = plan
    if not step.loss_captured:
        # What the loss needs is known with the program, so that seeing it again changes nothing.
        model._learned_loss[key] = loss_bytes
    model.__dict__.update(_latest=plan, _latest_key=key)
    return program


def _difference(saved: Graph, here: Graph) -> str:
    """The first difference of two graphs, times and workspaces aside; empty where there is none."""
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
