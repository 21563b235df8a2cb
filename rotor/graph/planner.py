"""The planner: greedy walks and a local search for a program within a budget, judged exactly."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rotor.algorithms.curve import Curve
from rotor.algorithms.utils import ProgressCallback
from rotor.errors import InfeasibleError
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.peaks import peak_of
from rotor.graph.program import Program
from rotor.units import check_count, exact_bytes, parse_bytes

OPTIONS = ("effort", "seed", "time_limit")
"""Names of the options of `plan`."""

# (random greedy runs, moves of the local search) of the named efforts.
_EFFORTS = {"fast": (0, 12_000), "default": (100, 300_000)}
_CURVE_EFFORTS = {"fast": (0, 1_500), "default": (4, 12_000)}
_UNIT = (10, 10_000)
_MOST_RUNS = 300
MOST_POINTS = 10_000
"""Most points of a curve."""
_LARGEST_EFFORT = 1_000_000
_MOST_LEAST = 64
_Link = tuple[float, float, int, bool, int, int, int]
_least: OrderedDict[tuple[int, _Link | None], tuple[int, bytes]] = OrderedDict()
"""Least peaks, and the programs that have them, of the latest graphs that were refused."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for an option that `rotor.graph.plan` does not take."""
    unknown = sorted(set(options) - {*OPTIONS})
    if unknown:
        raise TypeError(
            f"unknown option {unknown[0]!r}, expected effort, seed or time_limit of "
            "rotor.graph.plan"
        )
    _effort(options.get("effort", "default"), _EFFORTS)
    _limit_ns(options.get("time_limit"))
    _seed(options.get("seed", 0))


def _effort(effort: str | int, named: dict[str, tuple[int, int]]) -> tuple[int, int]:
    if isinstance(effort, str):
        if effort not in named:
            raise ValueError(
                f"effort = {effort!r}, expected one of {', '.join(named)}, or a whole number"
            )
        return named[effort]
    if isinstance(effort, bool) or not isinstance(effort, int):
        raise TypeError(f"effort must be text or a whole number, got {effort!r}")
    if not 0 <= effort <= _LARGEST_EFFORT:
        raise ValueError(f"effort = {effort}, expected 0 to {_LARGEST_EFFORT}")
    return min(_UNIT[0] * effort, _MOST_RUNS), _UNIT[1] * effort


def _limit_ns(time_limit: float | None) -> int:
    if time_limit is None:
        return 0
    if isinstance(time_limit, bool) or not isinstance(time_limit, int | float):
        raise TypeError(f"time_limit must be seconds or None, got {time_limit!r}")
    if not time_limit > 0:
        raise ValueError(f"time_limit = {time_limit!r}, expected more than 0 seconds")
    return 0 if math.isinf(time_limit) or time_limit > 1e9 else max(1, round(time_limit * 1e9))


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    return int(seed) & 0xFFFF_FFFF_FFFF_FFFF


def plan(
    graph: Graph,
    budget_bytes: int | str,
    *,
    effort: str | int = "default",
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    start: Program | None = None,
    link: Link | None = None,
) -> Program:
    """Return the fastest program found whose peak is within a budget.

    Parameters
    ----------
    graph
        The graph to run.
    budget_bytes
        The most bytes that may be live at any moment, or text such as "700MiB".
    effort
        "default": quality first, a few seconds for 1,000 operations. "fast": under half a second
        for them. A whole number: that many units of 10 greedy runs and 10,000 moves.
    time_limit
        Seconds after which the best program so far is returned; the result then depends on the
        machine.
    seed
        Seed of the search; equal seeds give equal programs.
    progress
        Called with ``(done, total)`` about every 0.05 s.
    start
        Program of the same operations to begin from; above the budget it is repaired. An effort
        without random greedy runs, such as "fast", then takes no other walks.
    link
        Link to a second tier of memory: each storage is then kept, made again, or moved to the tier
        and back, as is fastest by the link's speed, and never slower than without the tier. Plan
        with less than the speed that was measured: a link half as fast as was planned with costs
        more than the tier gains.

    Returns
    -------
    Program
        Its peak is within the budget, by the simulator.

    Raises
    ------
    InfeasibleError
        No program was found; ``minimum_bytes`` is the least budget that is accepted, which need not
        be the least possible. It follows from bytes alone: neither times nor effort change it.
    InvalidSequenceError
        `start` is no program of this graph.
    ValueError, TypeError
        An argument is not as described; a graph that is not plain (`Graph.is_plain`) has a link.
    """
    if link is not None:
        graph.require_plain("a plan with a second tier")
    budget = parse_bytes(budget_bytes, name="budget_bytes")
    runs, moves = _effort(effort, _EFFORTS)
    tier = _tier(link)
    begin = None if start is None else start.ops if link is None else start.actions
    shape = graph.core.sum, tier
    minimum, least = (0, b"") if begin is not None else _least.get(shape, (0, b""))
    if budget >= minimum:
        ops, minimum, ops_of_least = graph.core.plan(
            budget, runs, moves, _seed(seed), _limit_ns(time_limit), progress, begin, tier
        )
        if ops is not None:
            return Program(graph, np.frombuffer(ops, dtype=np.int32), link)
        least = bytes(ops_of_least or b"")
        _least[shape] = minimum, least
        if len(_least) > _MOST_LEAST:
            _least.popitem(last=False)
    raise _refusal(budget, minimum, Program(graph, np.frombuffer(least, dtype=np.int32), link))


