"""Every persistent schedule of a tiny chain, each priced by the plain-Python simulator.

A schedule of stages i .. end (end = n: with the loss) is one of

- ``Fe_i``, a schedule of i+1 .. end, ``B_i``;
- ``Fck_i Fn_{i+1} .. Fn_{j-1}``, a schedule of j .. end, a schedule of i .. j-1, for i < j <= end;
- ``L``, for i = end = n; ``Fe_i B_i``, for i = end < n.

There are 1, 2, 6, 22, 90, 394, 1806 of them (the large Schroeder numbers) for 0 .. 6 stages.
"""

from __future__ import annotations

from functools import cache

from oracles.machine import Costs, Op, run


@cache
def schedules(n: int, i: int, end: int) -> list[list[Op]]:
    """All persistent schedules of stages i .. end of a chain of n stages."""
    if i == end:
        return [[("L", n)]] if i == n else [[("Fe", i), ("B", i)]]
    found: list[list[Op]] = [[("Fe", i), *inner, ("B", i)] for inner in schedules(n, i + 1, end)]
    for j in range(i + 1, end + 1):
        forward: list[Op] = [("Fck", i), *[("Fn", k) for k in range(i + 1, j)]]
        found += [
            forward + later + earlier
            for later in schedules(n, j, end)
            for earlier in schedules(n, i, j - 1)
        ]
    return found


def frontier(costs: Costs) -> list[tuple[int, int]]:
    """The best (bytes, ns) of all persistent schedules: bytes ascending, ns descending."""
    points: list[tuple[int, int]] = []
    priced = sorted((run(costs, ops)[::-1]) for ops in schedules(costs.n, 0, costs.n))
    for peak, time in priced:
        if not points or time < points[-1][1]:
            points.append((peak, time))
    return points
