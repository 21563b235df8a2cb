"""The exact planner for small graphs: Checkmate's integer program, solved by HiGHS.

P. Jain et al., Checkmate: Breaking the memory wall with optimal tensor rematerialization (MLSys
2020), sections 4.2 to 4.7: stage t computes operation t for the first time, and before it all that
is computed again; memory is followed operation by operation. It is exact among the programs whose
first runs are in the order of the graph and that run nothing twice within a stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rotor.algorithms._integer_program import Operations, solve
from rotor.errors import InfeasibleError
from rotor.graph.graph import Graph
from rotor.graph.planner import lower_bound
from rotor.graph.program import Program
from rotor.units import exact_bytes, parse_bytes

_MOST_OPERATIONS = 200


@dataclass(frozen=True)
class Proof:
    """A program and a proof of its quality.

    Attributes
    ----------
    program
        Within the budget, by the simulator.
    bound_seconds
        No program of the class that `checkmate` searches is faster than this.
    gap
        (time of the program - bound) / time of the program; 0 if it is proven to be the best.
    """

    program: Program
    bound_seconds: float
    gap: float


def _operations(graph: Graph, unit: int) -> Operations:
    """Return a graph as the integer program takes it; outputs and gradients stay once made."""
    return Operations(
        reads=[tuple(dict.fromkeys(op.inputs)) for op in graph.operations],
        makes=[tuple(op.outputs) for op in graph.operations],
        costs=[op.cost_ns for op in graph.operations],
        workspaces=[op.workspace_bytes // unit for op in graph.operations],
        repeatable=[not op.once and op.phase != "loss" for op in graph.operations],
        sizes=[storage.bytes // unit for storage in graph.storages],
        resident_from={
            s: graph.producers[s] + 1 for s, storage in enumerate(graph.storages) if storage.pinned
        },
    )


def checkmate(
    graph: Graph, budget_bytes: int | str, *, time_limit: float | None = None, gap: float = 0.0
) -> Proof:
    """Return the fastest program within a budget, with a proof, for graphs of 20 to 40 operations.

    Parameters
    ----------
    graph
        The graph to run; at most 200 operations.
    budget_bytes
        The most bytes that may be live at any moment, or text such as "700MiB".
    time_limit
        Seconds after which the best program so far is returned.
    gap
        Relative gap at which the search may stop.

    Returns
    -------
    Proof
        The program, the proven bound and gap.

    Raises
    ------
    InfeasibleError
        No program of the class (see the module) exists. ``minimum_bytes`` is a lower bound:
        no program fits in less.
    TimeoutError
        The time limit passed before any program was found.
    ImportError
        SciPy is not installed; the message names the extra that brings it.
    ValueError
        More than 200 operations, a graph that is not plain, or an argument out of range.

    Notes
    -----
    SciPy gives no control over the number of threads: HiGHS runs its search on one.
    """
    graph.require_plain("the exact solver")
    budget = parse_bytes(budget_bytes, name="budget_bytes")
    if len(graph) > _MOST_OPERATIONS:
        raise ValueError(
            f"the exact solver takes at most {_MOST_OPERATIONS} operations, this graph has "
            f"{len(graph)}: use rotor.graph.plan"
        )
    if not 0.0 <= gap < 1.0:
        raise ValueError(f"gap = {gap!r}, expected 0 or more and less than 1")
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit = {time_limit!r}, expected more than 0 seconds")
    sizes = [s.bytes for s in graph.storages] + [op.workspace_bytes for op in graph.operations]
    unit = math.gcd(*sizes) or 1
    found = solve(_operations(graph, unit), budget // unit, time_limit=time_limit, gap=gap)
    if found.status == "infeasible":
        raise InfeasibleError(
            f"no program whose first runs are in the order of the graph fits in "
            f"{exact_bytes(budget)}; "
            f"no program at all fits in less than {exact_bytes(lower_bound(graph))}",
            max(lower_bound(graph), 1),
        )
    if found.runs is None:
        raise TimeoutError(f"no program was found within {time_limit} s: {found.message}")
    program = Program(graph, [k for stage in found.runs for k in stage])
    bound = min(found.bound, float(program.time_ns))
    above = (program.time_ns - bound) / program.time_ns if program.time_ns else 0.0
    return Proof(program, bound / 1e9, above if above > 1e-9 else 0.0)
