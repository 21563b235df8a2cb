"""Graphs of operations, programs that run them, and the planner.

``plan(graph, budget_bytes)`` returns a `Program` or raises `InfeasibleError`; ``curve(graph)``
returns programs for many budgets. Planning and simulating need no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotor.engines.graph.costs.estimate import Machine
    from rotor.engines.graph.costs.recorded import Profile, save_profile
    from rotor.graph.bound import offload_bound
    from rotor.graph.exact import Proof, checkmate
    from rotor.graph.graph import Graph, Operation, Storage
    from rotor.graph.link import Link
    from rotor.graph.planner import PlanCurve, curve, lower_bound, plan
    from rotor.graph.program import Program, Timeline, simulate
    from rotor.graph.summaries import Summary, summarise
    from rotor.report.drawing import render
    from rotor.wrapper.building import build
    from rotor.wrapper.planfiles import load_program, write_report

__all__ = [
    "Graph",
    "Link",
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
    "offload_bound",
    "plan",
    "render",
    "save_profile",
    "simulate",
    "summarise",
    "write_report",
]

# Modules of published names, imported when they are first used: those of capture need PyTorch.
_MODULES = {
    "rotor.engines.graph.costs.estimate": ("Machine",),
    "rotor.engines.graph.costs.recorded": ("Profile", "save_profile"),
    "rotor.graph.bound": ("offload_bound",),
    "rotor.graph.exact": ("Proof", "checkmate"),
    "rotor.graph.graph": ("Graph", "Operation", "Storage"),
    "rotor.graph.link": ("Link",),
    "rotor.graph.planner": ("PlanCurve", "curve", "lower_bound", "plan"),
    "rotor.graph.program": ("Program", "Timeline", "simulate"),
    "rotor.graph.summaries": ("Summary", "summarise"),
    "rotor.report.drawing": ("render",),
    "rotor.wrapper.building": ("build",),
    "rotor.wrapper.planfiles": ("load_program", "write_report"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = {
    "graph": "rotor.graph.graph",
    "planner": "rotor.graph.planner",
    "program": "rotor.graph.program",
    "rkgb": "rotor.rkgb",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    raise AttributeError(f"module 'rotor.graph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES})
