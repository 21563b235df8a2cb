"""Cost models of captured operations, and the private pool.

What outlives a step is made outside of the pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from rotor._pytorch import devices
from rotor.engines.graph.code.actions import movable
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.tracing.fetches import Fetch, is_fetch
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.graph.blocks import runs_outside
from rotor.graph.graph import Graph, Operation, Storage
from rotor.meter.reserving import Reserving
from rotor.tier.offload import Homes


def build_graph(
    lowered: Lowered,
    costs: list[Cost],
    loss_bytes: int,
    *,
    moves: bool = False,
    held: Collection[int] = (),
    homes: Homes | None = None,
) -> Graph:
    """Return the cost model of captured operations, with `loss_bytes` of workspace in the loss.

    With `moves`, storages that no second tier may take are marked, also those in `held`, which
    others hold although they are not pinned. `homes` are the links to the second tiers where the
    step's parameters and gradients are at home.
    """
    sizes = sizes_of(lowered, costs)
    operations = []
    for index, (task, cost) in enumerate(zip(lowered.tasks, costs, strict=True)):
        operations.append(
            Operation(
                name=task.name,
                cost_ns=cost.ns,
                workspace_bytes=loss_bytes if index == lowered.loss else cost.workspace_bytes,
                phase=task.phase,
                inputs=tuple(task.inputs),
                outputs=tuple(task.made.values()),
                random=task.random,
                once=task.once,
                module=task.module,
                extra={"source": task.source} if task.source else {},
            )
        )
    if homes is not None:
        operations = _on_links(lowered, operations, homes, sizes)
    if moves:
        may_move = movable(lowered, sizes, 1)
        storages = [
            Storage(size, is_pinned, movable=(may_move[s] and s not in held) or is_pinned)
            for s, (size, (_, is_pinned)) in enumerate(zip(sizes, lowered.storages, strict=True))
        ]
        return Graph(storages, None, operations)
    return Graph(sizes, [is_pinned for _, is_pinned in lowered.storages], operations)


def _on_links(
    lowered: Lowered, operations: Sequence[Operation], homes: Homes, sizes: Sequence[int]
) -> list[Operation]:
    """Return the operations of a step, as transfers where they are."""
    made = list(operations)
    for k, (ns, nbytes) in transfers(lowered, homes, sizes).items():
        if lowered.tasks[k].settle is None:
            made[k] = replace(made[k], cost_ns=ns, clock="read")
        else:
            made[k] = replace(made[k], cost_ns=ns, clock="write", extra={"bytes": nbytes})
    return made


def transfers(lowered: Lowered, homes: Homes, sizes: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the time, ns, and the bytes of each operation that fetches or hands over.

    `sizes` are those of the storages. Gradients get homes in the nearest tier as long as it has
    room.
    """
    found, left = {}, homes.room_bytes
    nearest, *beneath = homes.links.values()
    for k, task in enumerate(lowered.tasks):
        if is_fetch(task.node):
            nbytes = sum(sizes[s] for s in task.made.values())
            link = homes.links[cast(Fetch, cast(fx.Node, task.node).target).home.tier]
            found[k] = link.read_ns(nbytes), nbytes
        elif task.settle is not None:
            places = (lowered.values[lowered.gradients[g]].storages for g in task.gradients)
            nbytes = sum(sizes[s] for s in {s for storages in places for s in storages})
            near = nbytes if left is None else min(nbytes, left)
            left = None if left is None else left - near
            ns = nearest.write_ns(near) if near else 0
            ns += beneath[0].write_ns(nbytes - near) if nbytes > near else 0
            found[k] = ns, nbytes
    return found


def sizes_of(lowered: Lowered, costs: list[Cost]) -> list[int]:
    """Return the bytes of every storage, as its operation makes it."""
    sizes = [size for size, _ in lowered.storages]
    for task, cost in zip(lowered.tasks, costs, strict=True):
        for storage, size in zip(task.made.values(), cost.made_bytes, strict=True):
            sizes[storage] = size
    return sizes


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
