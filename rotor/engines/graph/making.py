"""Plans of captured graphs from a limit, or from a saved program."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.pricing import build_graph, search
from rotor.engines.graph.planned import GraphPlan, PlanningRecord, lower_bound_of
from rotor.errors import InfeasibleError
from rotor.graph.graph import Graph
from rotor.graph.program import Program
from rotor.units import exact_bytes


def loaded_plan(
    step: CapturedStep, source: Program | str | os.PathLike[str], limit_bytes: int
) -> GraphPlan:
    """Return the plan that runs a saved program: a program, its JSON text, or the path of a file.

    Raise ValueError if the file holds no program, or one of another graph, whose first difference
    the message has; InfeasibleError, with the need of the program, if that is more than the limit.
    """
    saved = source if isinstance(source, Program) else Program.from_json(source)
    graph = build_graph(step.lowered, step.costs, 0)
    difference = _difference(saved.graph, graph)
    if difference:
        raise ValueError(
            f"the program is one of another graph: {difference}. A program fits the model, the "
            "shapes of its arguments and the PyTorch version that it was made with"
        )
    loss_bytes = saved.graph.operations[step.lowered.loss].workspace_bytes
    link = None
    if len(saved.actions) > len(saved.ops):
        link = step.link
        if link is None:
            raise ValueError(
                "the program moves values to a second tier, and the model has none: give "
                'offload="disk" to Checkpointable'
            )
    program = Program(step.graph(loss_bytes), saved.actions, link)
    own = step.bytes_beside(program, limit_bytes)
    needed = program.peak_bytes + own
    if needed > limit_bytes:
        raise InfeasibleError(
            f"the program needs {exact_bytes(needed)}, and the limit is "
            f"{exact_bytes(limit_bytes)}: give at least {needed} bytes, or a program that was "
            "made for less",
            needed,
        )
    record = PlanningRecord("loaded")
    return GraphPlan(step, program.graph, program, limit_bytes, own, loss_bytes, record)


def _difference(saved: Graph, here: Graph) -> str:
    """Return the first difference of two graphs except times and workspaces; empty if equal."""
    if len(saved) != len(here):
        return f"it has {len(saved)} operations, the model has {len(here)}"
    if len(saved.storages) != len(here.storages):
        return f"it has {len(saved.storages)} storages, the model has {len(here.storages)}"
    names = ("name", "phase", "inputs", "outputs", "random", "once")
    for index, (one, other) in enumerate(zip(saved.operations, here.operations, strict=True)):
        for name in names:
            if getattr(one, name) != getattr(other, name):
                return (
                    f"{name} of operation {index} ({one.name}) is {getattr(one, name)!r} in it, "
                    f"{getattr(other, name)!r} in the model"
                )
    for index, (a, b) in enumerate(zip(saved.storages, here.storages, strict=True)):
        if (a.bytes, a.pinned) != (b.bytes, b.pinned):
            return f"storage {index} has {a.bytes} bytes in it, {b.bytes} in the model"
    return ""


_CLOSER = 4
"""Searches between too little room beside a program, and enough."""

_BETWEEN = 8
"""Parts of the distance between too little room and too much, each of which is tried."""

_ROOMIER = 4
"""Searches for values that have places within the limit of a tier."""

_CLOSE_BYTES = 1 << 20
"""Difference of too little and enough room within which nothing is searched."""


def make_graph_plan(
    step: CapturedStep,
    limit_bytes: int,
    loss_bytes: int,
    *,
    reserve_bytes: int = 0,
    options: dict[str, Any] | None = None,
    progress: Any = None,
    solve: Callable[..., Program] | None = None,
    sets_aside: bool = False,
) -> GraphPlan:
    """Return the fastest program found under a limit.

    `solve` is called as `search`, which plans by default. `sets_aside` has it leave all that its
    program needs beside the graph's storages, even if the limit has room: it plans for less. Raise
    InfeasibleError with the least limit for which a plan was found if there is none under this one.
    """
    graph = step.graph(loss_bytes)
    find = solve or search
    if step.offload is not None:
        find = partial(_search_with_tier, step, find)

    def found(own: int) -> Found:
        budget = max(limit_bytes - own - reserve_bytes, 1)
        program = find(graph, budget, options or {}, progress)
        needed = step.bytes_beside(program, limit_bytes)
        within = program.peak_bytes + needed + reserve_bytes <= limit_bytes
        return Found(program, needed, needed <= own if sets_aside else within)

    own = failed = step.executor_bytes(0, 0, limit_bytes)
    while True:
        try:
            best = found(own)
        except InfeasibleError as error:
            between = _between(found, failed, own) if step.counts == "reserved" else None
            if between is not None:
                best, own = between, failed
                break
            # The random states fit then too, whatever the program of that peak recomputes.
            least = error.minimum_bytes + reserve_bytes
            least += max(step.most_executor_bytes(max(limit_bytes, least)), own)
            bound = lower_bound_of(step, graph, limit_bytes) + reserve_bytes
            raise InfeasibleError(
                f"no plan was found that fits in {exact_bytes(limit_bytes)}; the least limit for "
                f"which one was found is {exact_bytes(least)}, and provably none fits in less "
                f"than {exact_bytes(bound)}: give at least the former, or a smaller batch",
                least,
                bound,
                error.peak and error.peak.in_all(least),
            ) from None
        if best.fits:
            break
        failed, own = own, max(own, best.needed)
    if step.counts == "reserved" and own > failed:
        best = _closer(found, best, failed, own)
    program, needed = best.program, best.needed
    return GraphPlan(
        step,
        graph,
        program,
        limit_bytes,
        needed,
        loss_bytes,
        reserve_bytes=reserve_bytes,
    )


def _search_with_tier(
    step: CapturedStep,
    find: Callable[..., Program],
    graph: Graph,
    budget: int,
    options: dict[str, Any],
    progress: Any,
) -> Program:
    """Return the program of a search whose values have places within the limit of the tier.

    The link to the tier is among the options of the search. The places together take a little more
    than the values: if they exceed the limit, the next search has less room on the tier.
    """
    offload, link = step.offload, step.link
    assert offload is not None
    assert link is not None
    room = offload.limit_bytes
    for _ in range(_ROOMIER):
        program = find(graph, budget, {**options, "link": link}, progress)
        missing = step.tier_excess(program)
        if room is None or missing <= 0:
            return program
        most = link.host_bytes if link.host_bytes is not None else room
        link = replace(link, host_bytes=max(most - missing, 0))
    return find(graph, budget, options, progress)


class Found(NamedTuple):
    """Program of a search, its bytes beside the graph's storages, and whether both fit."""

    program: Program
    needed: int
    fits: bool


def _between(found: Callable[[int], Found], failed: int, own: int) -> Found | None:
    """Return a program with room between too little and too much beside it; None if none fits."""
    for number in range(1, _BETWEEN):
        try:
            other = found(failed + (own - failed) * number // _BETWEEN)
        except InfeasibleError:
            return None
        if other.fits:
            return other
    return None


def _closer(found: Callable[[int], Found], best: Found, failed: int, own: int) -> Found:
    """Return the fastest program between room that was too little and room that was enough.

    Holes between blocks do not grow steadily: a program with less room beside it may fit too.
    """
    for _ in range(_CLOSER):
        if own - failed < _CLOSE_BYTES:
            break
        middle = (failed + own) // 2
        other = found(middle)
        if other.fits:
            own = middle
            best = min(best, other, key=lambda one: one.program.time_ns)
        else:
            failed = middle
    return best
