"""Graphs of operations, programs that run them, and the planner.

``plan(graph, budget_bytes)`` gives a `Program` or raises `InfeasibleError`; ``curve(graph)`` what
can be done in every budget. Planning and simulating need no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotor.graph.building import build
    from rotor.graph.drawing import render
    from rotor.graph.estimate import Machine
    from rotor.graph.exact import Proof, checkmate
    from rotor.graph.graph import Graph, Operation, Storage
    from rotor.graph.planfiles import load_program, write_report
    from rotor.graph.planner import PlanCurve, curve, lower_bound, plan
    from rotor.graph.program import Program, Timeline, simulate
    from rotor.graph.recorded import Profile, save_profile
    from rotor.graph.summaries import Summary, summarise

__all__ = [
    "Graph",
    "Machine",
    "Operation",
    "PlanCurve",
    "Profile",
    "Program",
    "Proof",
    "Storage",
    "Summary",
    "Timeline",
    "build",
    "checkmate",
    "curve",
    "load_program",
    "lower_bound",
    "plan",
    "render",
    "save_profile",
    "simulate",
    "summarise",
    "write_report",
]

# Names are imported when they are first used: those of capture need PyTorch.
_LAZY = {
    "Graph": "graph",
    "Operation": "graph",
    "Storage": "graph",
    "Program": "program",
    "Timeline": "program",
    "simulate": "program",
    "PlanCurve": "planner",
    "Proof": "exact",
    "checkmate": "exact",
    "curve": "planner",
    "lower_bound": "planner",
    "plan": "planner",
    "build": "building",
    "render": "drawing",
    "Machine": "estimate",
    "Profile": "recorded",
    "save_profile": "recorded",
    "load_program": "planfiles",
    "write_report": "planfiles",
    "Summary": "summaries",
    "summarise": "summaries",
}
_SUBMODULES = ("graph", "planner", "program", "rkgb")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"rotor.graph.{_LAZY[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"rotor.graph.{name}")
    raise AttributeError(f"module 'rotor.graph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES})
