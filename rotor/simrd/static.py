"""Static planners on the graphs of logs: what can be had when the program is known beforehand.

A planner chooses the results to keep among the operations before the BACKWARD annotation; the
backward pass computes the others again. Each schedule is priced once, exactly
(`rotor.simrd.program.price`), and is a point (peak bytes, slow-down).

Cuts. A position in the order of the forward operations, with everything that was made before it and
is read by a forward operation behind it: its crossing. Keeping the crossings of some cuts makes
every segment between two cuts computable by itself, once [1]_, when the backward pass first reads
from it; the last segment is kept as a whole. A position that at most one storage crosses is an
articulation: there the network is a chain [2]_.

References
----------
.. [1] T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost",
   arXiv:1604.06174, 2016.
.. [2] P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
   MLSys 2020: its baselines, at articulation points and beyond.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rotor.algorithms.griewank import revolve_sequence
from rotor.algorithms.persistent import Persistent
from rotor.algorithms.sequence import Sequence as ChainSequence
from rotor.chain import Chain
from rotor.simrd.program import Program, price

if TYPE_CHECKING:
    from rotor.simrd.logs import Log

__all__ = ["PLANNERS", "StaticPoint", "plan", "solve"]

_GREEDY_STEPS = 24
_MOST_REVOLVE = 24
_MOST_BUDGETS = 24


@dataclass(frozen=True)
class StaticPoint:
    """One schedule of a planner.

    Attributes
    ----------
    planner
        Its name in `PLANNERS`.
    parameter
        Value that was swept: cuts, bytes of a segment, checkpoints; 0 if nothing is.
    peak_bytes
        Most in memory, constants included.
    compute_ns
        Nanoseconds of all executions.
    slowdown
        `compute_ns` over the time of the program without any recomputation.
    n_remat
        Executions beyond the first of each operation.
    """

    planner: str
    parameter: int
    peak_bytes: int
    compute_ns: int
    slowdown: float
    n_remat: int


class Cuts:
    """Positions where the forward pass of a program can be cut, and the storages across each.

    Constants and pins belong to no cut.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.forward = [
            step
            for step in program.steps[: program.forward_steps]
            if step >= 0 and not program.is_constant(step)
        ]
        pinned = program.pinned_storages
        made: dict[int, int] = {}
        read: dict[int, int] = {}
        for k, operation in enumerate(self.forward):
            for tensor in program.outputs[operation]:
                made.setdefault(program.storage[tensor], k)
            for tensor in program.inputs[operation]:
                read[program.storage[tensor]] = k
        self.made = {s: k for s, k in made.items() if s not in pinned}
        self.read = {s: k for s, k in read.items() if s in self.made}

    def crossing(self, position: int) -> set[int]:
        """Return storages made before forward operation `position` and read by it or behind it."""
        return {s for s, k in self.read.items() if self.made[s] < position <= k}

    def articulations(self) -> list[int]:
        """Return the positions, 1 to n - 1, that at most one storage crosses."""
        change = [0] * (len(self.forward) + 1)
        for storage, last in self.read.items():
            change[self.made[storage] + 1] += 1
            change[last + 1] -= 1
        found = []
        crossing = 0
        for position in range(1, len(self.forward)):
            crossing += change[position]
            if crossing <= 1:
                found.append(position)
        return found


