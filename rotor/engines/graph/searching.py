"""Searches in the background, and the plans of the programs that they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rotor.common.background import Job, Stopped, Work
from rotor.engines.contract import Context
from rotor.engines.graph.planned import GraphPlan, PlanningRecord
from rotor.errors import InfeasibleError
from rotor.graph import planner
from rotor.graph.graph import Graph
from rotor.graph.program import Program

__all__ = [
    "LEAST_GAIN",
    "MOST_ROUNDS",
    "SMALL_GAIN",
    "begun_with",
    "exchanged",
    "is_fastest",
    "outcome_of",
]

MOST_ROUNDS = 3
"""Number of searches for one program."""

SMALL_GAIN = 0.01
"""Gain of a search after which no other one follows."""

LEAST_GAIN = 0.001
"""Gain from which a program is exchanged, which takes the time of making its code."""


def _search(
    graph: Graph, budget: int, options: dict[str, Any], start: Program, stops: Callable[[], bool]
) -> tuple[Program, float]:
    """Return the best program found, and the seconds of CPU time that it took."""

    def progress(done: int, total: int) -> None:
        if stops():
            raise Stopped

    begun = time.thread_time()
    try:
        found = planner.plan(graph, budget, progress=progress, start=start, **options)
    except InfeasibleError:
        found = start
    return found, time.thread_time() - begun


def begun_with(
    graph: Graph,
    plan: GraphPlan,
    start: Program,
    own_bytes: int,
    options: Mapping[str, Any],
    rounds: int,
) -> Work:
    """Return the work of a search that begins with a program, after a number of earlier searches.

    The limit and the reserve are those of `plan`, and the link is that of `start`. `own_bytes` are
    to be left beside the graph's storages.
    """
    budget = max(plan.limit_bytes - own_bytes - plan.reserve_bytes, 1)
    seeded = {**options, "seed": options.get("seed", 0) + rounds, "link": start.link}
    return partial(_search, graph, budget, seeded, start)


def outcome_of(job: Job, context: Context) -> tuple[tuple[Program, float] | None, bool]:
    """Return the result of a search that has ended, and whether it failed; warn if so."""
    try:
        return job.result(), False
    except Exception as error:
        context.warn(
            "planning",
            f"the search for a better plan failed ({type(error).__name__}: {error}), and the "
            "model trains on under the plan so far, which keeps the limit: "
            'planning="before" searches before the first step, and raises such errors',
        )
        return None, True


def is_fastest(plan: GraphPlan) -> bool:
    """Return whether no program can be faster: nothing runs again, and no run waits for a tier."""
    return not plan.recomputed and not plan.program.waited


def exchanged(old: GraphPlan, program: Program, own: int, record: PlanningRecord) -> GraphPlan:
    """Return the plan of a better program, under the conditions of the old one, and count it.

    `own` are the bytes kept beside the graph's storages.
    """
    new = GraphPlan(
        old.step,
        program.graph,
        program,
        old.limit_bytes,
        own,
        old.loss_bytes,
        record,
        reserve_bytes=old.reserve_bytes,
        short_bytes=old.short_bytes,
    )
    new.warned_bytes = old.warned_bytes
    new.sparse_bytes = old.sparse_bytes
    record.improved += 1
    return new
