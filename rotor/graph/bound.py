"""A bound on the time of programs with a second tier, by linear or integer programming."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rotor.algorithms._integer_program import Rows, minimise
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.units import parse_bytes

_SCALE = 1e-6


def offload_bound(
    graph: Graph,
    budget_bytes: int | str,
    link: Link,
    *,
    integer: bool = False,
    time_limit: float | None = None,
) -> float:
    """Return seconds below which no program with a second tier stays, by SciPy.

    When the first backward operation begins, each storage that is read later is in memory, or on
    the tier, or made again. The bound looks at this moment alone: it is loose for small budgets.

    Parameters
    ----------
    graph
        The graph to run, with backward operations.
    budget_bytes
        The most bytes that may be live at any moment, or text such as "700MiB".
    link
        The link to the second tier.
    integer
        True for the tighter bound by integer programming, which takes longer.
    time_limit
        Seconds after which the bound so far is returned, of integer programming.

    Returns
    -------
    float
        Seconds; infinite where no program is within the budget, by what the bound knows.

    Raises
    ------
    ImportError
        SciPy is not installed; the message names the extra that brings it.
    ValueError
        The graph is not plain or has no backward operation, or an argument is out of range.
    """
    graph.require_plain("the bound")
    budget = parse_bytes(budget_bytes, name="budget_bytes")
    if graph.operations[-1].phase != "backward":
        raise ValueError("the bound needs a graph with backward operations")
    return _Moment(graph, budget, link).solve(integer, time_limit)


class _Moment:
    """Linear program of the moment when the backward begins.

    Variables, in this order: of each storage of the forward, the share in memory and the share on
    the tier; of each operation of the forward, the share that runs again; the times before and
    after.
    """

    def __init__(self, graph: Graph, budget: int, link: Link) -> None:
        ops = graph.operations
        self.begin = next(k for k, op in enumerate(ops) if op.phase == "backward")
        self.made = [s for s, k in enumerate(graph.producers) if k < self.begin]
        self.index = {s: k for k, s in enumerate(self.made)}
        self.graph, self.link, self.budget = graph, link, budget
        self.count = 2 * len(self.made) + self.begin + 2
        self.rows = Rows()
        self._need()
        self._pass()

    def _kept(self, storage: int) -> int:
        return self.index[storage]

    def _moved(self, storage: int) -> int:
        return len(self.made) + self.index[storage]

    def _again(self, operation: int) -> int:
        return 2 * len(self.made) + operation

    def _atleast(self, storage: int, reader: int | None = None) -> None:
        """Require a storage: for all that comes later, or as far as a reader runs again."""
        maker = self._again(self.graph.producers[storage])
        sources = [(self._kept(storage), -1.0), (self._moved(storage), -1.0), (maker, -1.0)]
        if reader is None:
            self.rows.at_most(sources, -1.0)
        else:
            self.rows.at_most([(self._again(reader), 1.0), *sources], 0.0)

    def _need(self) -> None:
        """Require values that are read later, and the inputs of runs; limit the bytes in memory."""
        ops = self.graph.operations
        later = {s for op in ops[self.begin :] for s in op.inputs if s in self.index}
        for storage in sorted(later):
            self._atleast(storage)
        for number in range(self.begin):
            for storage in set(ops[number].inputs):
                self._atleast(storage, number)
        sizes = self.graph.storages
        own = min(
            sum(sizes[s].bytes for s in op.outputs) + op.workspace_bytes for op in ops[self.begin :]
        )
        held = [(self._kept(s), sizes[s].bytes * _SCALE) for s in self.made]
        self.rows.at_most(held, (self.budget - own) * _SCALE)

    def _pass(self) -> None:
        """Relate the time before to writes, the time after to reads and to runs."""
        ops, link = self.graph.operations, self.link
        before, after = self.count - 2, self.count - 1
        costs = [op.cost_ns * _SCALE for op in ops]
        self.least = (sum(costs[: self.begin]), sum(costs[self.begin :]))
        latency = link.latency_ns * _SCALE
        for variable, rate in ((before, link.write_bytes_per_s), (after, link.read_bytes_per_s)):
            terms = [
                (self._moved(s), self.graph.storages[s].bytes * 1e9 / rate * _SCALE + latency)
                for s in self.made
            ]
            self.rows.at_most([*terms, (variable, -1.0)], 0.0)
        runs = [(self._again(k), costs[k]) for k in range(self.begin)]
        self.rows.at_most([*runs, (after, -1.0)], -self.least[1])

    def _bounds(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        low, high = np.zeros(self.count), np.ones(self.count)
        low[-2:], high[-2:] = self.least, np.inf
        for s in self.made:
            storage, maker = self.graph.storages[s], self.graph.producers[s]
            op = self.graph.operations[maker]
            if storage.pinned:
                low[self._kept(s)] = 1.0
            stays = storage.pinned or not storage.movable or op.phase == "loss"
            if stays or storage.bytes < max(1, self.link.least_bytes):
                high[self._moved(s)] = 0.0
            if op.once or op.phase == "loss":
                high[self._again(maker)] = 0.0
        return low, high

    def solve(self, integer: bool, time_limit: float | None) -> float:
        """Return the bound in seconds."""
        costs = np.zeros(self.count)
        costs[-2:] = 1.0
        integral = np.full(self.count, float(integer))
        integral[-2:] = 0.0
        found = minimise(
            "offload_bound",
            costs,
            self.rows,
            self._bounds(),
            integral,
            gap=1e-4,
            time_limit=time_limit,
        )
        if found.status == 2:
            return math.inf
        bound = found.mip_dual_bound if integer else found.fun
        least = sum(self.least) if bound is None else max(float(bound), sum(self.least))
        return least / _SCALE / 1e9
