"""Random programs that keep, recompute or offload, and tiers to run them on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from graph_modules import random_program

from rotor.engines.graph.code.actions import movable
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.tier import Tier


class MemoryTier(Tier):
    """Tier in ordinary memory, whose transfers happen when they are waited for, or fail.

    Attributes
    ----------
    log
        Names of the calls so far.
    fails
        Function of the kind of a transfer and its number that is True if it fails.
    """

    def __init__(self, fails: Callable[[str, int], bool] = lambda kind, number: False) -> None:
        self.log: list[str] = []
        self.areas: list[torch.Tensor] = []
        self.fails = fails
        self._counts = {"write": 0, "read": 0}
        self.waiting: list[Callable[[], None]] = []

    def allocate(self, nbytes: int) -> Any:
        self.log.append("allocate")
        # No memory of PyTorch's, which a step's peak would count.
        area = torch.from_numpy(np.full(nbytes, 255, dtype=np.uint8))
        self.areas.append(area)
        return area

    def write(self, area: Any, offset: int, source: torch.Tensor) -> Any:
        place = area[offset : offset + len(source)]
        return self._later("write", lambda: place.copy_(source))

    def read(self, area: Any, offset: int, target: torch.Tensor) -> Any:
        place = area[offset : offset + len(target)]
        return self._later("read", lambda: target.copy_(place))

    def _later(self, kind: str, act: Callable[[], object]) -> list[Any]:
        self.log.append(kind)
        self._counts[kind] += 1
        number = self._counts[kind]
        ticket: list[Any] = [None, None]

        def transfer() -> None:
            ticket[0] = True
            if self.fails(kind, number):
                ticket[1] = OSError(5, f"{kind} {number} failed")
            else:
                act()

        self.waiting.append(transfer)
        return ticket

    def wait(self, ticket: Any) -> None:
        self.log.append("wait")
        while ticket[0] is None:
            self.waiting.pop(0)()
        if ticket[1] is not None:
            raise ticket[1]

    def release(self, area: Any) -> None:
        self.log.append("release")
        # A later step finds nothing of an earlier one.
        area.fill_(170)
        self.areas = [other for other in self.areas if other is not area]


def offload_at_random(
    lowered: Lowered, ops: Sequence[int], sizes: Sequence[int], seed: int, share: float
) -> list[int]:
    """Return the actions of a program in which some pauses of storages are spent in the tier."""
    rng = random.Random(seed)
    operations, storages = len(lowered.tasks), len(lowered.storages)
    may_move = movable(lowered, sizes, 1)
    events: dict[int, list[tuple[str, int]]] = {}
    for position, index in enumerate(ops):
        task = lowered.tasks[index]
        for storage in task.inputs:
            events.setdefault(storage, []).append(("read", position))
        for storage in task.made.values():
            events.setdefault(storage, []).append(("make", position))
    before: dict[int, list[int]] = {}
    for storage, found in events.items():
        if not may_move[storage]:
            continue
        is_written = False
        for (_, position), (following, end) in pairwise(found):
            if following != "read" or rng.random() > share:
                continue
            # Each is written once; after that, a fetch is enough.
            first, second = sorted(rng.randint(position + 1, end) for _ in range(2))
            if not is_written:
                before.setdefault(first, []).append(operations + storage)
            is_written = True
            before.setdefault(second, []).append(operations + storages + storage)
    actions: list[int] = []
    for position, index in enumerate(ops):
        actions += before.get(position, [])
        actions.append(index)
    return actions


def random_joint_program(
    lowered: Lowered, sizes: Sequence[int], seed: int, drop: float, share: float
) -> list[int]:
    """Return a program that recomputes some storages, and offloads some."""
    return offload_at_random(lowered, random_program(lowered, seed, drop), sizes, seed, share)
