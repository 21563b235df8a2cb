"""Floating in plain Python: its recurrence with explicit choices, and a search over its class."""

from __future__ import annotations

from functools import cache

from oracles.machine import Costs, Op, Production, best_of_grammar

INFINITE = float("inf")


def recurrence(
    c: Costs, memory: int, *, slots: int | None = None, persistent: bool = False
) -> float:
    """Least time, ns, with `memory` bytes beside x[0], from the recurrence.

    With `slots`, `memory` is divided into so many, and every need and every size held is rounded
    up to whole ones. `persistent` leaves only checkpoints that wait until their own backward.

    State (b, s, l): x[b] is there, stages s..l (l = n: and the loss) are to be done. The choices
    name both where the next checkpoint stands (k) and down to which stage it serves (t + 1); the C
    solver reaches the same schedules in steps of one stage.
    """
    n = c.n

    def up(size: int) -> int:
        return size if slots is None else -(-size * slots // memory)

    def held(last: int) -> int:
        if last == n:
            return 0
        output = c.x[n] if c.hold_output else 0
        return c.grad[last + 1] + sum(c.pgrad[last + 1 :]) + output

    def walk(b: int, k: int, last: int, keep: int) -> int:
        """Bytes that forwards b..k-1 need, `keep` of them for x[b], which stays."""
        inputs = [keep] + [keep + c.x[i] for i in range(b + 1, k)]
        return held(last) + max(
            size + c.x[i + 1] + c.fn_tmp[i] for i, size in zip(range(b, k), inputs, strict=True)
        )

    @cache
    def best(b: int, s: int, last: int, m: int) -> float:
        """`m` counts x[b] where b < s."""
        if b == n:
            return 0 if m >= up(c.grad[n] + c.loss_tmp) else INFINITE
        found: float = INFINITE
        if b == s:
            output = c.x[n] if c.hold_output and (b, last) != (n - 1, n) else 0
            tail = c.grad[b + 1] + c.xbar[b] + c.grad[b] + c.b_tmp[b] + sum(c.pgrad[b + 1 :])
            if m >= up(max(held(last) + c.xbar[b] + c.fe_tmp[b], tail + output)):
                rest = 0 if b == last else best(b + 1, b + 1, last, m - up(c.xbar[b]))
                found = c.forward[b] + c.backward[b] + rest
        for k in range(b + 1, s + 1):
            if m >= max(up(walk(b, b + 1, last, c.x[b])), up(walk(b, k, last, 0))):
                rest = best(k, s, last, m - (up(c.x[k]) if k == s else 0))
                found = min(found, sum(c.forward[b:k]) + rest)
        keep = c.x[b] if b < s else 0
        for t in range(s, last):
            for k in range(t + 1 if persistent else b + 1, t + 2):
                if m >= up(walk(b, k, last, keep)):
                    own = up(keep) + (up(c.x[k]) if k == t + 1 else 0)
                    right = best(k, t + 1, last, m - own)
                    found = min(found, sum(c.forward[b:k]) + right + best(b, s, t, m))
        return found

    return best(0, 0, n, memory if slots is None else slots)


def productions(n: int, b: int, s: int, last: int) -> list[Production]:
    """The class as a grammar: what may be done first in state (b, s, l), and what then remains."""
    if b == n:
        return [([("L", n)], [])]
    made: list[Production] = []
    if b == s == last:
        made.append(([("Fe", b), ("B", b)], []))
    elif b == s:
        made.append(([("Fe", b)], [(b + 1, b + 1, last), (-1, b)]))
    for k in range(b + 1, s + 1):
        made.append(([("Fn", i) for i in range(b, k)], [(k, s, last)]))
    for t in range(s, last):
        for k in range(b + 1, t + 2):
            ops = [("Fck" if i == b else "Fn", i) for i in range(b, k)]
            made.append((ops, [(k, t + 1, last), (b, s, t)]))
    return made


def best_of_class(c: Costs, budget: int) -> tuple[int, list[Op]] | None:
    """The least time of a floating schedule whose peak is within budget, by search."""
    return best_of_grammar(c, budget, (0, 0, c.n), productions)
