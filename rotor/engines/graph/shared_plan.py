"""One program for all ranks that have captured the same graph, each at sizes of its own.

The program is searched on one cost model: bytes are the most of any rank, times their means. A
program that fits there fits on every rank, which prices it by its own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rotor.common.joining import joined
from rotor.common.ranks import RankError, Ranks, digest
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.pricing import search
from rotor.engines.graph.planned import GraphPlan, lower_bound_of
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import InfeasibleError
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program
from rotor.units import exact_bytes

_ROOMIER = 4
"""Searches for values that have places within the limit of a tier."""


def signatures_of(lowered: Lowered) -> list[Any]:
    """Return descriptions, with faithful ``repr``, of a graph's operations under any sizes."""
    return [
        (
            "" if task.node is None else str(task.node.target),
            task.phase,
            task.inputs,
            sorted(task.made.items()),
            task.random,
        )
        for task in lowered.tasks
    ]


@dataclass(frozen=True)
class Needs:
    """Costs of one rank's operations, and its bytes beside them."""

    is_movable: tuple[bool, ...]
    """By storage."""
    sizes: tuple[int, ...]
    """Bytes by storage."""
    is_once: tuple[bool, ...]
    """By operation."""
    costs_ns: tuple[int, ...]
    workspaces: tuple[int, ...]
    """Bytes by operation."""
    own_bytes: int
    """Bytes beside the storages, without any recomputation."""

    @classmethod
    def of(cls, step: CapturedStep, graph: Graph, limit_bytes: int) -> Needs:
        """Return the needs of a step with a cost model."""
        return cls(
            tuple([storage.movable for storage in graph.storages]),
            tuple([storage.bytes for storage in graph.storages]),
            tuple([op.once for op in graph.operations]),
            tuple([op.cost_ns for op in graph.operations]),
            tuple([op.workspace_bytes for op in graph.operations]),
            step.executor_bytes(0, 0, limit_bytes),
        )


def check_same(ranks: Ranks, lowered: Lowered) -> None:
    """Raise RankError, on every rank, if one has captured another graph than the first one."""
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
        raise RankError(
            f"rank 0 has captured {len(first)} operations, rank {rank} {len(other)}{place}: ranks "
            "that share plans need the same model, frozen parameters and kind of input, and the "
            "same Python values that its code depends on"
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


def make_shared_plan(
    ranks: Ranks,
    step: CapturedStep,
    limit_bytes: int,
    loss_bytes: int,
    *,
    reserve_bytes: int = 0,
    options: dict[str, Any] | None = None,
    progress: Any = None,
) -> GraphPlan:
    """Return this rank's plan of the program that the first rank has found for all; collective.

    `limit_bytes` and `reserve_bytes` are the same on all ranks; `options` and `progress` are used
    on the first. Raise InfeasibleError, on all ranks, if no program was found that fits on all of
    them, and RankError if the ranks have captured different graphs, or another rank has failed.
    """
    graph = step.graph(loss_bytes)
    check_same(ranks, step.lowered)
    everyone = ranks.together(lambda: Needs.of(step, graph, limit_bytes))
    joint = joint_graph(graph, everyone) if ranks.rank == 0 else graph
    own = max(needs.own_bytes for needs in everyone)

    def found(budget: int, link: Link | None) -> Program:
        given = dict(options or {}) if link is None else {**(options or {}), "link": link}
        actions = ranks.decide(lambda: search(joint, budget, given, progress).actions)
        return Program(graph, actions, link)

    while True:
        try:
            program = _with_places(ranks, step, found, max(limit_bytes - own - reserve_bytes, 1))
        except InfeasibleError as error:
            raise _infeasible(
                ranks, step, graph, limit_bytes, own, reserve_bytes, error, everyone
            ) from None
        beside = ranks.together(lambda p=program: step.bytes_beside(p, limit_bytes))  # type: ignore[misc]
        mine = beside[ranks.rank]
        needed = ranks.exchange_ints(program.peak_bytes + mine + reserve_bytes)
        if max(total for (total,) in needed) <= limit_bytes:
            break
        own = max(own, *beside)
    plan = GraphPlan(
        step, graph, program, limit_bytes, mine, loss_bytes, reserve_bytes=reserve_bytes
    )

    def reserve() -> None:
        if plan.layout is not None:
            plan.layout.prepare()

    ranks.together(reserve)
    return plan


def _with_places(
    ranks: Ranks,
    step: CapturedStep,
    found: Callable[[int, Link | None], Program],
    budget: int,
) -> Program:
    """Return a program whose values have places within the limit of every rank's tier."""
    offload, link = step.offload, step.link
    if offload is None or link is None:
        return found(budget, None)
    room = offload.limit_bytes
    for _ in range(_ROOMIER):
        program = found(budget, link)
        missing = max(ranks.together(lambda p=program: step.tier_excess(p)))  # type: ignore[misc]
        if room is None or missing <= 0:
            return program
        most = link.host_bytes if link.host_bytes is not None else room
        link = replace(link, host_bytes=max(most - missing, 0))
    return found(budget, None)


def _infeasible(
    ranks: Ranks,
    step: CapturedStep,
    graph: Graph,
    limit_bytes: int,
    own_bytes: int,
    reserve_bytes: int,
    error: InfeasibleError,
    everyone: Sequence[Needs],
) -> InfeasibleError:
    """Return the error for a limit in which no program fits; a collective operation."""
    found = ranks.together(
        lambda: (step.most_executor_bytes(limit_bytes), lower_bound_of(step, graph, limit_bytes))
    )
    most = max(own_bytes, *(bytes_ for bytes_, _ in found))
    least = error.minimum_bytes + most + reserve_bytes
    bound = max(bound for _, bound in found) + reserve_bytes
    totals = [sum(needs.sizes) for needs in everyone]
    large = totals.index(max(totals))
    which = f", on rank {large} most of all" if len(set(totals)) > 1 else ""
    return InfeasibleError(
        f"no plan was found that fits in {exact_bytes(limit_bytes)}, the least limit of "
        f"{ranks.size} ranks; the least for which one was found is {exact_bytes(least)}, and "
        f"provably none fits in less than {exact_bytes(bound)}: give at least the former to each "
        f"rank, or smaller batches{which}",
        least,
        bound,
        error.peak and error.peak.in_all(least),
    )
