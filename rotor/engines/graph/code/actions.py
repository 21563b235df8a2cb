"""Actions of a program, as the code of a captured step runs them.

With n operations and m storages, an action k < n runs operation k; n <= k < n + m finishes the
offload of storage k - n to the second tier; n + m <= k starts the fetch of storage k - n - m.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import fx

from rotor.engines.graph.tracing.lowering import Lowered, at_path


class Kind(Enum):
    """Kind of an action."""

    RUN = "run"
    FINISH = "finish"
    FETCH = "fetch"


class Action(NamedTuple):
    """Action of a program."""

    kind: Kind
    number: int
    """Number of the operation that runs, or of the storage that moves."""
    reads: tuple[int, ...]
    """Storages that it needs."""
    makes: tuple[int, ...]
    """Storages that are in memory after it."""


def actions_of(lowered: Lowered, numbers: Iterable[int]) -> list[Action]:
    """Return the actions of a program of captured operations, given as numbers."""
    operations, storages = len(lowered.tasks), len(lowered.storages)
    runs = [
        Action(Kind.RUN, k, tuple(task.inputs), tuple(task.made.values()))
        for k, task in enumerate(lowered.tasks)
    ]
    found = []
    for number in map(int, numbers):
        if number < operations:
            found.append(runs[number])
        elif number < operations + storages:
            storage = number - operations
            found.append(Action(Kind.FINISH, storage, (storage,), ()))
        else:
            storage = number - operations - storages
            found.append(Action(Kind.FETCH, storage, (), (storage,)))
    return found


def renumbered(numbers: Sequence[int], operations: int, others: dict[int, int]) -> list[int]:
    """Return a program's actions for another list of operations on the same storages.

    `operations` is the length of the former list. `others` has the new numbers of operations, one
    for each operation of the new list; operations without a new number are left out.
    """
    moved = [others.get(k) if k < operations else k + len(others) - operations for k in numbers]
    return [k for k in moved if k is not None]


def offloaded(actions: Sequence[Action]) -> dict[int, list[int]]:
    """Return the storages that are fetched, with the positions at which their writes begin.

    A write begins right after the last run that makes the storage before its offload is finished.
    """
    fetched = {action.number for action in actions if action.kind is Kind.FETCH}
    made: dict[int, int] = {}
    found: dict[int, list[int]] = {storage: [] for storage in sorted(fetched)}
    for position, action in enumerate(actions):
        if action.kind is Kind.RUN:
            made.update(dict.fromkeys(action.makes, position))
        elif action.kind is Kind.FINISH and action.number in fetched:
            begun = made.get(action.number)
            if begun is not None and begun not in found[action.number]:
                found[action.number].append(begun)
    return found


def movable(lowered: Lowered, sizes: Sequence[int], least_bytes: int) -> list[bool]:
    """Return for every storage whether it may go to a second tier.

    No storage of less than `least_bytes` may. Outputs and gradients are held by others, and
    gradients of outputs come from the caller's loss.
    """
    found = [False] * len(lowered.storages)
    owners: dict[int, int] = {}
    for index, task in enumerate(lowered.tasks):
        if task.node is None:
            continue
        for path, storage in task.made.items():
            owners[storage] = owners.get(storage, 0) + 1
            pinned = lowered.storages[storage][1]
            value = at_path(task.node.meta.get("val"), path)
            is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
            is_large = sizes[storage] >= least_bytes
            found[storage] = is_plain and is_large and not pinned and index != lowered.loss
    for node in lowered.gradients:
        if isinstance(node, fx.Node):
            for storage in lowered.values[node].storages:
                found[storage] = False
    return [flag and owners.get(s) == 1 for s, flag in enumerate(found)]


def deaths(lowered: Lowered, actions: Sequence[Action]) -> tuple[list[set[int]], list[set[int]]]:
    """Return per position of a program the used storages made there, and the last uses."""
    pinned = {s for s, (_, is_pinned) in enumerate(lowered.storages) if is_pinned}
    first_made: dict[int, int] = {}
    for position, action in enumerate(actions):
        for storage in action.makes:
            first_made.setdefault(storage, position)
    needed: set[int] = set(pinned)
    kept: list[set[int]] = [set() for _ in actions]
    dying: list[set[int]] = [set() for _ in actions]
    for position in range(len(actions) - 1, -1, -1):
        for storage in actions[position].makes:
            if storage in pinned:
                if first_made[storage] == position:
                    kept[position].add(storage)
            elif storage in needed:
                kept[position].add(storage)
                needed.discard(storage)
        for storage in actions[position].reads:
            if storage not in needed:
                dying[position].add(storage)
                needed.add(storage)
    return kept, dying


def root_names(lowered: Lowered) -> dict[int, str]:
    """Return the variable of each storage's tensor."""
    return {
        storage: f"a{index}" + "".join(f"_{k}" for k in path)
        for index, task in enumerate(lowered.tasks)
        for path, storage in task.made.items()
    }


def stored_values(
    lowered: Lowered, actions: Sequence[Action], boundary: int, kept: Sequence[set[int]]
) -> dict[int, str]:
    """Return the storages kept from forward to backward, with the variables that hold them."""
    names = root_names(lowered)
    made: dict[int, str] = {}
    for position in range(boundary):
        made.update({s: names[s] for s in actions[position].makes if s in kept[position]})
    read: set[int] = set()
    again: set[int] = set()
    for action in actions[boundary + 1 :]:
        read.update(s for s in action.reads if s not in again)
        again.update(s for s in action.makes if not lowered.storages[s][1])
    for node in lowered.gradients:
        if isinstance(node, fx.Node):
            read.update(s for s in lowered.values[node].storages if s not in again)
    return {storage: name for storage, name in made.items() if storage in read}


def outputs_among(lowered: Lowered, stored: dict[int, str]) -> list[str]:
    """Return the variables of kept storages that outputs of the model are on."""
    mutations = len(lowered.mutated)
    on = {
        storage
        for node in lowered.outputs[mutations:]
        if isinstance(node, fx.Node)
        for storage in lowered.values[node].storages
    }
    return [name for storage, name in stored.items() if storage in on]
