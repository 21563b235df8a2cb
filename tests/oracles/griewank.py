"""Griewank's two algorithms in plain Python: recurrences, and a search over their class."""

from __future__ import annotations

from functools import cache

from oracles.machine import Costs, Op, Production, best_of_grammar

INFINITE = float("inf")


@cache
def revolve_forwards(stages: int, checkpoints: int) -> int:
    """Forwards without a tape that reverse `stages` equal stages, by trying every first step."""
    if stages == 1:
        return 0
    if checkpoints == 0:
        return stages * (stages - 1) // 2
    return min(
        j + revolve_forwards(stages - j, checkpoints - 1) + revolve_forwards(j, checkpoints)
        for j in range(1, stages)
    )


def recurrence(c: Costs, memory: int) -> float:
    """Least time, ns, of heterogeneous adjoint schedules in `memory` bytes beside x[0]."""
    n = c.n

    def held(last: int) -> int:
        if last == n:
            return 0
        return c.grad[last + 1] + sum(c.pgrad[last + 1 :]) + (c.x[n] if c.hold_output else 0)

    @cache
    def best(i: int, last: int, m: int) -> float:
        """`m` does not count x[i]."""
        loss = c.grad[n] + c.loss_tmp
        if i == n:
            return 0 if m >= loss else INFINITE
        found: float = INFINITE
        if i == last or (i, last) == (n - 1, n):
            output = c.x[n] if c.hold_output and last < n else 0
            tail = c.grad[i + 1] + c.xbar[i] + c.grad[i] + c.b_tmp[i] + sum(c.pgrad[i + 1 :])
            need = max(held(last) + c.xbar[i] + c.fe_tmp[i], tail + output)
            if last == n:
                need = max(need, c.xbar[i] + loss)
            if m >= need:
                found = c.forward[i] + c.backward[i]
        need = 0
        for j in range(i + 1, last + 1):
            k = j - 1
            need = max(need, held(last) + (0 if k == i else c.x[k]) + c.x[j] + c.fn_tmp[k])
            if m >= need:
                time = sum(c.forward[i:j]) + best(j, last, m - c.x[j]) + best(i, k, m)
                found = min(found, time)
        return found

    return best(0, n, memory)


def productions(n: int, i: int, last: int) -> list[Production]:
    """The class as a grammar: each Fe is followed by its B, but for the loss."""
    if i == n:
        return [([("L", n)], [])]
    made: list[Production] = []
    if i == last:
        made.append(([("Fe", i), ("B", i)], []))
    elif (i, last) == (n - 1, n):
        made.append(([("Fe", i), ("L", n), ("B", i)], []))
    for j in range(i + 1, last + 1):
        ops = [("Fck" if k == i else "Fn", k) for k in range(i, j)]
        made.append((ops, [(j, last), (i, j - 1)]))
    return made


def best_of_class(c: Costs, budget: int) -> tuple[int, list[Op]] | None:
    """The least time of a schedule of the class whose peak is within budget, by search."""
    return best_of_grammar(c, budget, (0, c.n), productions)
