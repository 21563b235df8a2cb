"""Plans of wrapped models in files: reading saved plans, writing pages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rotor.graph.program import Program
from rotor.report.plans import write_page
from rotor.wrapper.checkpointable import Checkpointable


def write_report(model: Checkpointable, path: str | os.PathLike[str]) -> Path:
    """Write a page on a model's plan: figures, timeline, operations, most recomputed values.

    Parameters
    ----------
    model
        A `Checkpointable` that has planned a graph.
    path
        The file to write, self-contained HTML.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        No plan was made yet, or the model runs without a graph.
    """
    _check_engine(model)
    write_page(model.graph_plan(), Path(path))
    return Path(path)


def _check_engine(model: Any) -> None:
    if not isinstance(model, Checkpointable) or model.planned_as not in ("graph", "blocks"):
        raise TypeError(
            f"expected a Checkpointable of the graph engine, got {type(model).__name__}: give "
            'engine="graph"'
        )


def load_program(model: Checkpointable, source: Program | str | os.PathLike[str]) -> Program:
    """Have a model run a saved program instead of planning one.

    The model must be measured (by its ``measure``, or a step). The program must be one of the
    same operations on the same storages; times may differ. Should a step need more than predicted,
    a new plan is made.

    Parameters
    ----------
    model
        A `Checkpointable` of the graph engine.
    source
        A program, its JSON text, or the path of a file written by ``model.program.to_json(path)``.

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
        The program needs more than the model's limit; ``minimum_bytes`` is its need.
    """
    _check_engine(model)
    found: Program = model.load_plan(source)
    return found
