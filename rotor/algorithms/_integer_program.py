"""Checkmate's integer program: the fastest execution of some operations within a budget.

The execution is cut in stages, one for each operation [1]_; stage t computes operation t for the
first time, and before it any earlier ones again, each once, in the given order. Memory is followed
operation by operation. Solved by HiGHS through SciPy.

References
----------
.. [1] P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez,
   "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020,
   sections 4.2 to 4.7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Operations:
    """Operations in their order, and the values that they read and make.

    Attributes
    ----------
    reads, makes
        Values of each operation; each value is made by one operation.
    costs
        Time of each operation, in any unit.
    workspaces
        Memory of each operation beside its values while it runs, in units of the budget.
    repeatable
        Whether each operation may run again.
    sizes
        Memory of each value.
    resident_from
        Stage at whose begin a value is in memory and stays from then on.
    within
        Values that are kept wherever a value is kept: the memory that a view lies on.
    """

    reads: Sequence[Sequence[int]]
    makes: Sequence[Sequence[int]]
    costs: Sequence[int]
    workspaces: Sequence[int]
    repeatable: Sequence[bool]
    sizes: Sequence[int]
    resident_from: Mapping[int, int] = field(default_factory=dict)
    within: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Solution:
    """Outcome of a search.

    Attributes
    ----------
    status
        "infeasible" is proven; "time limit" holds with and without runs.
    runs
        Operations in the order of their runs, for each stage; ``None`` without a schedule.
    bound
        Least time of any schedule of the form, as far as is proven.
    message
        Last words of the solver.
    """

    status: Literal["optimal", "time limit", "infeasible"]
    runs: list[list[int]] | None
    bound: float
    message: str


class _Rows:
    """Constraints that are collected: coefficients of variables, and upper bounds."""

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

    def implies(self, variable: int, any_of: Sequence[int | None]) -> None:
        self.at_most([(variable, 1.0), *((m, -1.0) for m in any_of if m is not None)], 0.0)


class _Model:
    """Variables: run[t, k], kept[t, v] (at the begin of stage t), freed[t, k, v] (after k)."""

    def __init__(self, operations: Operations, budget: int) -> None:
        self.given = operations
        self.n = len(operations.costs)
        self.budget = budget
        self.count = 0
        self.run: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        self.freed: dict[tuple[int, int, int], int] = {}
        self.maker = {v: k for k, made in enumerate(operations.makes) for v in made}
        self.users: list[list[int]] = [[] for _ in operations.sizes]
        for k, reads in enumerate(operations.reads):
            for v in reads:
                self.users[v].append(k)
        self.begin = [operations.resident_from.get(v, self.n + 1) for v in range(len(self.users))]
        self._variables()
        self.rows = _Rows()
        self._dependencies()
        for t in range(self.n):
            self._memory(t)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _touched(self, k: int) -> tuple[int, ...]:
        return (*self.given.reads[k], *self.given.makes[k])

    def _variables(self) -> None:
        for t in range(self.n):
            for k in range(t + 1):
                if k == t or self.given.repeatable[k]:
                    self.run[t, k] = self._new()
            for v in range(len(self.users)):
                if self.maker[v] < t < self.begin[v]:
                    self.kept[t, v] = self._new()
            for k in range(t + 1):
                if (t, k) in self.run:
                    for v in self._touched(k):
                        if t + 1 < self.begin[v]:
                            self.freed[t, k, v] = self._new()

    def _sources(self, t: int, v: int) -> tuple[int | None, int | None]:
        """Variables that leave a value in memory at the end of a stage."""
        return self.kept.get((t, v)), self.run.get((t, self.maker[v]))

    def _dependencies(self) -> None:
        rows = self.rows
        for (t, k), variable in self.run.items():
            for v in self.given.reads[k]:
                if self.begin[v] > t:
                    rows.implies(variable, self._sources(t, v)[::-1])
        for (t, v), variable in self.kept.items():
            rows.implies(variable, self._sources(t - 1, v))
            for holder in self.given.within.get(v, ()):
                if self.begin[holder] > t:
                    rows.implies(variable, [self.kept[t, holder]])
        for v, begin in self.given.resident_from.items():
            if begin > self.maker[v] + 1:
                sources = self._sources(begin - 1, v)
                rows.at_most([(m, -1.0) for m in sources if m is not None], -1.0)
        for (t, k, v), variable in self.freed.items():
            rows.implies(variable, [self.run[t, k]])
            later = [self.run.get((t, j)) for j in self.users[v] if k < j <= t]
            for other in (*later, self.kept.get((t + 1, v))):
                if other is not None:
                    rows.at_most([(variable, 1.0), (other, 1.0)], 1.0)

    def _memory(self, t: int) -> None:
        given, sizes = self.given, self.given.sizes
        resident = sum(size for v, size in enumerate(sizes) if self.begin[v] <= t)
        live: list[tuple[int, float]] = [
            (self.kept[t, v], float(size)) for v, size in enumerate(sizes) if (t, v) in self.kept
        ]
        for k in range(t + 1):
            if (t, k) not in self.run:
                continue
            variable = self.run[t, k]
            needed = sum(sizes[v] for v in given.makes[k]) + given.workspaces[k]
            self.rows.at_most([*live, (variable, float(needed))], self.budget - resident)
            stays = sum(sizes[v] for v in given.makes[k] if self.begin[v] > t)
            live.append((variable, float(stays)))
            for v in self._touched(k):
                if (t, k, v) in self.freed:
                    live.append((self.freed[t, k, v], -float(sizes[v])))


def solve(
    operations: Operations, budget: int, *, time_limit: float | None = None, gap: float = 0.0
) -> Solution:
    """Return the fastest runs within a budget, and the proven bound.

    Parameters
    ----------
    operations
        What runs, at least one operation.
    budget
        The most memory at any moment, in the unit of the sizes.
    time_limit
        Seconds after which the best runs so far are the answer.
    gap
        Relative gap at which the search may stop.

    Raises
    ------
    ImportError
        SciPy is not installed; the message names the extra that brings it.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ImportError(
            "checkmate needs SciPy: `pip install scipy`, or in a clone of rotor "
            '`pip install ".[ilp]"`'
        ) from error
    model = _Model(operations, budget)
    costs, integral, lower = np.zeros(model.count), np.ones(model.count), np.zeros(model.count)
    for (t, k), variable in model.run.items():
        costs[variable] = operations.costs[k]
        lower[variable] = float(t == k)
    integral[list(model.freed.values())] = 0
    rows = model.rows
    scale = max(float(costs.max(initial=1.0)), 1.0)
    options: dict[str, Any] = {"mip_rel_gap": float(gap)}
    if time_limit is not None:
        options["time_limit"] = float(time_limit)
    answer: Any = milp(
        costs / scale,
        integrality=integral,
        bounds=Bounds(lower, np.ones(model.count)),
        constraints=LinearConstraint(
            csr_array(
                (rows.values, (rows.rows, rows.columns)), shape=(len(rows.upper), model.count)
            ),
            -np.inf,
            np.array(rows.upper),
        ),
        options=options,
    )
    if answer.x is None:
        status: Literal["infeasible", "time limit"]
        status = "infeasible" if answer.status == 2 else "time limit"
        return Solution(status, None, math.inf, answer.message)
    runs = [
        [k for k in range(t + 1) if (t, k) in model.run and answer.x[model.run[t, k]] > 0.5]
        for t in range(model.n)
    ]
    return Solution(
        "optimal" if answer.status == 0 else "time limit",
        runs,
        float(answer.mip_dual_bound) * scale,
        answer.message,
    )
