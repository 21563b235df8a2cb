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
from typing import TYPE_CHECKING

from rotor.algorithms._integer_program import Operations, Solution, solve
from rotor.errors import InfeasibleError
from rotor.simrd.program import Price, Program, price
from rotor.units import exact_bytes, parse_bytes

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
            f"no schedule fits in {exact_bytes(budget)}: one operation with its inputs and the "
            f"constants takes {exact_bytes(model.least_bytes)}",
            model.least_bytes,
        )
    found = model.solve(time_limit, gap)
    if found.runs is None:
        if found.status == "infeasible":
            raise InfeasibleError(
                f"no schedule fits in {exact_bytes(budget)}: at least "
                f"{exact_bytes(model.least_bytes)} are needed",
                model.least_bytes,
            )
        raise RuntimeError(
            f"HiGHS found no schedule in {time_limit:g} s for {len(model.nodes)} operations and "
            f"{exact_bytes(budget)}; give it more time or a larger budget"
        )
    steps = model.steps(found.runs)
    priced = price(program, steps)
    relative = priced.compute_ns / found.bound - 1 if found.bound > 0 else 0.0
    relative = relative if relative > _NOISE else 0.0
    return Checkmate(found.status, tuple(steps), priced, budget, found.bound, relative)


class _Model:
    """A program as the integer program takes it: one value for each operation.

    What an operation reads includes the storages that its inputs and its own views lie on.
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
        self.made_by: list[set[int]] = []
        self.reads: list[set[int]] = []
        self.carrier: list[set[int]] = []
        owner = self._owners(place)
        for i, operation in enumerate(self.nodes):
            tensors = program.inputs[operation]
            reads = {place[program.operation[t]] for t in tensors if program.operation[t] in place}
            self.carrier.append(
                {
                    owner[program.storage[t]]
                    for t in program.outputs[operation]
                    if program.is_alias[t] and program.storage[t] in owner
                }
                - {i}
            )
            owners = {owner[program.storage[t]] for t in tensors if program.storage[t] in owner}
            self.made_by.append(reads)
            self.reads.append((reads | owners | self.carrier[i]) - {i})
        self.pinned: dict[int, int] = {}  # operation -> the stage that finds it pinned
        stage = 0
        for step in program.steps:
            if step < 0 and program.operation[~step] in place:
                waiting = [place[program.operation[~step]]]
                while waiting:
                    i = waiting.pop()
                    self.pinned.setdefault(i, stage)
                    waiting += self.carrier[i]
            stage += step in place
        self.bytes = [program.new_bytes(o) for o in self.nodes]
        self.cost = [program.cost_ns[o] for o in self.nodes]
        needs = [
            size + sum(self.bytes[j] for j in self._held_by(i)) for i, size in enumerate(self.bytes)
        ]
        self.least_bytes = self.constant_bytes + max(needs, default=0)
        self.unit = max(1, math.gcd(*self.bytes) if n else 1)
        if budget // self.unit > _RESOLUTION:
            self.unit = -(-budget // _RESOLUTION)
        self.sizes = [-(-size // self.unit) for size in self.bytes]
        self.room = max(0, budget - self.constant_bytes) // self.unit

    def _owners(self, place: dict[int, int]) -> dict[int, int]:
        """Return the place of the operation that allocates each storage that is not constant."""
        program = self.program
        return {
            program.storage[t]: place[program.operation[t]]
            for t in range(len(program.storage))
            if not program.is_alias[t] and program.operation[t] in place
        }

    def _held_by(self, i: int) -> set[int]:
        held = set(self.made_by[i])
        for j in self.made_by[i]:
            held |= self.carrier[j]
        return held - {i}

    def solve(self, time_limit: float, gap: float) -> Solution:
        """Return the runs of each stage, with a bound in nanoseconds."""
        if not self.nodes:
            return Solution("optimal", [], 0.0, "")
        operations = Operations(
            reads=[sorted(reads) for reads in self.reads],
            makes=[(i,) for i in range(len(self.nodes))],
            costs=self.cost,
            workspaces=[0] * len(self.nodes),
            repeatable=[True] * len(self.nodes),
            sizes=self.sizes,
            resident_from=self.pinned,
            within=dict(enumerate(map(sorted, self.carrier))),
        )
        return solve(operations, self.room, time_limit=time_limit, gap=gap)

    def steps(self, runs: list[list[int]]) -> list[int]:
        """Return the schedule of a solution by stages, constants and pins as in the log."""
        program = self.program
        again = {operation: runs[t] for t, operation in enumerate(self.nodes)}
        steps: list[int] = []
        for step in program.steps:
            steps += [self.nodes[i] for i in again[step]] if step in again else [step]
        return steps
