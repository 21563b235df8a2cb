"""Gradients that leave the backward of a program as soon as they are computed.

A captured call is one node of autograd, which gives all gradients when its backward returns. Who
waits for the gradient of a parameter, as DistributedDataParallel does to send it while the rest is
computed, then waits for all. So the call runs on other tensors on the memory of the parameters, and
between these and the parameters stand nodes of ours, one for each group of parameters: the
backward of the call begins the program and returns at once, and each node runs the program up to
the gradients of its group, and hands these on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.function import Function

from rotor import _torch
from rotor.graph.emit import Emitted, deaths, emit
from rotor.graph.lowering import Lowered
from rotor.recompute import autocast_off

__all__ = ["Delivery", "EarlyCode", "EarlyStep", "Owners", "delivery_groups", "owners_of"]

Owners = dict[int, list[_torch.Slot]]
"""For each primal that gets a gradient, where the parameter that it is stands in its modules."""

_MOST_GROUPS = 32


def owners_of(
    lowered: Lowered, primals: Sequence[Any], slots: Sequence[_torch.Slot]
) -> Owners | None:
    """Which primals are which parameters; ``None`` where something else needs a gradient too."""
    standing: dict[int, list[_torch.Slot]] = {}
    for slot in slots:
        standing.setdefault(id(slot[0].get(slot[1])), []).append(slot)
    found: Owners = {}
    for index, gradient in enumerate(lowered.gradients):
        if gradient is None:
            continue
        primal = primals[index]
        if type(primal) is not nn.Parameter or id(primal) not in standing:
            return None
        found[index] = standing[id(primal)]
    return found


def delivery_groups(lowered: Lowered, ops: Sequence[int]) -> list[tuple[int, list[int]]]:
    """When the gradients of primals can leave a program, and which leave together.

    Returns
    -------
    For each group the position of the last run that it needs, and its primals. What shares memory
    leaves together, when the program reads it no more.
    """
    boundary = list(ops).index(lowered.loss)
    kept, _ = deaths(lowered, ops)
    last = {}
    for position in range(boundary, len(ops)):
        task = lowered.tasks[ops[position]]
        last.update(dict.fromkeys((*task.inputs, *kept[position]), position))
    together: list[tuple[set[int], list[int]]] = []
    for index, gradient in enumerate(lowered.gradients):
        if gradient is None:
            continue
        storages = set(lowered.values[gradient].storages)
        sharing = [group for group in together if group[0] & storages]
        together = [group for group in together if not group[0] & storages]
        together.append(
            (
                storages.union(*(group[0] for group in sharing)),
                [*(i for group in sharing for i in group[1]), index],
            )
        )
    timed = sorted(
        (max((last.get(s, boundary) for s in storages), default=boundary), sorted(indices))
        for storages, indices in together
    )
    sizes = [s for s, _ in lowered.storages]
    total = sum(sum(sizes[s] for s in storages) for storages, _ in together)
    found: list[tuple[int, list[int]]] = []
    waiting: list[int] = []
    waiting_bytes = 0
    for place, (position, indices) in enumerate(timed):
        waiting += indices
        waiting_bytes += sum(
            sizes[s] for i in indices for s in lowered.values[lowered.gradients[i]].storages
        )
        is_last = place + 1 == len(timed)
        moves = is_last or timed[place + 1][0] > position
        if is_last or (moves and waiting_bytes * _MOST_GROUPS >= total):
            found.append((position, waiting))
            waiting, waiting_bytes = [], 0
    return found


@dataclass(frozen=True)
class EarlyCode:
    """A program whose backward stops at each group of gradients.

    Attributes
    ----------
    emitted
        Its functions; the backward is a generator, which puts gradients into a dictionary.
    groups
        The primals whose gradients are there at each stop.
    """

    emitted: Emitted
    groups: list[list[int]]

    @classmethod
    def of(cls, lowered: Lowered, ops: Sequence[int]) -> EarlyCode:
        """The code of a program."""
        groups = delivery_groups(lowered, ops)
        return cls(emit(lowered, ops, groups), [indices for _, indices in groups])


class Delivery:
    """One forward's backward in parts.

    Parameters
    ----------
    code
        What runs.
    device
        Of the model.
    gradients
        How many the call has.

    Attributes
    ----------
    withheld
        Primals whose gradients are ``None``, as outputs that they belong to got none.
    """

    def __init__(self, code: EarlyCode, device: torch.device, gradients: int) -> None:
        self._code = code
        self._device = device
        self._gradients = gradients
        self._parts: Generator[None, None, None] | None = None
        self._given: dict[int, torch.Tensor | None] = {}
        self._next = 0
        self.withheld: frozenset[int] = frozenset()

    def __call__(self, args: list[Any]) -> tuple[None, ...]:
        """Begin the backward; every gradient comes later."""
        self._given = {}
        self._next = 0
        begin: Callable[..., Generator[None, None, None]] = self._code.emitted.backward
        self._parts = begin(args, self._given)
        next(self._parts)
        return (None,) * self._gradients

    def deliver(self, group: int) -> list[torch.Tensor | None]:
        """Run the backward up to the gradients of a group; they are given once."""
        try:
            with autocast_off(self._device.type):
                while self._next <= group and self._parts is not None:
                    next(self._parts)
                    self._next += 1
                if self._next == len(self._code.groups) and self._parts is not None:
                    self._parts.close()
                    self._parts = None
        except BaseException:
            self._parts = None
            self._given = {}
            raise
        found = [(i, self._given.pop(i, None)) for i in self._code.groups[group]]
        return [None if i in self.withheld else gradient for i, gradient in found]


class _Deliver(Function):
    """Between the parameters of a group and what the captured call runs on."""

    @staticmethod
    def forward(
        ctx: Any, delivery: Delivery, group: int, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.delivery = delivery
        ctx.group = group
        ctx.set_materialize_grads(False)
        # Captured calls look at types.
        return tuple([nn.Parameter(parameter.detach()) for parameter in parameters])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True cannot go through a captured graph: gradients "
                "of gradients need the plain model (chk.module)"
            )
        return None, None, *ctx.delivery.deliver(ctx.group)


class EarlyStep:
    """While it lasts, a captured call gives the gradients of its parameters early.

    Parameters
    ----------
    code
        The program.
    owners
        Of the captured call.
    device
        Of the model.
    gradients
        How many the call has.
    """

    def __init__(
        self, code: EarlyCode, owners: Owners, device: torch.device, gradients: int
    ) -> None:
        self.source = code.emitted.source
        self.replayed = code.emitted.replayed
        self.forward = code.emitted.forward
        self.backward = Delivery(code, device, gradients)
        self._groups = code.groups
        self._owners = owners
        self._standing: list[tuple[_torch.Slot, Any]] = []

    def prepare(self) -> None:
        """Everything is ready."""

    def __enter__(self) -> Self:
        # Autograd runs what was made last first.
        for group in reversed(range(len(self._groups))):
            indices = self._groups[group]
            parameters = [slots[name] for slots, name in (self._owners[i][0] for i in indices)]
            given = _Deliver.apply(self.backward, group, *parameters)
            for index, tensor in zip(indices, given, strict=True):
                for slots, name in self._owners[index]:
                    self._standing.append(((slots, name), slots[name]))
                    slots[name] = tensor
        return self

    def __exit__(self, *_: object) -> None:
        for (slots, name), parameter in self._standing:
            slots[name] = parameter
        self._standing.clear()
