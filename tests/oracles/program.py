"""Programs in plain Python: validity, live bytes, time; and the best program of a tiny graph."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rotor.graph import Graph, Operation

ORDER = ("forward", "loss", "backward")


def runs_once(op: Operation) -> bool:
    return op.once or op.phase == "loss"


def fault(graph: Graph, ops: Sequence[int]) -> tuple[str, int] | None:
    """What is wrong first, and where; None for a valid program."""
    made: dict[int, int] = {}
    seen: set[int] = set()
    makers = {s: op for op in graph.operations for s in op.outputs}
    for position, number in enumerate(ops):
        if not 0 <= number < len(graph):
            return "number", position
        op = graph.operations[number]
        if number in seen and runs_once(op):
            return "only", position
        if number not in seen:
            firsts = [graph.operations[other] for other in seen]
            if any(ORDER.index(other.phase) > ORDER.index(op.phase) for other in firsts):
                return "phase", position
            flagged = [
                k for k in seen if runs_once(graph.operations[k]) or graph.operations[k].random
            ]
            if (runs_once(op) or op.random) and any(other > number for other in flagged):
                return "order", position
        for storage in op.inputs:
            if storage not in made:
                return "input", position
            held = makers[storage].inputs if graph.storages[storage].lazy else ()
            if any(made[other] > made[storage] for other in held):
                return "tape", position
        seen.add(number)
        for storage in op.outputs:
            # What is pinned is read as it was made first.
            if storage not in made or graph.storages[storage].pinned is not True:
                made[storage] = position
    return None if len(seen) == len(graph) else ("every", len(ops))


def lifetimes(graph: Graph, ops: Sequence[int]) -> list[tuple[int, int, int]]:
    """(storage, first position, last position) of each time that a storage is there."""
    found = []
    for storage, item in enumerate(graph.storages):
        makes = [k for k, number in enumerate(ops) if storage in graph.operations[number].outputs]
        uses = [k for k, number in enumerate(ops) if storage in graph.operations[number].inputs]
        for index, begin in enumerate(makes):
            until = makes[index + 1] if index + 1 < len(makes) else len(ops)
            end = max([begin, *(use for use in uses if begin < use <= until)])
            if item.lazy and end == begin:
                continue
            if item.pinned and index == 0:
                end = len(ops)
            elif item.pinned is True:
                end = begin
            found.append((storage, begin, end))
    return found


def price(graph: Graph, ops: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """Nanoseconds; bytes live before each run, and at most during it."""
    spans = lifetimes(graph, ops)
    sizes = [storage.bytes for storage in graph.storages]
    before = [sum(sizes[s] for s, begin, end in spans if begin < k <= end) for k in range(len(ops))]
    made = {(s, begin) for s, begin, _ in spans}
    peaks = []
    for k, number in enumerate(ops):
        op = graph.operations[number]
        outputs = [s for s in op.outputs if (s, k) in made]
        is_light = len(outputs) < len(op.outputs) and op.light_bytes is not None
        workspace = op.light_bytes if is_light else op.workspace_bytes
        peaks.append(before[k] + sum(sizes[s] for s in outputs) + workspace)
    return sum(graph.operations[number].cost_ns for number in ops), before, peaks


def best(graph: Graph, budget: int) -> int | None:
    """Least nanoseconds of any valid program within a budget: Dijkstra over what is there.

    A state is what is in memory, and what has run; dropping is free and happens before a run.
    """
    sizes = [storage.bytes for storage in graph.storages]
    pinned = {s for s, storage in enumerate(graph.storages) if storage.pinned}
    start = (frozenset[int](), frozenset[int]())
    costs = {start: 0}
    queue = [(0, 0, start)]
    count = 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        live, ran = state
        if len(ran) == len(graph):
            return cost
        for number in range(len(graph)):
            after = _after(graph, number, live, ran, sizes, pinned, budget)
            for nxt in after:
                total = cost + graph.operations[number].cost_ns
                if total < costs.get(nxt, 1 << 62):
                    costs[nxt] = total
                    count += 1
                    heapq.heappush(queue, (total, count, nxt))
    return None


def _after(
    graph: Graph,
    number: int,
    live: frozenset[int],
    ran: frozenset[int],
    sizes: list[int],
    pinned: set[int],
    budget: int,
) -> list[tuple[frozenset[int], frozenset[int]]]:
    """States after a run, for every choice of what is dropped before it."""
    op = graph.operations[number]
    if not set(op.inputs) <= live:
        return []
    if number in ran and runs_once(op):
        return []
    if number not in ran and fault_of_first(graph, number, ran):
        return []
    need = sum(sizes[s] for s in op.outputs) + op.workspace_bytes
    locked = (live & (pinned | set(op.inputs))) - (set(op.outputs) - pinned)
    loose = sorted(live - locked - set(op.outputs))
    found = []
    for mask in range(1 << len(loose)):
        kept = locked | {s for k, s in enumerate(loose) if mask >> k & 1}
        if sum(sizes[s] for s in kept) + need <= budget:
            found.append((frozenset(kept | set(op.outputs)), ran | {number}))
    return found


def fault_of_first(graph: Graph, number: int, ran: frozenset[int]) -> bool:
    op = graph.operations[number]
    if any(ORDER.index(graph.operations[k].phase) > ORDER.index(op.phase) for k in ran):
        return True
    is_flagged = runs_once(op) or op.random
    return is_flagged and any(
        k > number and (runs_once(graph.operations[k]) or graph.operations[k].random) for k in ran
    )
