"""Handover of temporary gradients: they are added to existing ones in place, and freed.

A gradient that a parameter lacks is made and stays. If the parameter has one, the new one is
temporary: after the last operation that needs its memory comes an operation that hands it over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rotor.common.accounting import HANDOVERS
from rotor.engines.graph.code.away import Away
from rotor.engines.graph.code.early import sharing
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.tracing.lowering import Lowered, Task
from rotor.tier.interface import bytes_at_any_phase


def with_handovers(
    lowered: Lowered,
    costs: Sequence[Cost],
    existing: Collection[int],
    away: Away | None = None,
    most: int = HANDOVERS,
) -> tuple[Lowered, list[Cost]]:
    """Return the operations of a step in which some gradients exist, and their costs.

    `lowered` and `costs` are for a step in which every gradient is new. Temporary gradients are
    handed over together, as soon as they have 1 / `most` of the bytes of all of them. Gradients in
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
    timed = sorted(
        (max(lowered.loss, *(last[s] for s in storages)), sorted(indices), sorted(storages))
        for storages, indices in groups
    )
    sizes = [size for size, _ in lowered.storages]
    total = sum(sizes[s] for *_, storages in timed for s in storages)
    settle = None if away is None else away.settle
    after: dict[int, list[Task]] = {}
    leaving: list[int] = []
    indices: list[int] = []
    storages: list[int] = []
    for place, (position, more, lying_on) in enumerate(timed):
        indices += more
        storages += lying_on
        is_last = place + 1 == len(timed)
        waits = not is_last and timed[place + 1][0] == position
        enough = sum(sizes[s] for s in storages) * most >= total
        if is_last or (enough and not waits):
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
            indices, storages = [], []
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
    priced: list[Cost] = []
    for number, (task, cost) in enumerate(zip(lowered.tasks, costs, strict=True)):
        tasks.append(task)
        priced.append(cost)
        for added in after.get(number, ()):
            tasks.append(added)
            largest = max((_bytes_of(lowered, index) for index in added.gradients), default=0)
            workspace = 0
            if away is not None and largest:
                workspace = bytes_at_any_phase(largest, away.alignment_bytes)
            priced.append(Cost(0, workspace))
    temporary = {s for added in after.values() for task in added for s in task.inputs}
    pinned = [(size, pin and s not in temporary) for s, (size, pin) in enumerate(lowered.storages)]
    return replace(lowered, tasks=tasks, storages=pinned), priced


def _bytes_of(lowered: Lowered, index: int) -> int:
    """Return the bytes of a gradient's storages."""
    return sum(lowered.storages[s][0] for s in lowered.values[lowered.gradients[index]].storages)
