"""The memory of a chain again, in plain Python, and the best of all sequences by search.

A state says what is live; its bytes are added up from scratch each time, so that nothing is shared
with the incremental accounting of the C simulator but the definition (docs/memory-model.md).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from rotor.chain import Chain

Op = tuple[str, int]
Task = tuple[int, ...]
"""What remains to be done: a state of a grammar, or ``(-1, i)`` for the operation B(i)."""

Production = tuple[list[Op], list[Task]]
"""What is done first, and the tasks that then remain, in order."""


class Costs(NamedTuple):
    """A chain as plain lists; times in ns, sizes in bytes."""

    forward: list[int]
    backward: list[int]
    x: list[int]
    xbar: list[int]
    fe_tmp: list[int]
    fn_tmp: list[int]
    b_tmp: list[int]
    grad: list[int]
    pgrad: list[int]
    loss_tmp: int
    hold_output: bool

    @property
    def n(self) -> int:
        return len(self.forward)

    @classmethod
    def of(cls, chain: Chain) -> Costs:
        return cls(
            [round(seconds * 1e9) for seconds in chain.forward_time],
            [round(seconds * 1e9) for seconds in chain.backward_time],
            chain.x_bytes,
            chain.xbar_bytes,
            chain.forward_tmp_bytes,
            chain.forward_nograd_tmp_bytes,
            chain.backward_tmp_bytes,
            chain.grad_bytes,
            chain.pgrad_bytes,
            chain.loss_tmp_bytes,
            chain.hold_output,
        )


class State(NamedTuple):
    """Plain activations, tapes (sets of indices), the gradient there, the output's place."""

    x: frozenset[int]
    xbar: frozenset[int]
    gradient: int
    output: str


def start(c: Costs) -> State:
    return State(frozenset([0]), frozenset(), c.n + 1, "none")


def live_bytes(c: Costs, s: State) -> int:
    total = sum(c.x[i] for i in s.x) + sum(c.xbar[i] for i in s.xbar)
    if s.gradient <= c.n:
        total += c.grad[s.gradient]
    total += sum(c.pgrad[i] for i in range(s.gradient, c.n))
    if c.hold_output and s.output == "alone":
        total += c.x[c.n]
    return total


def _without(c: Costs, s: State, i: int) -> State:
    if i == 0 or i not in s.x:
        return s
    output = "alone" if i == c.n and s.output == "plain" else s.output
    return s._replace(x=s.x - {i}, output=output)


def step(c: Costs, s: State, op: Op) -> tuple[State, int, int] | None:
    """The state after an operation, its time and its peak; None where it cannot be done."""
    kind, i = op
    level = live_bytes(c, s)
    if kind == "L":
        if s.gradient <= c.n or not (c.n in s.x or c.n - 1 in s.xbar):
            return None
        after = _without(c, s._replace(gradient=c.n), c.n)
        return after, 0, level + c.grad[c.n] + c.loss_tmp
    if not (i in s.x or i - 1 in s.xbar):
        return None
    if kind == "B":
        if s.gradient != i + 1 or i not in s.xbar:
            return None
        output = "alone" if i + 1 == c.n and s.output == "inside" else s.output
        after = State(s.x, s.xbar - {i}, i, output)
        after = _without(c, _without(c, after, i + 1), i)
        return after, c.backward[i], level + c.grad[i] + c.b_tmp[i]
    first = i + 1 == c.n and s.output == "none"
    if kind == "Fe":
        if i in s.xbar:
            return None
        after = s._replace(xbar=s.xbar | {i}, output="inside" if first else s.output)
        return after, c.forward[i], level + c.xbar[i] + c.fe_tmp[i]
    after = _without(c, s, i) if kind == "Fn" and i not in s.xbar else s
    after = after._replace(x=after.x | {i + 1}, output="plain" if first else s.output)
    return after, c.forward[i], level + c.x[i + 1] + c.fn_tmp[i]


def run(c: Costs, ops: list[Op]) -> tuple[int, int]:
    """Time and peak of a whole sequence."""
    s, time, peak = start(c), 0, c.x[0]
    for op in ops:
        done = step(c, s, op)
        assert done is not None, f"{op} cannot be done"
        s, time, peak = done[0], time + done[1], max(peak, done[2])
    assert s.gradient == 0
    return time, peak


def _choices(c: Costs, s: State) -> list[Op]:
    ops = [(kind, i) for i in range(min(s.gradient, c.n)) for kind in ("Fn", "Fck", "Fe")]
    return [*ops, ("L", c.n), *[("B", i) for i in range(c.n)]]


def best_of_all(c: Costs, budget: int) -> tuple[int, list[Op]] | None:
    """The least time of any valid sequence whose peak is within budget: Dijkstra on states."""
    first = start(c)
    done: set[State] = set()
    queue: list[tuple[int, int, State, list[Op]]] = [(0, 0, first, [])]
    count = 0
    while queue:
        time, _, s, ops = heapq.heappop(queue)
        if s in done:
            continue
        done.add(s)
        if s.gradient == 0:
            return time, ops
        for op in _choices(c, s):
            after = step(c, s, op)
            if after is not None and after[2] <= budget and after[0] not in done:
                count += 1
                heapq.heappush(queue, (time + after[1], count, after[0], [*ops, op]))
    return None


def best_of_grammar(
    c: Costs, budget: int, whole: Task, productions: Callable[..., list[Production]]
) -> tuple[int, list[Op]] | None:
    """The least time of a sequence of a grammar whose peak is within budget, x[0] counted.

    Dijkstra over what remains to be done; what is live follows from it. Each operation is priced
    by `step`, so that nothing of a recurrence's memory conditions is used.
    """
    queue: list[tuple[int, int, tuple[Task, ...], State, list[Op]]] = [
        (0, 0, (whole,), start(c), [])
    ]
    done: set[tuple[Task, ...]] = set()
    count = 0
    while queue:
        time, _, tasks, state, ops = heapq.heappop(queue)
        if tasks in done:
            continue
        done.add(tasks)
        if not tasks:
            return time, ops
        task, rest = tasks[0], tasks[1:]
        made = [([("B", task[1])], [])] if task[0] == -1 else productions(c.n, *task)
        for first, then in made:
            now, after, fits = time, state, True
            for op in first:
                result = step(c, after, op)
                assert result is not None, f"{op} cannot be done"
                after, now = result[0], now + result[1]
                fits = fits and result[2] <= budget
            if fits:
                count += 1
                heapq.heappush(queue, (now, count, (*then, *rest), after, [*ops, *first]))
    return None
