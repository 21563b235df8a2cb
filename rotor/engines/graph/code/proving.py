"""Proof that values which a program computes again equal the first ones, bit for bit.

Verified steps run another version of a program's code, which notes the values that it makes in the
proof of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from rotor.common.checksums import proof_bytes
from rotor.engines.graph.code.actions import Action, Kind, actions_of, deaths
from rotor.engines.graph.costs.repeating import is_unspecified, keep_from_now_on
from rotor.engines.graph.tracing.fetches import is_fetch
from rotor.engines.graph.tracing.lowering import Lowered, Task
from rotor.engines.proofs import Origins, RunProof, StepProof, buffers_before


def proving_bytes(lowered: Lowered, device: torch.device, comparisons: int) -> int:
    """Return the bytes that a verified step needs beside the storages of its program.

    They hold the checksums of its `comparisons`, and copies of buffers that its operations change.
    The result is 0 without comparisons, as nothing is recomputed then.
    """
    if not comparisons:
        return 0
    sizes = [lowered.input_bytes(node) for node in lowered.mutated]
    return proof_bytes(device, comparisons) + sum(sizes)


class Prover(Origins):
    """Prover of the runs of one program.

    No plan of the `whole` graph may compute operations again that gave other bits.
    """

    cure = "Its value is kept from now on: run the step again"

    def __init__(self, lowered: Lowered, whole: Lowered) -> None:
        self._lowered, self._whole = lowered, whole
        self._next: tuple[StepProof, int, str]

    def prepare(self, step: StepProof, number: int = 0, place: str = "") -> None:
        """Have the next run belong to a verified step; its number and place are as of `RunProof`.

        A place is the path of the module that runs.
        """
        self._next = step, number, place

    @property
    def step(self) -> StepProof:
        """Verified step to which the next run belongs."""
        return self._next[0]

    def begin(self, *buffers: torch.Tensor) -> RunProof:
        """Return the object in which the code of a run notes its values; it changes the buffers."""
        step, number, place = self._next
        if not step.has_state:
            step.undo.append(buffers_before(buffers, torch.Tensor.clone))
        return RunProof(step, self, number, place)

    def roots(self, sites: Collection[int]) -> list[int]:
        """Return the storages that were made from none of the others."""
        made = self._made()
        return [s for s in sites if not set(made[s].inputs) & set(sites)]

    def named(self, site: int) -> tuple[str, str]:
        """Return the operation that makes a storage, and its module."""
        task = self._made()[site]
        assert task.node is not None
        return str(task.node.target), task.module

    def keep(self, sites: Sequence[int]) -> None:
        """Have no plan compute what makes these storages again."""
        made = self._made()
        keep_from_now_on(self._whole, list({id(made[s]): made[s] for s in sites}.values()))

    def _made(self) -> dict[int, Task]:
        return {s: task for task in self._lowered.tasks for s in task.made.values()}


def compared_storages(
    lowered: Lowered, actions: Sequence[Action], kept: Sequence[set[int]]
) -> dict[int, list[int]]:
    """Return the storages that a program computes again and reads, and the positions.

    `kept` are per position the used storages made there (`deaths`). The positions are that of the
    first making, then those of all later ones that are used.
    """
    found: dict[int, list[int]] = {}
    runs = Counter(action.number for action in actions if action.kind is Kind.RUN)
    for position, action in enumerate(actions):
        if action.kind is not Kind.RUN or runs[action.number] == 1:
            continue
        task = lowered.tasks[action.number]
        for path, storage in task.made.items():
            if task.node is None or is_fetch(task.node) or is_unspecified(task.node, path):
                continue
            if storage not in found:
                found[storage] = [position]
            elif storage in kept[position]:
                found[storage].append(position)
    return {storage: places for storage, places in found.items() if len(places) > 1}


def checksums_of(lowered: Lowered, numbers: Sequence[int]) -> int:
    """Return the number of checksums in a verified run of a program."""
    actions = actions_of(lowered, numbers)
    runs = [action.number for action in actions if action.kind is Kind.RUN]
    if len(runs) == len(set(runs)):
        return 0
    kept, _ = deaths(lowered, actions)
    return sum(map(len, compared_storages(lowered, actions, kept).values()))
