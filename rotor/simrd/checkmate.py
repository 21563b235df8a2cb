"""Checkmate: the optimal schedule of a small program, as an integer linear program.

The execution is cut in stages, one for each operation [1]_; stage t executes operation t for the
first time, and may execute any earlier ones again before it, each once, in the order of the
program. What is carried from one stage to the next, and what each stage executes, are the unknowns;
memory is accounted for execution by execution, and what is not read again is dropped at once.

Solved by HiGHS through SciPy: ``pip install scipy``. The number of unknowns
grows with the square of the number of operations, the time to a proof much faster: this is for
programs of some tens of operations.

References
----------
.. [1] P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez,
   "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020,
   section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rotor.errors import InfeasibleError
from rotor.simrd.program import Price, Program, price
from rotor.units import parse_bytes

if TYPE_CHECKING:
    from rotor.simrd.logs import Log

__all__ = ["MOST_OPERATIONS", "Checkmate", "checkmate"]

MOST_OPERATIONS = 64
"""The largest program, constants aside, that is taken by default: some 10,000 unknowns."""

_RESOLUTION = 1 << 20
_NOISE = 1e-7


@dataclass(frozen=True, eq=False)
class Checkmate:
    """Answer of the solver.

    Attributes
    ----------
    status
        "optimal", or "time limit" where a schedule was found and better ones may exist.
    steps
        The schedule, as in `rotor.simrd.program`.
    price
        Memory and time of the schedule, priced as every schedule is.
    budget_bytes
        Budget that the schedule had to fit in.
    bound_ns
        No schedule of this form takes less, in nanoseconds.
    gap
        Distance of the schedule above that bound, relative to it: 0.0 is proven optimal.
    """

    status: str
    steps: tuple[int, ...]
    price: Price
    budget_bytes: int
    bound_ns: float
    gap: float


def checkmate(
    log: Log | Program,
    budget_bytes: int | str,
    *,
    time_limit: float = 60.0,
    gap: float = 0.0,
    most_operations: int = MOST_OPERATIONS,
) -> Checkmate:
    """Return the fastest schedule of a small program within a budget.

    Parameters
    ----------
    log
        The program. Operations without inputs that cost nothing are constants: they count as in
        memory from the beginning.
    budget_bytes
        The most in memory at any moment, constants included; bytes, or text such as "700MiB".
    time_limit
        Seconds after which the best schedule found so far is given.
    gap
        A schedule within this relative distance of the bound is good enough.
    most_operations
        Refuse programs of more operations, constants aside.

    Returns
    -------
    Checkmate
        The schedule and what is proven about it.

    Raises
    ------
    ImportError
        SciPy is not installed; the message names the extra that brings it.
    ValueError
        The program is too large, or an argument is out of range.
    InfeasibleError
        No schedule fits; `minimum_bytes` is the least in which its largest operation could run,
        a lower bound.
    RuntimeError
        The time limit passed without a schedule and without a proof that none exists.

    Notes
    -----
    An operation with several outputs is carried as a whole; views are carried with the storage they
    are views of, at no bytes. Sizes are rounded up to 2^-20 of the budget where they have no common
    divisor that is coarser.
    """
    budget = parse_bytes(budget_bytes, name="budget_bytes")
    if not time_limit > 0:
        raise ValueError(f"time_limit = {time_limit!r}, expected a positive number of seconds")
    if not 0 <= gap < math.inf:
        raise ValueError(f"gap = {gap!r}, expected a number of at least 0")
    program = log if isinstance(log, Program) else Program.from_log(log)
    model = _Model(program, budget, most_operations)
    if model.least_bytes > budget:
        raise InfeasibleError(
            f"no schedule fits in {budget} bytes: one operation with its inputs and the constants "
            f"takes {model.least_bytes} bytes",
            model.least_bytes,
        )
    found, bound, status = model.solve(time_limit, gap)
    if found is None:
        if status == "infeasible":
            raise InfeasibleError(
                f"no schedule fits in {budget} bytes (at least {model.least_bytes} are needed)",
                model.least_bytes,
            )
        raise RuntimeError(
            f"HiGHS found no schedule in {time_limit:g} s for {len(model.nodes)} operations and "
            f"{budget} bytes; give it more time or a larger budget"
        )
    steps = model.steps(found)
    priced = price(program, steps)
    relative = priced.compute_ns / bound - 1 if bound > 0 else 0.0
    relative = relative if relative > _NOISE else 0.0
    return Checkmate(status, tuple(steps), priced, budget, bound, relative)


class _Rows:
    """Sparse constraints lower <= A x <= upper, gathered row by row."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        for column, value in terms:
            self.row.append(len(self.lower))
            self.column.append(column)
            self.value.append(value)
        self.lower.append(lower)
        self.upper.append(upper)


