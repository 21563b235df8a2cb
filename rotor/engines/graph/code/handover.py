"""Handover of temporary gradients: they are added to existing ones in place, or leave.

A gradient that a parameter lacks is made and stays. If the parameter has one, the new one is
temporary: after the last operation that needs its memory comes an operation that hands it over.
Gradients of parameters in a second tier leave for their homes there while the backward goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rotor._pytorch import core
from rotor.common.accounting import HANDOVERS
from rotor.engines.contract import CannotPlan
from rotor.engines.graph.code.early import Owners, gathered, sharing
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.tracing.lowering import Lowered, Task
from rotor.errors import CaptureError
from rotor.tier.interface import bytes_at_any_phase
from rotor.tier.state import AwayState


def with_handovers(
    lowered: Lowered, existing: Collection[int], away: Away | None = None
) -> tuple[Lowered, list[int | Cost]]:
    """Return the operations of a step in which some gradients exist, and where they come from.

    For each operation that is its number in `lowered`, a step in which every gradient is new, or
    the cost of a handover. Temporary gradients are
    handed over together, as soon as they have 1 / `HANDOVERS` of the bytes of all. Gradients in
    memory of an output, or of a new gradient, stay as they were. With `away`, gradients leave
    for a second tier: each handover waits for the transfers of the one before it, whose gradients
    are in memory until then. They are added to earlier values one by one, which are fetched.
    """
    staying = set(lowered.tasks[lowered.loss].inputs)
    for index, gradient in enumerate(lowered.gradients):
        if gradient is not None and index not in existing:
            staying.update(lowered.values[gradient].storages)
    groups = [
        (storages, indices)
        for storages, indices in sharing(lowered, sorted(existing))
        if storages and not storages & staying
    ]
    last: dict[int, int] = {}
    for number, task in enumerate(lowered.tasks):
        last.update(dict.fromkeys((*task.inputs, *task.made.values()), number))
    timed = [
        (max(lowered.loss, *(last[s] for s in storages)), indices, storages)
        for storages, indices in groups
    ]
    settle = None if away is None else away.state.settle
    after: dict[int, list[Task]] = {}
    leaving: list[int] = []
    for position, indices, storages in gathered(lowered, timed, HANDOVERS):
        after[position] = [
            Task(
                name=f"accumulate_{len(after)}",
                node=None,
                phase="backward",
                inputs=[*storages, *leaving],
                once=True,
                module=lowered.tasks[position].module,
                gradients=tuple(indices),
                settle=settle,
            )
        ]
        leaving = [] if settle is None else storages
    if leaving and settle is not None:
        after[position].append(
            Task(
                name="written",
                node=None,
                phase="backward",
                inputs=leaving,
                once=True,
                settle=settle,
            )
        )
    tasks: list[Task] = []
    origins: list[int | Cost] = []
    for number, task in enumerate(lowered.tasks):
        tasks.append(task)
        origins.append(number)
        for added in after.get(number, ()):
            tasks.append(added)
            largest = max((_bytes_of(lowered, index) for index in added.gradients), default=0)
            workspace = 0
            if away is not None and largest:
                workspace = bytes_at_any_phase(largest, away.state.tier.alignment_bytes)
            origins.append(Cost(0, workspace))
    temporary = {s for added in after.values() for task in added for s in task.inputs}
    pinned = [(size, pin and s not in temporary) for s, (size, pin) in enumerate(lowered.storages)]
    return replace(lowered, tasks=tasks, storages=pinned), origins


def _bytes_of(lowered: Lowered, index: int) -> int:
    """Return the bytes of a gradient's storages."""
    return sum(lowered.storages[s][0] for s in lowered.values[lowered.gradients[index]].storages)


@dataclass(frozen=True)
class Away:
    """Gradients that leave for homes in a second tier."""

    gradients: frozenset[int]
    """Their numbers."""
    state: AwayState
    """Homes, and the parameters for which tensors without bytes stand in a captured call."""

    @classmethod
    def of(
        cls,
        state: AwayState | None,
        lowered: Lowered,
        owners: Owners | None,
        slots: Sequence[core.Slot],
    ) -> Away | None:
        """Return the gradients of a captured step that leave, if any can.

        What makes or reads them runs once from now on: they are in memory while they leave, and go
        with their handover. Raise CannotPlan if the origins of gradients are unknown.
        """
        if state is None:
            return None
        if owners is None:
            raise CannotPlan(
                CaptureError(
                    "a tensor other than a parameter or an argument gets a gradient, or the "
                    "forward reads gradients, so that no gradient can leave for a second tier in "
                    "the backward: leave offload_state out"
                )
            )
        found = [
            index
            for index, owner in owners.items()
            if owner.slots and state.has(core.value_in(slots[owner.slots[0]]))
        ]
        leaving = {s for k in found for s in lowered.values[lowered.gradients[k]].storages}
        for task in lowered.tasks:
            is_used = not leaving.isdisjoint((*task.inputs, *task.made.values()))
            task.once |= is_used and task.node is not None
        return cls(frozenset(found), state)