class _Builder:
    """Writer of a schedule: knows which tensors exist, and computes missing ones again."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[int] = []
        self.available: set[int] = set()

    def do(self, step: int) -> None:
        """Execute an operation, or pin a tensor; both after what they need."""
        if step < 0:
            self.ensure([~step])
            self.steps.append(step)
            return
        self.ensure(self.program.inputs[step])
        self._execute(step)

    def _execute(self, operation: int) -> None:
        self.steps.append(operation)
        self.available.update(self.program.outputs[operation])

    def ensure(self, tensors: Iterable[int]) -> None:
        """Execute, in the order of the program, all that is missing for these tensors."""
        stack = [t for t in tensors if t not in self.available]
        wanted: set[int] = set()
        while stack:
            operation = self.program.operation[stack.pop()]
            if operation not in wanted:
                wanted.add(operation)
                stack += [t for t in self.program.inputs[operation] if t not in self.available]
        for operation in sorted(wanted):
            self._execute(operation)

    def forget(self, storages: Iterable[int], tensors_of: dict[int, list[int]]) -> None:
        """Count the tensors of these storages as gone."""
        for storage in storages:
            self.available.difference_update(tensors_of.get(storage, ()))


def segments(cuts: Cuts, positions: Sequence[int]) -> list[int]:
    """Return the schedule that keeps what crosses some cuts, and computes each segment once more.

    `positions` of the cuts are ascending, between 1 and the number of forward operations less 1;
    without any, everything is kept. Steps are as in `rotor.simrd.program`.
    """
    program = cuts.program
    builder = _Builder(program)
    for step in program.steps[: program.forward_steps]:
        builder.do(step)
    segment = {o: bisect_right(positions, k) for k, o in enumerate(cuts.forward)}
    kept = {
        storage
        for storage, first in cuts.made.items()
        if bisect_right(positions, first) == len(positions)
        or bisect_right(positions, first) < bisect_right(positions, cuts.read.get(storage, 0))
    }
    tensors_of = _tensors_of(program)
    builder.forget(set(cuts.made) - kept, tensors_of)
    backward = program.steps[program.forward_steps :]
    later = _read_by(program, backward)
    wanted: dict[int, list[int]] = {}
    for tensor in sorted(later):
        operation = program.operation[tensor]
        if operation in segment:
            wanted.setdefault(segment[operation], []).append(tensor)
    for step in backward:
        needed = [~step] if step < 0 else program.inputs[step]
        for tensor in needed:
            if tensor not in builder.available and program.operation[tensor] in segment:
                builder.ensure(wanted[segment[program.operation[tensor]]])
        builder.do(step)
    return builder.steps


def _tensors_of(program: Program) -> dict[int, list[int]]:
    listed: dict[int, list[int]] = {}
    for tensor, storage in enumerate(program.storage):
        listed.setdefault(storage, []).append(tensor)
    return listed


def _read_by(program: Program, steps: Iterable[int]) -> set[int]:
    read: set[int] = set()
    for step in steps:
        read.update([~step] if step < 0 else program.inputs[step])
    return read


def stage_chain(cuts: Cuts) -> tuple[Chain, list[int]]:
    """Return the chain between the articulations, and where its stages begin.

    Its sizes are the bytes of storages, its temporaries the bytes that a forward makes and drops;
    algorithms plan on it, the schedule is priced on the program. For n stages there are n + 1
    positions among the forward operations, 0 and their number included.
    """
    program = cuts.program
    bounds = [0, *cuts.articulations(), len(cuts.forward)]
    backward = program.steps[program.forward_steps :]
    later_storages = {program.storage[tensor] for tensor in _read_by(program, backward)}
    backward_ns = sum(program.cost_ns[step] for step in backward if step >= 0)
    forward_ns = [sum(program.cost_ns[o] for o in cuts.forward[a:b]) for a, b in pairwise(bounds)]
    x = [sum(program.storage_bytes[s] for s in cuts.crossing(b)) for b in bounds]
    xbar, temporary = [], []
    for index, (a, b) in enumerate(pairwise(bounds)):
        inside = [s for s, k in cuts.made.items() if a <= k < b]
        output = cuts.crossing(b)
        kept = sum(program.storage_bytes[s] for s in inside if s in later_storages | output)
        xbar.append(max(kept, x[index + 1]))
        temporary.append(sum(program.storage_bytes[s] for s in inside) - kept)
    total = max(1, sum(forward_ns))
    chain = Chain(
        [ns / 1e9 for ns in forward_ns],
        [backward_ns * ns / total / 1e9 for ns in forward_ns],
        x,
        xbar,
        temporary,
        [0] * len(forward_ns),
        hold_output=False,
    )
    return chain, bounds


def chain_schedule(cuts: Cuts, bounds: Sequence[int], sequence: ChainSequence) -> list[int]:
    """Return the steps of a program for a sequence on its chain of stages.

    "Fn" and "Fck" compute the output of a stage and count on nothing else of it; "Fe" computes all
    that the backward pass reads of it; "B" runs the backward pass as far as it reads from this
    stage and later ones only. What is read out of turn is computed again when it is.

    `bounds` are those of `stage_chain`, whose chain the sequence is on; the steps are as
    `rotor.simrd.program.price` takes them.
    """
    program = cuts.program
    builder = _Builder(program)
    stage = {o: bisect_right(bounds, k) - 1 for k, o in enumerate(cuts.forward)}
    inside: dict[int, set[int]] = {}
    for storage, k in cuts.made.items():
        inside.setdefault(bisect_right(bounds, k) - 1, set()).add(storage)
    outputs = [cuts.crossing(bound) for bound in bounds[1:]]
    tensors_of = _tensors_of(program)
    parts = _forward_parts(program, stage, len(bounds) - 1)
    backward = list(program.steps[program.forward_steps :])
    last_read = {t: k for k, step in enumerate(backward) for t in _read_by(program, [step])}
    seen = -1
    done = 0
    for operation in sequence:
        i = operation.stage
        if operation.kind == "L":
            continue
        if operation.kind == "B":
            while done < len(backward) and (
                i == 0 or _lowest_stage(program, backward[done], stage, outputs[i - 1]) >= i
            ):
                builder.do(backward[done])
                done += 1
            continue
        if i > seen:
            for step in parts[i]:
                builder.do(step)
            seen = i
        else:
            wanted = {t for s in outputs[i] for t in tensors_of[s]}
            if operation.kind == "Fe":
                inner = (t for s in inside.get(i, ()) for t in tensors_of[s])
                wanted = {t for t in inner if last_read.get(t, -1) >= done}
            builder.ensure(t for t in sorted(wanted) if stage.get(program.operation[t]) == i)
        if operation.kind != "Fe":
            builder.forget(inside.get(i, set()) - outputs[i], tensors_of)
        if operation.kind == "Fn" and i > 0:
            builder.forget(outputs[i - 1] - outputs[i], tensors_of)
    for step in backward[done:]:
        builder.do(step)
    return builder.steps


def _forward_parts(program: Program, stage: dict[int, int], count: int) -> list[list[int]]:
    """Return the forward steps of each stage; constants and pins follow the operation before."""
    parts: list[list[int]] = [[] for _ in range(count)]
    at = 0
    for step in program.steps[: program.forward_steps]:
        at = stage.get(step, at) if step >= 0 else at
        parts[at].append(step)
    return parts


def _lowest_stage(program: Program, step: int, stage: dict[int, int], input_of: set[int]) -> int:
    read = [t for t in _read_by(program, [step]) if program.storage[t] not in input_of]
    made = [program.operation[t] for t in read]
    return min((stage[operation] for operation in made if operation in stage), default=len(stage))


Schedules = Iterator[tuple[int, list[int]]]


def _everywhere(cuts: Cuts) -> list[int]:
    return list(range(1, len(cuts.forward)))


def _every(cuts: Cuts, candidates: list[int]) -> Schedules:
    """Return every k-th candidate, k from the published floor(sqrt) to one cut and to all."""
    n = len(candidates)
    if n == 0:
        return
    root = math.isqrt(n)
    periods = {root, *(max(1, round(root * 2 ** (e / 2))) for e in range(-8, 9))}
    for period in sorted(period for period in periods if 1 <= period <= n):
        yield period, segments(cuts, candidates[period - 1 :: period])


def _greedy(cuts: Cuts, candidates: list[int]) -> Schedules:
    """Return cuts at the first candidate after every so many bytes, swept over the scales."""
    program = cuts.program
    sizes = [program.new_bytes(operation) for operation in cuts.forward]
    total, largest = sum(sizes), max(sizes, default=0)
    if not candidates or total == 0:
        return
    allowed = set(candidates)
    known: set[tuple[int, ...]] = set()
    for step in range(_GREEDY_STEPS):
        limit = round(max(1, largest) * (total / max(1, largest)) ** (step / _GREEDY_STEPS))
        positions = []
        held = 0
        for position, size in enumerate(sizes):
            if held > limit and position in allowed:
                positions.append(position)
                held = 0
            held += size
        if tuple(positions) not in known:
            known.add(tuple(positions))
            yield limit, segments(cuts, positions)


def _griewank(cuts: Cuts) -> Schedules:
    if not cuts.articulations():
        return
    chain, bounds = stage_chain(cuts)
    n = len(chain)
    most = _MOST_REVOLVE
    numbers: Iterable[int] = range(n)
    if n > most:
        numbers = sorted({round((n - 1) ** (k / (most - 1))) for k in range(most)})
    for checkpoints in numbers:
        yield checkpoints, chain_schedule(cuts, bounds, revolve_sequence(chain, checkpoints))


def _persistent(cuts: Cuts) -> Schedules:
    if not cuts.articulations():
        return
    chain, bounds = stage_chain(cuts)
    algorithm = Persistent()
    budgets = algorithm.curve(chain).bytes.tolist()
    last = len(budgets) - 1
    for index in sorted({round(last * k / (_MOST_BUDGETS - 1)) for k in range(_MOST_BUDGETS)}):
        sequence = algorithm.solve(chain, budgets[index])
        yield budgets[index], chain_schedule(cuts, bounds, sequence)


PLANNERS: dict[str, Callable[[Cuts], Schedules]] = {
    "checkpoint_all": lambda cuts: iter([(0, list(cuts.program.steps))]),
    "chen_sqrt": lambda cuts: _every(cuts, _everywhere(cuts)),
    "chen_sqrt_ap": lambda cuts: _every(cuts, cuts.articulations()),
    "chen_greedy": lambda cuts: _greedy(cuts, _everywhere(cuts)),
    "chen_greedy_ap": lambda cuts: _greedy(cuts, cuts.articulations()),
    "griewank": _griewank,
    "persistent": _persistent,
}
"""The planners by name: cuts of a program -> schedules with what was swept.

