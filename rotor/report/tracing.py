"""Plans as traces: `rotor.report.trace` applied to plans of every engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rotor.algorithms.sequence import Sequence
from rotor.graph.contraction import places
from rotor.graph.program import Program
from rotor.graph.summaries import summarise
from rotor.report import trace


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Return whether a file name has the ending of a trace."""
    return os.fspath(path).lower().endswith(trace.SUFFIXES)


def write_plan_trace(plan: Any, path: str | os.PathLike[str]) -> Path:
    """Write the trace of a plan of any engine, and of its last metered step; return the path.

    The process "plan" has the prediction: each run of an operation, within its phase and module,
    and counters of the live bytes, of the limit, and of the measurement, brought to the clock of
    the prediction. The process "measured step" has the measurement on its own clock. A plan that
    predicts no single run has only the second process. Raises ValueError if nothing is predicted,
    and no step was metered over time.
    """
    if plan.engine == "graph":
        made = trace.graph_trace(plan, places(plan.graph), summarise(plan.program))
    elif plan.engine == "chain":
        made = trace.chain_trace(plan)
    else:
        made = trace.measured_trace(plan)
    return trace.write_trace(made, path)


def write_program_trace(
    program: Program, path: str | os.PathLike[str], limit_bytes: int | None = None
) -> Path:
    """Write the trace of a program of a graph; return the path."""
    made = trace.program_trace(program, places(program.graph), summarise(program), limit_bytes)
    return trace.write_trace(made, path)


def write_sequence_trace(
    sequence: Sequence, path: str | os.PathLike[str], limit_bytes: int | None = None
) -> Path:
    """Write the trace of a schedule that has its chain, whose input is not counted."""
    return trace.write_trace(trace.sequence_trace(sequence, limit_bytes), path)
