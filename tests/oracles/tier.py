"""Programs with a second tier in plain Python: validity, live bytes, clocks, host bytes.

Actions are pairs: ("run", operation), ("finish", storage), ("fetch", storage).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from oracles import program as plain

from rotor.graph import Graph, Link

Action = tuple[str, int]


def actions_of(graph: Graph, numbers: Sequence[int]) -> list[Action]:
    n, m = len(graph), len(graph.storages)
    return [
        ("run", k) if k < n else ("finish", k - n) if k < n + m else ("fetch", k - n - m)
        for k in numbers
    ]


def numbers_of(graph: Graph, actions: Sequence[Action]) -> list[int]:
    n, m = len(graph), len(graph.storages)
    offsets = {"run": 0, "finish": n, "fetch": n + m}
    return [offsets[kind] + number for kind, number in actions]


def moves(graph: Graph, link: Link, storage: int) -> bool:
    item = graph.storages[storage]
    maker = graph.operations[graph.producers[storage]]
    return (
        item.movable
        and not item.pinned
        and item.bytes >= max(1, link.least_bytes)
        and maker.phase != "loss"
        and maker.clock != "read"
    )


def makes(graph: Graph, action: Action, storage: int) -> bool:
    kind, number = action
    return action == ("fetch", storage) or (
        kind == "run" and storage in graph.operations[number].outputs
    )


def uses(graph: Graph, action: Action, storage: int) -> bool:
    kind, number = action
    return action == ("finish", storage) or (
        kind == "run" and storage in graph.operations[number].inputs
    )


def fault(graph: Graph, link: Link, actions: Sequence[Action]) -> tuple[str, int] | None:
    """What is wrong first, and where; None for a valid program."""
    runs: list[int] = []
    for position, (kind, number) in enumerate(actions):
        before = actions[:position]
        if kind == "run":
            wrong = plain.fault(graph, [*runs, number])
            if wrong is not None and wrong[0] == "input":
                here = set(graph.operations[number].inputs)
                made = {s for s in here if any(makes(graph, a, s) for a in before)}
                wrong = wrong if here - made else None
            if wrong is not None and wrong[0] != "every":
                return wrong[0], position
            runs.append(number)
            waiting = [unused_fetch(graph, before, s) for s in graph.operations[number].outputs]
            if any(k is not None for k in waiting):
                return "unused", next(k for k in waiting if k is not None)
            continue
        if not moves(graph, link, number):
            return "fixed", position
        if kind == "finish":
            if not any(makes(graph, a, number) for a in before):
                return "not made", position
            if ("finish", number) in before:
                return "written", position
        else:
            if ("finish", number) not in before:
                return "not written", position
            waiting_at = unused_fetch(graph, before, number)
            if waiting_at is not None:
                return "unused", waiting_at
    if len(set(runs)) < len(graph):
        return "every", len(actions)
    left = [unused_fetch(graph, actions, s) for s in range(len(graph.storages))]
    if any(k is not None for k in left):
        return "unused", min(k for k in left if k is not None)
    levels = host_levels(graph, actions)
    if link.host_bytes is not None and max(levels, default=0) > link.host_bytes:
        return "host", next(k for k, level in enumerate(levels) if level > link.host_bytes)
    return None


def unused_fetch(graph: Graph, actions: Sequence[Action], storage: int) -> int | None:
    """Position of the fetch that is the last making, where nothing uses the storage after it."""
    for position in reversed(range(len(actions))):
        if uses(graph, actions[position], storage):
            return None
        if makes(graph, actions[position], storage):
            return position if actions[position][0] == "fetch" else None
    return None


def memory(graph: Graph, link: Link, actions: Sequence[Action]) -> tuple[list[int], list[int]]:
    """Bytes live before each action, and at most during it."""
    spans = []
    for storage, item in enumerate(graph.storages):
        made = [k for k, action in enumerate(actions) if makes(graph, action, storage)]
        used = [k for k, action in enumerate(actions) if uses(graph, action, storage)]
        for index, begin in enumerate(made):
            until = made[index + 1] if index + 1 < len(made) else len(actions)
            size = item.bytes + (link.padding_bytes if actions[begin][0] == "fetch" else 0)
            if item.pinned:
                end = len(actions) if index == 0 else begin
            else:
                end = max([begin, *(k for k in used if begin < k < until)])
            spans.append((begin, end, size))
    before = [
        sum(size for begin, end, size in spans if begin < k <= end) for k in range(len(actions))
    ]
    peaks = [
        before[k]
        + sum(size for begin, _, size in spans if begin == k)
        + (graph.operations[number].workspace_bytes if kind == "run" else 0)
        for k, (kind, number) in enumerate(actions)
    ]
    return before, peaks


def write_begins(graph: Graph, actions: Sequence[Action], finish: int) -> int:
    storage = actions[finish][1]
    return max(k for k in range(finish) if makes(graph, actions[k], storage))


def host_levels(graph: Graph, actions: Sequence[Action]) -> list[int]:
    """Bytes that the tier holds during each action."""
    levels = [0] * len(actions)
    for position, (kind, storage) in enumerate(actions):
        if kind != "finish":
            continue
        last = position
        for k, action in enumerate(actions):
            if action == ("fetch", storage):
                last = next(
                    j for j in range(k + 1, len(actions)) if uses(graph, actions[j], storage)
                )
        for k in range(write_begins(graph, actions, position), last + 1):
            levels[k] += graph.storages[storage].bytes
    return levels


def seconds(size: int, bytes_per_s: float, latency_ns: int) -> int:
    """Nanoseconds of a transfer, rounded up."""
    return latency_ns + math.ceil(Fraction(float(size) * 1e9 / bytes_per_s))


def clocks(graph: Graph, link: Link, actions: Sequence[Action]) -> tuple[int, int, int]:
    """Nanoseconds of the program, of its runs, of its transfers."""
    starts: dict[int, set[int]] = {}
    for position, (kind, storage) in enumerate(actions):
        if kind == "finish":
            starts.setdefault(write_begins(graph, actions, position), set()).add(storage)
    free = {"write": 0, "read": 0}
    ready: dict[int, int] = {}
    written: dict[int, int] = {}
    now = compute = busy = put = 0

    def transfer(direction: str, storage: int, not_before: int) -> int:
        rate = link.write_bytes_per_s if direction == "write" else link.read_bytes_per_s
        size = graph.storages[storage].bytes
        return wait_in_line(direction, seconds(size, rate, link.latency_ns), not_before)

    def wait_in_line(direction: str, length: int, not_before: int) -> int:
        nonlocal busy
        queue = [direction] if link.duplex else ["write", "read"]
        done = max([not_before, *(free[name] for name in queue)]) + length
        free.update(dict.fromkeys(queue, done))
        busy += length
        return done

    for position, (kind, number) in enumerate(actions):
        if kind == "finish":
            now = max(now, written[number])
        elif kind == "fetch":
            ready[number] = transfer("read", number, max(now, written[number]))
        else:
            op = graph.operations[number]
            if op.clock == "read":
                ready[op.outputs[0]] = wait_in_line("read", op.cost_ns, now)
                continue
            now = max([now, *(ready.get(s, 0) for s in op.inputs)])
            if op.clock == "write":
                now = max(now, put)
                put = wait_in_line("write", op.cost_ns, now) if op.cost_ns else now
                continue
            now += op.cost_ns
            compute += op.cost_ns
            for storage in op.outputs:
                ready.pop(storage, None)
                if storage in starts.get(position, ()):
                    written[storage] = transfer("write", storage, now)
    return now, compute, busy


State = tuple[
    frozenset[int],  # operations that ran
    frozenset[int],  # storages on the device
    frozenset[int],  # storages whose offload is finished
    tuple[tuple[int, int], ...],  # fetched ones on the device: until when they take, -1 once used
    tuple[tuple[int, int], ...],  # ones whose offload has begun, until when it lasts
    tuple[int, ...],  # until when the queues of writes and reads are busy
]


def best(graph: Graph, link: Link, budget: int) -> int | None:
    """Least nanoseconds of any valid program within a budget: Dijkstra over what is there.

    Dropping is free; clocks are relative to the one of computing. Every run may begin the offloads
    of what it makes; the finish of one drops the storage. The tier holds anything.
    """
    start: State = (frozenset(), frozenset(), frozenset(), (), (), (0, 0))
    costs = {start: 0}
    queue: list[tuple[int, int, State]] = [(0, 0, start)]
    count = 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        if len(state[0]) == len(graph):
            return cost
        for passed, after in (
            *_moves(graph, link, budget, state),
            *_runs(graph, link, budget, state),
        ):
            if cost + passed < costs.get(after, 1 << 62):
                costs[after] = cost + passed
                count += 1
                heapq.heappush(queue, (cost + passed, count, after))
    return None


def _held(graph: Graph, link: Link, state: State) -> int:
    fetched = len(state[3])
    return sum(graph.storages[s].bytes for s in state[1]) + fetched * link.padding_bytes


def _moves(graph: Graph, link: Link, budget: int, state: State) -> Iterator[tuple[int, State]]:
    """Drops, finishes and fetches."""
    ran, live, finished, ready, begun, free = state
    ends = dict(begun)
    for s in live:
        if s in ends:
            wait = ends[s]
            yield (
                wait,
                _later((ran, live - {s}, finished | {s}, ready, _without(begun, s), free), wait),
            )
        elif not graph.storages[s].pinned and dict(ready).get(s, -1) < 0:
            yield 0, (ran, live - {s}, finished, _without(ready, s), begun, free)
    for s in finished - live:
        size = graph.storages[s].bytes
        if _held(graph, link, state) + size + link.padding_bytes <= budget:
            done = free[1] + seconds(size, link.read_bytes_per_s, link.latency_ns)
            queues = (free[0] if link.duplex else done, done)
            yield (
                0,
                (ran, live | {s}, finished, tuple(sorted((*ready, (s, done)))), begun, queues),
            )


def _runs(graph: Graph, link: Link, budget: int, state: State) -> Iterator[tuple[int, State]]:
    ran, live, finished, ready, begun, free = state
    held = _held(graph, link, state)
    for number, op in enumerate(graph.operations):
        if not set(op.inputs) <= live or (number in ran and plain.runs_once(op)):
            continue
        if number not in ran and plain.fault_of_first(graph, number, ran):
            continue
        again = [s for s in op.outputs if s in live and not graph.storages[s].pinned]
        need = sum(graph.storages[s].bytes for s in op.outputs) + op.workspace_bytes
        if again or held + need > budget:
            continue
        waits = [end for s, end in ready if s in op.inputs]
        now = max([0, *waits]) + op.cost_ns
        may = [
            s
            for s in op.outputs
            if s not in finished and s not in dict(begun) and moves(graph, link, s)
        ]
        used = tuple((s, -1 if s in op.inputs else end) for s, end in ready)
        after = (ran | {number}, live | set(op.outputs), finished, used, begun, free)
        for mask in range(1 << len(may)):
            queues, writes = free, list(begun)
            for s in (s for k, s in enumerate(may) if mask >> k & 1):
                length = seconds(graph.storages[s].bytes, link.write_bytes_per_s, link.latency_ns)
                done = max(now, queues[0]) + length
                queues = (done, queues[1] if link.duplex else done)
                writes.append((s, done))
            yield now, _later((*after[:4], tuple(sorted(writes)), queues), now)


def _without(pairs: tuple[tuple[int, int], ...], storage: int) -> tuple[tuple[int, int], ...]:
    return tuple(pair for pair in pairs if pair[0] != storage)


def _later(state: State, passed: int) -> State:
    """The state when so much time has passed: what is over counts as 0."""
    ran, live, finished, ready, begun, free = state
    return (
        ran,
        live,
        finished,
        tuple((s, end if end < 0 else max(0, end - passed)) for s, end in ready),
        tuple((s, max(0, end - passed)) for s, end in begun),
        tuple(max(0, end - passed) for end in free),
    )