def _refusal(budget: int, minimum: int, least: Program) -> InfeasibleError:
    """Return the error for a budget below the least peak that was found, of a program."""
    within, at_least = exact_bytes(budget), exact_bytes(minimum)
    if least.link is not None:
        return InfeasibleError(
            f"no program was found within {within}, with the second tier or without; the least "
            f"peak that was found is {at_least}: give at least {minimum} bytes, or a tier that "
            "holds more",
            minimum,
            peak=peak_of(least),
        )
    bound = lower_bound(least.graph)
    return InfeasibleError(
        f"no program was found within {within}; the least peak that was found is {at_least}, and "
        f"none can be below {exact_bytes(bound)}: give at least {minimum} bytes",
        minimum,
        bound,
        peak_of(least),
    )


class PlanCurve(Curve):
    """Programs that the planner found for all budgets: a `Curve` with its programs.

    Parameters
    ----------
    programs
        By ascending peak and strictly descending time.
    least_bytes
        The least budget that `plan` accepts: programs of smaller peaks have their points there.

    Attributes
    ----------
    programs
        One for each point of the curve, in its order.
    least_bytes
        As given.
    lower_bound_bytes
        Bytes below which no program can stay; 0 where programs may use a second tier.
    """

    def __init__(self, programs: Sequence[Program], least_bytes: int = 0) -> None:
        super().__init__(
            [max(program.peak_bytes, least_bytes) for program in programs],
            [program.makespan for program in programs],
        )
        self.programs = tuple(programs)
        self.least_bytes = least_bytes
        first = programs[0]
        self.lower_bound_bytes = lower_bound(first.graph) if first.link is None else 0

    @classmethod
    def of(cls, programs: Iterable[Program], least_bytes: int = 0) -> PlanCurve:
        """Return the curve of the programs that no other beats in both budget and time."""
        kept: list[Program] = []
        for program in sorted(programs, key=lambda p: (max(p.peak_bytes, least_bytes), p.time_ns)):
            if not kept or program.time_ns < kept[-1].time_ns:
                kept.append(program)
        return cls(kept, least_bytes)


def curve(
    graph: Graph,
    points: int = 40,
    *,
    effort: str | int = "default",
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    link: Link | None = None,
) -> PlanCurve:
    """Return plans for many budgets, each begun from its neighbours.

    Parameters
    ----------
    graph
        The graph to run.
    points
        Budgets to plan for, in equal steps from the least that `plan` accepts to the peak without
        recomputation.
    effort
        "default", "fast", or a whole number: per budget and sweep, that many units of 10 greedy
        runs and 10,000 moves.
    time_limit
        Seconds after which no further budget is planned for; low ones are then missing.
    seed
        Seed of the search; equal seeds give equal programs.
    progress
        Called with ``(done, total)`` about every 0.05 s.
    link
        Link to a second tier of memory, which programs may then use, as for `plan`. The curve
        nowhere lies above the one without it.

    Returns
    -------
    PlanCurve
        The programs of which none beats another; at most `points` of them, twice as many with a
        link.

    Raises
    ------
    ValueError, TypeError
        An argument is not as described; a graph that is not plain (`Graph.is_plain`) has a link.
    """
    if link is not None:
        graph.require_plain("a curve with a second tier")
    points = check_count(points, "points", 1, MOST_POINTS)
    runs, moves = _effort(effort, _CURVE_EFFORTS)
    found, least = graph.core.curve(
        points, runs, moves, _seed(seed), _limit_ns(time_limit), progress, _tier(link)
    )
    programs = (Program(graph, np.frombuffer(ops, dtype=np.int32), link) for ops in found)
    return PlanCurve.of(programs, least)


def _tier(link: Link | None) -> _Link | None:
    if link is not None and not isinstance(link, Link):
        raise TypeError(f"link must be a rotor.graph.Link or None, got {link!r}")
    return None if link is None else link.core


def lower_bound(graph: Graph, *, moves: bool = False) -> int:
    """Return bytes below which no program of the graph can stay.

    The largest, over operations, of the bytes that are live in the first run of one in every order:
    its inputs, outputs and workspace, pinned storages that are made before it, and results of the
    loss and others that cannot be made again and that are read after it. The operation that makes a
    pinned storage last has all the others beside it. And of the operations that need the most, the
    one whose last run is the last of all has beside it the gradients that exist, and what those
    still to be made follow from: by a minimum cut, the least of both.

    Parameters
    ----------
    graph
        The graph to run.
    moves
        True for programs with a second tier, which may hold what cannot be made again.

    Returns
    -------
    int
        The bytes, a proven bound; a program of so few need not exist.
    """
    if moves:
        free = [
            replace(op, once=op.once and op.phase == "loss", clock="compute")
            for op in graph.operations
        ]
        graph = Graph(graph.storages, None, free)
    return graph.core.lower_bound(moves)
