"""Floating in plain Python: its recurrence with explicit choices, and a search over its class."""

from __future__ import annotations

from functools import cache

from oracles.machine import Costs, Op, Production, best_of_grammar

INFINITE = float("inf")


def recurrence(c: Costs, memory: int) -> float:
    """Least time, ns, with `memory` bytes beside x[0], from the recurrence in bytes.

    State (b, s, l): x[b] is there, stages s..l (l = n: and the loss) are to be done. The choices
    name both where the next checkpoint stands (k) and down to which stage it serves (t + 1); the C
    solver reaches the same schedules in steps of one stage.
    """
    n = c.n

    def held(last: int) -> int:
        if last == n:
            return 0
        output = c.x[n] if c.hold_output else 0
        return c.grad[last + 1] + sum(c.pgrad[last + 1 :]) + output

    def walk(b: int, k: int, last: int, keep: int) -> int:
        """Bytes that forwards b..k-1 need, `keep` of them for an x[b] that stays."""
        need = 0
        for i in range(b, k):
            source = 0 if i == b and keep else c.x[i]
            need = max(need, held(last) + keep + source + c.x[i + 1] + c.fn_tmp[i])
        return need

    @cache
    def best(b: int, s: int, last: int, m: int) -> float:
        """`m` counts x[b], whoever owns it."""
        if b == n:
            return 0 if m >= c.x[n] + c.grad[n] + c.loss_tmp else INFINITE
        found: float = INFINITE
        if b == s:
            room = m - c.x[b]
            inside = b == n - 1 and last == n
            output = c.x[n] if c.hold_output and not inside else 0
            tail = c.grad[b + 1] + c.xbar[b] + c.grad[b] + c.b_tmp[b] + sum(c.pgrad[b + 1 :])
            if room >= max(held(last) + c.xbar[b] + c.fe_tmp[b], tail + output):
                rest = (
                    0 if b == last else best(b + 1, b + 1, last, room - c.xbar[b] + c.x[b + 1])
                )
                found = c.forward[b] + c.backward[b] + rest
        for k in range(b + 1, s + 1):
            if m >= walk(b, k, last, 0):
                found = min(found, sum(c.forward[b:k]) + best(k, s, last, m))
        for t in range(s, last):
            for k in range(b + 1, t + 2):
                if m >= walk(b, k, last, c.x[b]):
                    left = best(b, s, t, m)
                    right = best(k, t + 1, last, m - c.x[b])
                    found = min(found, sum(c.forward[b:k]) + right + left)
        return found

    return best(0, 0, n, memory + c.x[0])


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