class _Model:
    """The integer linear program of a program and a budget.

    Columns: run[t, i], keep[t, i] for i <= t and i < t, drop[t, i, k] for the readers k of i in
    stage t, used[t, k] (memory while k could run in stage t).
    """

    def __init__(self, program: Program, budget: int, most: int) -> None:
        self.program = program
        self.nodes = [o for o in program.steps if o >= 0 and not program.is_constant(o)]
        n = len(self.nodes)
        if n > most:
            raise ValueError(
                f"the program has {n} operations (constants aside), which make more than "
                f"{2 * n * n} unknowns; at most {most} are taken (most_operations)"
            )
        place = {operation: i for i, operation in enumerate(self.nodes)}
        self.constant_bytes = sum(
            program.new_bytes(o) for o in range(len(program.cost_ns)) if o not in place
        )
        self.reads: list[list[int]] = [[] for _ in range(n)]
        self.readers: list[set[int]] = [{i} for i in range(n)]
        self.carrier: list[set[int]] = [set() for _ in range(n)]
        owner = self._owners(place)
        for i, operation in enumerate(self.nodes):
            reads = {
                place[program.operation[t]]
                for t in program.inputs[operation]
                if program.operation[t] in place
            }
            self.reads[i] = sorted(reads)
            for t in program.inputs[operation]:
                if program.storage[t] in owner:
                    self.readers[owner[program.storage[t]]].add(i)
                if program.operation[t] in place:
                    self.readers[place[program.operation[t]]].add(i)
            self.carrier[i] = {
                owner[program.storage[t]]
                for t in program.outputs[operation]
                if program.is_alias[t] and program.storage[t] in owner
            } - {i}
            for source in self.carrier[i]:
                self.readers[source].add(i)
        self.pinned: dict[int, int] = {}  # operation -> the stage that finds it pinned
        stage = 0
        for step in program.steps:
            if step < 0 and program.operation[~step] in place:
                self.pinned.setdefault(place[program.operation[~step]], stage)
            stage += step in place
        self.bytes = [program.new_bytes(o) for o in self.nodes]
        self.cost = [program.cost_ns[o] for o in self.nodes]
        self.least_bytes = self.constant_bytes + max(
            (
                size + sum(self.bytes[j] for j in self._held_by(i))
                for i, size in enumerate(self.bytes)
            ),
            default=0,
        )
        self.unit = max(1, math.gcd(*self.bytes) if n else 1)
        if budget // self.unit > _RESOLUTION:
            self.unit = -(-budget // _RESOLUTION)
        self.sizes = [-(-size // self.unit) for size in self.bytes]
        self.room = max(0, budget - self.constant_bytes) // self.unit
        self._number()

    def _owners(self, place: dict[int, int]) -> dict[int, int]:
        """Return the place of the operation that allocates each storage that is not constant."""
        program = self.program
        return {
            program.storage[t]: place[program.operation[t]]
            for t in range(len(program.storage))
            if not program.is_alias[t] and program.operation[t] in place
        }

    def _held_by(self, i: int) -> set[int]:
        held = set(self.reads[i])
        for j in self.reads[i]:
            held |= self.carrier[j]
        return held - {i}

    def _number(self) -> None:
        n = len(self.nodes)
        self.columns = 0
        self.run: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self.used: dict[tuple[int, int], int] = {}
        self.drop: dict[tuple[int, int, int], int] = {}
        for table, pairs in (
            (self.run, ((t, i) for t in range(n) for i in range(t + 1))),
            (self.keep, ((t, i) for t in range(n + 1) for i in range(min(t, n)))),
            (self.used, ((t, k) for t in range(n) for k in range(t + 1))),
        ):
            for pair in pairs:
                table[pair] = self.columns
                self.columns += 1
        for t in range(n):
            for i in range(t + 1):
                for k in sorted(self.readers[i]):
                    if k <= t:
                        self.drop[t, i, k] = self.columns
                        self.columns += 1

    def _constraints(self) -> _Rows:
        rows = _Rows()
        n = len(self.nodes)
        run, keep = self.run, self.keep
        for t in range(n):
            for i in range(t + 1):
                for j in self.reads[i]:
                    rows.add([(run[t, i], 1.0), (run[t, j], -1.0), *self._kept(t, j)], -1.0, 0.0)
                # The tensors that the next stage keeps were kept by this one, or computed in it.
                rows.add([(keep[t + 1, i], 1.0), (run[t, i], -1.0), *self._kept(t, i)], -1.0, 0.0)
                for source in self.carrier[i]:
                    rows.add([(keep[t + 1, i], 1.0), (keep[t + 1, source], -1.0)], -1.0, 0.0)
                if (t, i) in keep:
                    rows.add([(keep[t, i], 1.0), (run[t, i], 1.0)], 0.0, 1.0)
            self._memory(rows, t)
            for i in range(t + 1):
                self._drops(rows, t, i)
        return rows

    def _kept(self, t: int, i: int) -> list[tuple[int, float]]:
        return [(self.keep[t, i], -1.0)] if (t, i) in self.keep else []

    def _memory(self, rows: _Rows, t: int) -> None:
        """Constrain used[t, k] to the bytes in memory when k runs, its outputs included."""
        kept = [(self.keep[t, i], -float(self.sizes[i])) for i in range(t)]
        first = (self.run[t, 0], -float(self.sizes[0]))
        rows.add([(self.used[t, 0], 1.0), first, *kept], 0.0, 0.0)
        for k in range(1, t + 1):
            terms = [
                (self.used[t, k], 1.0),
                (self.used[t, k - 1], -1.0),
                (self.run[t, k], -float(self.sizes[k])),
            ]
            terms += [
                (self.drop[t, i, k - 1], float(self.sizes[i]))
                for i in range(k)
                if (t, i, k - 1) in self.drop
            ]
            rows.add(terms, 0.0, 0.0)

    def _drops(self, rows: _Rows, t: int, i: int) -> None:
        """Constrain drop[t, i, k]: k runs, i is not kept, nothing after k reads i in stage t."""
        readers = sorted(k for k in self.readers[i] if k <= t)
        for index, k in enumerate(readers):
            hazards = [(self.run[t, k], -1.0), (self.keep[t + 1, i], 1.0)]
            hazards += [(self.run[t, later], 1.0) for later in readers[index + 1 :]]
            column = self.drop[t, i, k]
            count = float(len(hazards))
            rows.add([(column, count), *hazards], -math.inf, count - 1.0)

    def solve(
        self, time_limit: float, gap: float
    ) -> tuple[dict[tuple[int, int], bool] | None, float, str]:
        """Return run[t, i], a lower bound in nanoseconds, and a word about how the search ended."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ImportError(
                "checkmate needs SciPy: `pip install scipy`, or in a clone of rotor "
                '`pip install ".[ilp]"`'
            ) from error
        n = len(self.nodes)
        if n == 0:
            return {}, 0.0, "optimal"
        rows = self._constraints()
        lower, upper = np.zeros(self.columns), np.ones(self.columns)
        integral = np.ones(self.columns)
        for column in self.used.values():
            upper[column] = self.room
            integral[column] = 0
        for t in range(n):
            lower[self.run[t, t]] = 1
        for i, begin in self.pinned.items():
            for t in range(begin, n + 1):
                lower[self.keep[t, i]] = 1
        for i in range(n):
            if i not in self.pinned:
                upper[self.keep[n, i]] = 0
        scale = max(1, sum(self.cost))
        objective = np.zeros(self.columns)
        for (_, i), column in self.run.items():
            objective[column] = self.cost[i] / scale
        matrix = csr_array(
            (rows.value, (rows.row, rows.column)), shape=(len(rows.lower), self.columns)
        )
        result: Any = milp(
            objective,
            integrality=integral,
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, rows.lower, rows.upper),
            options={"time_limit": float(time_limit), "mip_rel_gap": float(gap)},
        )
        if result.x is None:
            return None, math.inf, "infeasible" if result.status == 2 else "time limit"
        bound = float(result.mip_dual_bound) * scale
        word = "optimal" if result.status == 0 else "time limit"
        return {key: bool(result.x[c] > 0.5) for key, c in self.run.items()}, bound, word

    def steps(self, run: dict[tuple[int, int], bool]) -> list[int]:
        """Return the schedule of a solution stage by stage, constants and pins as in the log."""
        program = self.program
        first = {operation: t for t, operation in enumerate(self.nodes)}
        steps: list[int] = []
        for step in program.steps:
            if step >= 0 and step in first:
                t = first[step]
                steps += [self.nodes[i] for i in range(t + 1) if run[t, i]]
            else:
                steps.append(step)
        return steps
