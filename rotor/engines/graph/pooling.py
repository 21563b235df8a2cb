"""Private pool of the allocator in emitted code; storages that outlive a step are outside of it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import fx

from rotor._pytorch import devices
from rotor.engines.graph.lowering import Lowered
from rotor.engines.graph.pricing import sizes_of
from rotor.engines.graph.profile import Cost
from rotor.graph.blocks import runs_outside
from rotor.meter.reserving import Reserving

__all__ = ["Pooling", "outliving_storages"]


def outliving_storages(lowered: Lowered) -> frozenset[int]:
    """Return the storages of outputs and of new gradients; not of buffers that a step changes."""
    nodes = [*lowered.outputs[len(lowered.mutated) :], *lowered.gradients]
    found = {s for n in nodes if isinstance(n, fx.Node) for s in lowered.values[n].storages}
    return frozenset(s for s in found if lowered.storages[s][1])


class Pooling:
    """Use of a plan's private pool by emitted code, which plans may share."""

    def __init__(self, lowered: Lowered, costs: Sequence[Cost]) -> None:
        self.outliving = outliving_storages(lowered)
        """Numbers of the storages that are made outside of the pool, or copied there."""
        self._plans: weakref.ref[Reserving] | None = None
        self._sizes = sizes_of(lowered, list(costs))
        self._workspaces = [cost.workspace_bytes for cost in costs]
        self._entered: devices.Pool | None = None

    def runs_outside(self, task: int, kept: set[int]) -> bool:
        """Return whether a run takes all its memory outside of the pool."""
        sizes = {storage: self._sizes[storage] for storage in kept}
        return runs_outside(False, self._workspaces[task], sizes, self.outliving)

    def use(self, reserving: Reserving | None) -> None:
        """Use the pool of a plan, which runs next and alone keeps it."""
        self._plans = None if reserving is None else weakref.ref(reserving)

    def enter(self) -> None:
        """Take the allocations of this thread from the pool, if the plan has one."""
        self.leave()
        plans = self._plans() if self._plans is not None else None
        self._entered = None if plans is None else plans.pool
        if self._entered is not None:
            self._entered.enter()

    def leave(self) -> None:
        """Take the allocations of this thread from outside of the pool."""
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.leave()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy outside of the pool; the tensor itself if the plan has none."""
        if self._entered is None:
            return tensor
        self.leave()
        try:
            found = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        finally:
            self.enter()
        return found.copy_(tensor)
