"""The recurrence of persistent schedules with exact conditions, in plain Python.

Beaumont et al., hal-02352969, section 4, with what each operation needs written out from the cost
model (docs/memory-model.md); memory in bytes, no table but a memo.
"""

from __future__ import annotations

import math
from functools import cache

from oracles.machine import Costs


def best_time(c: Costs, budget: int) -> float:
    """Ns of the fastest persistent schedule within budget bytes, x[0] included; inf if none."""
    n = c.n

    def waits(end: int) -> int:
        """What state (., end) holds throughout: a gradient, parameter gradients, the output."""
        if end == n:
            return 0
        return c.grad[end + 1] + sum(c.pgrad[end + 1 :]) + (c.x[n] if c.hold_output else 0)

    def fe_needs(i: int, end: int) -> int:
        return waits(end) + c.xbar[i] + c.fe_tmp[i]

    def b_needs(i: int, end: int) -> int:
        level = c.grad[i + 1] + c.xbar[i] + sum(c.pgrad[i + 1 :])
        if c.hold_output and not (i == n - 1 and end == n):
            level += c.x[n]
        return level + c.grad[i] + c.b_tmp[i]

    def forward_needs(i: int, end: int, j: int) -> int:
        first = c.x[i + 1] + c.fn_tmp[i]
        later = [c.x[k] + c.x[k + 1] + c.fn_tmp[k] for k in range(i + 1, j)]
        return waits(end) + max([first, *later])

    @cache
    def time(i: int, end: int, m: int) -> float:
        if i == n:
            return 0 if m >= c.grad[n] + c.loss_tmp else math.inf
        here = c.forward[i] + c.backward[i]
        keeps = m >= fe_needs(i, end) and m >= b_needs(i, end)
        if i == end:
            return here if keeps else math.inf
        best = math.inf
        if keeps:
            best = here + time(i + 1, end, m - c.xbar[i])
        for j in range(i + 1, end + 1):
            if m >= forward_needs(i, end, j):
                forwards = sum(c.forward[i:j])
                best = min(best, forwards + time(j, end, m - c.x[j]) + time(i, j - 1, m))
        return best

    return time(0, n, budget - c.x[0])