"checkpoint_all" keeps everything; "chen_sqrt" keeps every k-th cut, k around the square root of
their number; "chen_greedy" cuts after every so many bytes; with "_ap", articulations only;
"griewank" is revolve on the chain between the articulations, on every number of checkpoints;
"persistent" the best persistent schedules of that chain, as `rotor.algorithms.Persistent` sees it.
"""


def plan(log: Log | Program, planners: Iterable[str] | None = None) -> list[StaticPoint]:
    """Return all points of some planners on a log.

    Parameters
    ----------
    log
        With a BACKWARD annotation; without one, the whole log is forward and nothing is recomputed.
    planners
        Names out of `PLANNERS`; all by default. One that has nothing to offer on this log (no
        articulation, say) gives no point.

    Returns
    -------
    list of StaticPoint
        In the order of the planners, then of what they sweep.

    Raises
    ------
    ValueError
        A planner is unknown; the message lists all names.
    """
    names = list(PLANNERS) if planners is None else list(planners)
    for name in names:
        if name not in PLANNERS:
            raise ValueError(f"no planner is named {name!r}, expected one of {', '.join(PLANNERS)}")
    program = log if isinstance(log, Program) else Program.from_log(log)
    cuts = Cuts(program)
    points = []
    for name in names:
        for parameter, steps in PLANNERS[name](cuts):
            found = price(program, steps)
            figures = (found.peak_bytes, found.compute_ns, found.slowdown, found.n_remat)
            points.append(StaticPoint(name, parameter, *figures))
    return points


def solve(points: Iterable[StaticPoint], budget_bytes: int) -> StaticPoint | None:
    """Return the fastest point within a budget, of equals the smallest; None where none fits."""
    fitting = [point for point in points if point.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda point: (point.slowdown, point.peak_bytes), default=None)
