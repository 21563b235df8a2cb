"""Graphs of the same operations on storages of other sizes, for other batches."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rotor import _core
from rotor.graph.graph import CLOCKS, LARGEST, Graph, Operation, Storage, array_of


class Resizing:
    """Source of graphs of the same operations on storages of other sizes, at other costs.

    A program of the plain graph to begin with is one of every graph made here.
    """

    def __init__(self, graph: Graph) -> None:
        graph.require_plain("Resizing")
        self._graph = graph
        self._structure = graph.structure()
        self._kept = (
            array_of(storage.keeping for storage in graph.storages),
            array_of(int(not storage.movable) for storage in graph.storages),
            array_of(0 for _ in graph.storages),
        )
        self._clock = array_of(CLOCKS.index(op.clock) for op in graph.operations)

    def graph(
        self,
        storage_bytes: npt.NDArray[np.int64],
        cost_ns: npt.NDArray[np.int64],
        workspace_bytes: npt.NDArray[np.int64],
    ) -> Graph:
        """Return the graph of these sizes and costs, in a time that no check of it needs.

        Raises ValueError if a number is missing, or out of range.
        """
        for name, values, count in (
            ("storage_bytes", storage_bytes, len(self._graph.storages)),
            ("cost_ns", cost_ns, len(self._graph)),
            ("workspace_bytes", workspace_bytes, len(self._graph)),
        ):
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries, expected {count}")
            if count and not 0 <= values.min() <= values.max() <= LARGEST:
                raise ValueError(f"{name} has numbers out of range, expected 0 to {LARGEST}")
        beside = (storage_bytes, *self._kept, workspace_bytes, self._clock)
        core = _core.Dataflow(cost_ns, workspace_bytes, *self._structure, *beside)
        return _Resized(self._graph, core, storage_bytes, cost_ns, workspace_bytes)


class _Resized(Graph):
    """Graph with the structure of another one; objects are made when they are asked for."""

    def __init__(
        self,
        origin: Graph,
        core: _core.Dataflow,
        storage_bytes: npt.NDArray[np.int64],
        cost_ns: npt.NDArray[np.int64],
        workspace_bytes: npt.NDArray[np.int64],
    ) -> None:
        self.name, self.extra = origin.name, dict(origin.extra)
        self.producers = origin.producers
        self.core = core
        self._origin = origin
        self._sizes = storage_bytes
        self._costs = (cost_ns, workspace_bytes)

    def __len__(self) -> int:
        return len(self._origin)

    @property
    def total_time(self) -> float:
        return int(self._costs[0].sum()) / 1e9

    @cached_property
    def storages(self) -> tuple[Storage, ...]:  # type: ignore[override]
        return tuple(
            Storage(size, storage.pinned, movable=storage.movable)
            for size, storage in zip(self._sizes.tolist(), self._origin.storages, strict=True)
        )

    @cached_property
    def operations(self) -> tuple[Operation, ...]:  # type: ignore[override]
        times, workspaces = (values.tolist() for values in self._costs)
        return tuple(
            replace(op, cost_ns=ns, workspace_bytes=workspace)
            for op, ns, workspace in zip(self._origin.operations, times, workspaces, strict=True)
        )
