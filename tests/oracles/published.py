"""The recurrence of persistent schedules with its published memory conditions, in plain Python.

Beaumont et al., hal-02352969, section 4: links i .. end with m memory left; the link after the n
stages is the loss. It differs from the exact conditions in two ways. A chain step tests the
activation x[i+1] beside the tape, and not the gradient of x[end+1] that really waits there: a
schedule may go over the limit. And the memory of forwards is tested over all of i .. end whatever
the step: a schedule that would fit may be missed.
"""

from __future__ import annotations

import math
from functools import cache

from oracles.machine import Costs, Op


def solve(c: Costs, limit: int, slots: int | None = None) -> tuple[int, list[Op]] | None:
    """(ns, schedule) within `limit` bytes, or None.

    With `slots`, the unit of memory is ``limit // slots`` and every size is rounded up to it; it
    must be one byte at least. Only for chains of the published model: gradients as large as
    activations, no parameter gradients, one forward temporary, the output not held.
    """
    unit = 1 if slots is None else limit // slots

    def rounded(size: int) -> int:
        return -(-size // unit)

    last = c.n
    x = [rounded(size) for size in c.x] + [0]
    xbar = [0] + [rounded(size) for size in c.xbar]
    forward_tmp = [rounded(size) for size in c.fe_tmp]
    backward_tmp = [rounded(size) for size in c.b_tmp] + [rounded(c.loss_tmp)]

    def forwards_need(i: int, end: int) -> int:
        first = x[i + 1] + forward_tmp[i]
        later = [x[k] + x[k + 1] + forward_tmp[k] for k in range(i + 1, min(end, last))]
        return x[end + 1] + max([first, *later])

    def fits_alone(i: int, m: int) -> bool:
        forward = x[i + 1] + xbar[i + 1] + forward_tmp[i]
        backward = x[i] + x[i + 1] + xbar[i + 1] + backward_tmp[i]
        return m >= forward and m >= backward

    @cache
    def best(i: int, end: int, m: int) -> tuple[float, int]:
        """Ns, and the choice: i for Fe first, j for a split."""
        if i == last:
            return (0, i) if m >= x[last] + backward_tmp[last] else (math.inf, i)
        here = c.forward[i] + c.backward[i]
        if i == end:
            return (here, i) if fits_alone(i, m) else (math.inf, i)
        found: tuple[float, int] = (math.inf, i)
        if m < forwards_need(i, end):
            return found
        if fits_alone(i, m) and m >= xbar[i + 1]:
            found = (here + best(i + 1, end, m - xbar[i + 1])[0], i)
        for j in range(i + 1, end + 1):
            if m >= x[j]:
                time = sum(c.forward[i:j]) + best(j, end, m - x[j])[0] + best(i, j - 1, m)[0]
                if time < found[0]:
                    found = (time, j)
        return found

    def trace(i: int, end: int, m: int) -> list[Op]:
        if i == end:
            return [("L", last)] if i == last else [("Fe", i), ("B", i)]
        j = best(i, end, m)[1]
        if j == i:
            return [("Fe", i), *trace(i + 1, end, m - xbar[i + 1]), ("B", i)]
        forward: list[Op] = [("Fck", i), *[("Fn", k) for k in range(i + 1, j)]]
        return forward + trace(j, end, m - x[j]) + trace(i, j - 1, m)

    m = (limit // unit) - x[0]
    if m <= 0 or best(0, last, m)[0] == math.inf:
        return None
    return int(best(0, last, m)[0]), trace(0, last, m)
