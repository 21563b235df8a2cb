"""Plans of captured graphs from a limit, or from a saved program.

Ranks that have captured the same graph, each at sizes of its own, run one program. It is searched
on one cost model: bytes are the most of any rank, times their means. A program that fits there fits
on every rank, which prices it by its own sizes. Collectives are measured by all ranks together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from rotor.common.joining import joined
from rotor.common.ranks import RankError, Ranks, digest, each, run_and_wait
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.pricing import build_graph
from rotor.engines.graph.costs.profile import Arguments, Cost, isolated, keys_of
from rotor.engines.graph.costs.repeating import TESTED
from rotor.engines.graph.planned import GraphPlan, PlanningRecord, lower_bound_of
from rotor.engines.graph.tracing.groups import Group
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import InfeasibleError
from rotor.graph import planner
from rotor.graph.graph import Graph
from rotor.graph.program import Program
from rotor.meter import allocator
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
    ranks: Ranks | None = None,
) -> GraphPlan:
    """Return the fastest program found under a limit.

    `solve` is called as `rotor.graph.plan`, which plans by default. `sets_aside` has it leave all
    that its program needs beside the graph's storages, even if the limit has room: it plans for
    less. Raise InfeasibleError with the least limit for which a plan was found if there is none
    under this one.

    With `ranks`, this is a collective operation: the limit and the reserve are the same on all, the
    first one searches, and each returns its plan of that program. Raise RankError if they have
    captured different graphs, or another one has failed.
    """
    of_all = partial(each, ranks)
    graph = step.graph(loss_bytes)
    find = solve or planner.plan
    sizes = [0]
    if ranks is not None:
        check_same(ranks, step.lowered)
        everyone = ranks.together(lambda: Needs.of(graph))
        sizes = [sum(needs.sizes) for needs in everyone]
        joint = joint_graph(graph, everyone) if ranks.rank == 0 else graph
        find = partial(_found_by_first, ranks, joint)
    if step.offload is not None:
        find = partial(_search_with_tier, step, find, of_all)

    def found(own: int) -> Found:
        budget = max(limit_bytes - own - reserve_bytes, 1)
        program = find(graph, budget, progress=progress, **(options or {}))
        pairs = of_all(lambda: (step.bytes_beside(program, limit_bytes), program.peak_bytes))
        beside = [needed for needed, _ in pairs]
        within = all(peak + needed + reserve_bytes <= limit_bytes for needed, peak in pairs)
        return Found(program, beside, max(beside) <= own if sets_aside else within)

    own = failed = max(of_all(lambda: step.executor_bytes(0, 0, limit_bytes)))
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
            most = partial(step.most_executor_bytes, max(limit_bytes, least))
            least += max(own, *of_all(most))
            bound = max(of_all(lambda: lower_bound_of(step, graph, limit_bytes))) + reserve_bytes
            peak = error.peak and error.peak.in_all(least)
            raise InfeasibleError(
                _refusal(limit_bytes, least, bound, sizes), least, bound, peak
            ) from None
        if best.fits:
            break
        failed, own = own, max(own, *best.beside)
    if step.counts == "reserved" and own > failed:
        best = _closer(found, best, failed, own)
    beside = best.beside[0 if ranks is None else ranks.rank]
    plan = GraphPlan(
        step, graph, best.program, limit_bytes, beside, loss_bytes, reserve_bytes=reserve_bytes
    )
    if ranks is not None:
        ranks.together(int if plan.layout is None else plan.layout.prepare)
    return plan


def _refusal(limit_bytes: int, least_bytes: int, bound_bytes: int, sizes: list[int]) -> str:
    """Return the text on a limit in which no program fits; `sizes` are those of each rank."""
    of_all, which, cure = "", "least limit", "or a smaller batch"
    if len(sizes) > 1:
        of_all, which = f", the least limit of {len(sizes)} ranks", "least"
        cure = "to each rank, or smaller batches"
        if len(set(sizes)) > 1:
            cure += f", on rank {sizes.index(max(sizes))} most of all"
    comma = "," if len(sizes) == 1 else ""
    return (
        f"no plan was found that fits in {exact_bytes(limit_bytes)}{of_all}; the {which} for which "
        f"one was found is {exact_bytes(least_bytes)}, and provably none fits in less than "
        f"{exact_bytes(bound_bytes)}: give at least the former{comma} {cure}"
    )


def _found_by_first(
    ranks: Ranks, joint: Graph, graph: Graph, budget: int, **options: Any
) -> Program:
    """Return the program of a graph that the first rank finds for the cost model of all ranks."""
    actions = ranks.decide(lambda: planner.plan(joint, budget, **options).actions)
    return Program(graph, actions, options.get("link"))


def _search_with_tier(
    step: CapturedStep,
    find: Callable[..., Program],
    of_all: Callable[[Callable[[], int]], list[int]],
    graph: Graph,
    budget: int,
    **options: Any,
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
        program = find(graph, budget, **options | {"link": link})
        missing = max(of_all(partial(step.tier_excess, program)))
        if room is None or missing <= 0:
            return program
        most = link.host_bytes if link.host_bytes is not None else room
        link = replace(link, host_bytes=max(most - missing, 0))
    return find(graph, budget, **options)


class Found(NamedTuple):
    """Program of a search, its bytes beside the graph's storages, and whether both fit."""

    program: Program
    beside: list[int]
    """By rank."""
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


def _described(target: Any) -> Any:
    # Groups of alike operators have other constants on each rank.
    return target.operators if isinstance(target, Group) else str(target)


