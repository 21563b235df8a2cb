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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Operations:
    """Operations in their order, and the values that they read and make.

    Each value is made by one operation. Costs are times in any unit. Memory is in the unit of the
    budget: `sizes` of the values, `workspaces` that operations take beside their values.
    `resident_from` has the stage at whose begin a value is in memory and stays from then on,
    `within` the values that are kept wherever a value is kept: the memory that a view lies on.
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
    """Outcome of a search, with the last words of the solver.

    "infeasible" is proven; "time limit" holds with and without runs. `runs` are operations in their
    order, for each stage. No schedule of the form takes less time than `bound`.
    """

    status: Literal["optimal", "time limit", "infeasible"]
    runs: list[list[int]] | None
    bound: float
    message: str


class Rows:
    """Constraints that are collected: coefficients of variables, and upper bounds."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.upper: list[float] = []

    def at_most(self, terms: Iterable[tuple[int, float]], upper: float) -> None:
        """Bound a sum of variables, by their numbers and coefficients."""
        for column, value in terms:
            self.rows.append(len(self.upper))
            self.columns.append(column)
            self.values.append(value)
        self.upper.append(upper)

    def implies(self, variable: int, any_of: Sequence[int | None]) -> None:
        """Require one of some variables wherever another one is."""
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
        self.rows = Rows()
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


def minimise(
    asked: str,
    costs: npt.NDArray[np.float64],
    rows: Rows,
    bounds: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
    integral: npt.NDArray[np.float64],
    *,
    gap: float,
    time_limit: float | None,
) -> Any:
    """Return SciPy's answer to an integer program, for what has asked for it.

    `integral` is 1 for variables that are whole numbers, `gap` the relative gap at which the search
    may stop, `time_limit` in seconds. Raises ImportError without SciPy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ImportError(
            f"{asked} needs SciPy: `pip install scipy`, or in a clone of rotor "
            '`pip install ".[ilp]"`'
        ) from error
    shape = len(rows.upper), len(costs)
    matrix = csr_array((rows.values, (rows.rows, rows.columns)), shape=shape)
    options: dict[str, Any] = {"mip_rel_gap": float(gap)}
    if time_limit is not None:
        options["time_limit"] = float(time_limit)
    return milp(
        costs,
        integrality=integral,
        bounds=Bounds(*bounds),
        constraints=LinearConstraint(matrix, -np.inf, np.array(rows.upper)),
        options=options,
    )


def solve(
    operations: Operations, budget: int, *, time_limit: float | None = None, gap: float = 0.0
) -> Solution:
    """Return the fastest runs of at least one operation within a budget, and the proven bound.

    The budget is in the unit of the sizes. After `time_limit` seconds the best runs so far are the
    answer; `gap` is the relative gap at which the search may stop.
    """
    model = _Model(operations, budget)
    costs, integral, lower = np.zeros(model.count), np.ones(model.count), np.zeros(model.count)
    for (t, k), variable in model.run.items():
        costs[variable] = operations.costs[k]
        lower[variable] = float(t == k)
    integral[list(model.freed.values())] = 0
    scale = max(float(costs.max(initial=1.0)), 1.0)
    bounds = lower, np.ones(model.count)
    answer = minimise(
        "checkmate", costs / scale, model.rows, bounds, integral, gap=gap, time_limit=time_limit
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
