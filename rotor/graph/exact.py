"""The exact planner for small graphs: Checkmate's integer program, solved by HiGHS.

P. Jain et al., Checkmate: Breaking the memory wall with optimal tensor rematerialization (MLSys
2020), sections 4.2 to 4.7: stage t computes operation t for the first time, and before it all that
is computed again; memory is followed operation by operation. It is exact among the programs whose
first runs are in the order of the graph and that run nothing twice within a stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rotor.errors import InfeasibleError
from rotor.graph.graph import Graph
from rotor.graph.planner import lower_bound
from rotor.graph.program import Program
from rotor.units import parse_bytes

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


class _Rows:
    """Constraints that are collected: coefficients of variables, lower and upper bounds."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.upper: list[float] = []

    def at_most(self, terms: list[tuple[int, float]], upper: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.upper))
            self.columns.append(column)
            self.values.append(value)
        self.upper.append(upper)


class _Model:
    """Variables: run[t, k], kept[t, s] (at the begin of stage t), freed[t, k, s] (after k)."""

    def __init__(self, graph: Graph, budget: int) -> None:
        self.graph = graph
        self.count = 0
        self.run: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        self.freed: dict[tuple[int, int, int], int] = {}
        self.inputs = [tuple(dict.fromkeys(op.inputs)) for op in graph.operations]
        self.users: list[list[int]] = [[] for _ in graph.storages]
        for k, inputs in enumerate(self.inputs):
            for s in inputs:
                self.users[s].append(k)
        self._variables()
        self.rows = _Rows()
        sizes = [s.bytes for s in graph.storages] + [op.workspace_bytes for op in graph.operations]
        self.unit = math.gcd(*sizes) or 1
        self.budget = budget // self.unit
        self._dependencies()
        for stage in range(len(graph)):
            self._memory(stage)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _variables(self) -> None:
        graph = self.graph
        for t in range(len(graph)):
            for k in range(t + 1):
                op = graph.operations[k]
                if k < t and (op.once or op.phase == "loss"):
                    continue
                self.run[t, k] = self._new()
            for s, storage in enumerate(graph.storages):
                if graph.producers[s] < t and not storage.pinned:
                    self.kept[t, s] = self._new()
            for k in range(t + 1):
                if (t, k) in self.run:
                    for s in (*self.inputs[k], *graph.operations[k].outputs):
                        if not graph.storages[s].pinned:
                            self.freed[t, k, s] = self._new()

    def _dependencies(self) -> None:
        graph = self.graph
        for (t, k), variable in self.run.items():
            for s in self.inputs[k]:
                if graph.storages[s].pinned and graph.producers[s] < t:
                    continue
                makers = [self.run.get((t, graph.producers[s])), self.kept.get((t, s))]
                self.rows.at_most(
                    [(variable, 1.0), *((m, -1.0) for m in makers if m is not None)], 0.0
                )
        for (t, s), variable in self.kept.items():
            makers = [self.kept.get((t - 1, s)), self.run.get((t - 1, graph.producers[s]))]
            self.rows.at_most([(variable, 1.0), *((m, -1.0) for m in makers if m is not None)], 0.0)
        for (t, k, s), variable in self.freed.items():
            self.rows.at_most([(variable, 1.0), (self.run[t, k], -1.0)], 0.0)
            later = [self.run.get((t, j)) for j in self.users[s] if k < j <= t]
            for other in (*later, self.kept.get((t + 1, s))):
                if other is not None:
                    self.rows.at_most([(variable, 1.0), (other, 1.0)], 1.0)

    def _memory(self, t: int) -> None:
        graph, unit = self.graph, self.unit
        pinned = sum(
            storage.bytes // unit
            for s, storage in enumerate(graph.storages)
            if storage.pinned and graph.producers[s] < t
        )
        live: list[tuple[int, float]] = [
            (self.kept[t, s], graph.storages[s].bytes / unit)
            for s in range(len(graph.storages))
            if (t, s) in self.kept
        ]
        for k in range(t + 1):
            if (t, k) not in self.run:
                continue
            op, variable = graph.operations[k], self.run[t, k]
            made = sum(graph.storages[s].bytes for s in op.outputs)
            self.rows.at_most(
                [*live, (variable, (made + op.workspace_bytes) / unit)], self.budget - pinned
            )
            stays = sum(
                graph.storages[s].bytes
                for s in op.outputs
                if not graph.storages[s].pinned or k == t
            )
            live.append((variable, stays / unit))
            for s in (*self.inputs[k], *op.outputs):
                if (t, k, s) in self.freed:
                    live.append((self.freed[t, k, s], -graph.storages[s].bytes / unit))

    def program(self, values: npt.NDArray[np.float64]) -> Program:
        ops = [
            k
            for t in range(len(self.graph))
            for k in range(t + 1)
            if (t, k) in self.run and values[self.run[t, k]] > 0.5
        ]
        return Program(self.graph, ops)


def checkmate(
    graph: Graph,
    budget_bytes: int | str,
    *,
    time_limit: float | None = None,
    gap: float = 0.0,
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
        More than 200 operations, or an argument is out of range.

    Notes
    -----
    SciPy gives no control over the number of threads: HiGHS runs its search on one.
    """
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
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ImportError(
            "rotor.graph.checkmate needs SciPy: `pip install scipy`, or in a clone of rotor "
            '`pip install ".[ilp]"`'
        ) from error
    model = _Model(graph, budget)
    costs = np.zeros(model.count)
    integral = np.ones(model.count)
    lower = np.zeros(model.count)
    for (t, k), variable in model.run.items():
        costs[variable] = graph.operations[k].cost_ns
        lower[variable] = float(t == k)
    integral[list(model.freed.values())] = 0
    rows = model.rows
    shape = (len(rows.upper), model.count)
    scale = max(float(costs.max(initial=1.0)), 1.0)
    options: dict[str, Any] = {"mip_rel_gap": gap}
    if time_limit is not None:
        options["time_limit"] = float(time_limit)
    answer = milp(
        costs / scale,
        integrality=integral,
        bounds=Bounds(lower, np.ones(model.count)),
        constraints=LinearConstraint(
            csr_array((rows.values, (rows.rows, rows.columns)), shape=shape),
            -np.inf,
            np.array(rows.upper),
        ),
        options=options,
    )
    if answer.status == 2:
        raise InfeasibleError(
            f"no program whose first runs are in the order of the graph fits in {budget} bytes; "
            f"no program at all fits in less than {lower_bound(graph)} bytes",
            max(lower_bound(graph), 1),
        )
    if answer.x is None:
        raise TimeoutError(f"no program was found within {time_limit} s: {answer.message}")
    program = model.program(answer.x)
    bound = min(float(answer.mip_dual_bound) * scale, float(program.time_ns))
    found = (program.time_ns - bound) / program.time_ns if program.time_ns else 0.0
    return Proof(program, bound / 1e9, found if found > 1e-9 else 0.0)