def signatures_of(lowered: Lowered) -> list[Any]:
    """Return descriptions, with faithful ``repr``, of a graph's operations under any sizes."""
    return [
        (
            "" if task.node is None else _described(task.node.target),
            task.phase,
            task.inputs,
            sorted(task.made.items()),
            task.random,
        )
        for task in lowered.tasks
    ]


@dataclass(frozen=True)
class Needs:
    """Costs of one rank's operations."""

    is_movable: tuple[bool, ...]
    """By storage."""
    sizes: tuple[int, ...]
    """Bytes by storage."""
    is_once: tuple[bool, ...]
    """By operation."""
    costs_ns: tuple[int, ...]
    workspaces: tuple[int, ...]
    """Bytes by operation."""

    @classmethod
    def of(cls, graph: Graph) -> Needs:
        """Return the needs of a cost model."""
        return cls(
            tuple([storage.movable for storage in graph.storages]),
            tuple([storage.bytes for storage in graph.storages]),
            tuple([op.once for op in graph.operations]),
            tuple([op.cost_ns for op in graph.operations]),
            tuple([op.workspace_bytes for op in graph.operations]),
        )


ON_ITS_OWN = 'use engine="dynamic", whose ranks need not agree'


class OtherGraphs(RankError):
    """Difference between the graphs of ranks that would run one program."""


def check_same(ranks: Ranks, lowered: Lowered) -> None:
    """Raise OtherGraphs, on every rank, if one has captured another graph than the first one."""
    mine = [digest(signature) for signature in signatures_of(lowered)]
    pinned = digest([bool(is_pinned) for _, is_pinned in lowered.storages])
    everyone = ranks.exchange((mine, pinned))
    first, _ = everyone[0]
    for rank, (other, _) in enumerate(everyone):
        if everyone[rank] == everyone[0]:
            continue
        pairs = enumerate(zip(first, other, strict=False))
        number = next((k for k, (one, another) in pairs if one != another), None)
        place = "" if number is None else f", the first difference at number {number}"
        if number is not None and number < len(mine):
            place += f" ({lowered.tasks[number].name} on this rank)"
        raise OtherGraphs(
            f"rank 0 has captured {len(first)} operations, rank {rank} {len(other)}{place}: ranks "
            "that run one program need the same model, frozen parameters and kind of input, and "
            "the same Python values that its code depends on, such as the rank itself: keep these "
            f"in tensors, or {ON_ITS_OWN}"
        )


def joint_graph(graph: Graph, everyone: Sequence[Needs]) -> Graph:
    """Return the cost model of all ranks, from that of one: the most bytes of any, mean times."""
    needs = joined(everyone, mean=["costs_ns"], least=["is_movable"])
    storages = [
        replace(storage, bytes=size, movable=moves)
        for storage, size, moves in zip(graph.storages, needs.sizes, needs.is_movable, strict=True)
    ]
    by_operation = needs.costs_ns, needs.workspaces, needs.is_once
    operations = [
        replace(op, cost_ns=cost, workspace_bytes=workspace, once=is_once)
        for op, cost, workspace, is_once in zip(graph.operations, *by_operation, strict=True)
    ]
    return Graph(storages, None, operations)


_RUNS = 4
"""Runs of each collective that are timed."""


def priced_together(
    ranks: Ranks, lowered: Lowered, costs: Sequence[Cost], device: torch.device
) -> list[Cost]:
    """Return the costs with those of collectives; every rank has captured the same operations.

    All ranks run each distinct collective a fixed number of times, in the order of the capture.
    The slowest median and the largest workspace of any rank hold for all.
    """
    keys = keys_of(lowered, device)
    first: dict[str, int] = {}
    for number in lowered.collectives:
        first.setdefault(keys[number], number)
    # Layouts may be alike on one rank and not on another.
    numbers = sorted({n for other in ranks.exchange(list(first.values())) for n in other})
    if not numbers:
        return list(costs)
    mine = _measured(lowered, numbers, device)
    everyone = zip(*ranks.exchange(mine), strict=True)
    found = {
        keys[n]: [max(c) for c in zip(*col, strict=True)]
        for n, col in zip(numbers, everyone, strict=True)
    }
    priced = list(costs)
    for number in lowered.collectives:
        ns, needed = found[keys[number]]
        workspace = max(needed - sum(costs[number].made_bytes), 0)
        priced[number] = replace(costs[number], ns=ns, workspace_bytes=workspace, flags=TESTED)
    return priced


def _measured(
    lowered: Lowered, numbers: Sequence[int], device: torch.device
) -> list[tuple[int, int]]:
    """Return the median nanoseconds, and the most bytes needed, of these collectives."""
    arguments = Arguments(lowered, ())
    arguments.are_shared = True
    times: dict[int, list[int]] = {number: [] for number in numbers}
    with isolated(device), allocator.meter(device) as meter:
        for number in numbers:
            function, args, kwargs = arguments.of(lowered.tasks[number])
            for _ in range(_RUNS):
                meter.mark(str(number))
                begun = time.perf_counter_ns()
                made = run_and_wait(function, *args, **kwargs)
                times[number].append(time.perf_counter_ns() - begun)
                meter.mark("between")
                del made
    needs = dict.fromkeys(map(str, numbers), 0)
    for segment in meter.segments:
        if segment.name in needs:
            needed = segment.peak_bytes - segment.start_bytes
            needs[segment.name] = max(needs[segment.name], needed)
    return [(sorted(times[n])[_RUNS // 2], needs[str(n)]) for n in numbers]
