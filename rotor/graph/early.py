"""Gradients that leave the backward of a program as soon as they are computed.

A captured call is one node of autograd, which gives all gradients when its backward returns. Who
waits for the gradient of a parameter, as DistributedDataParallel does to send it while the rest is
computed, then waits for all; and gradients that are added to existing ones are all there before the
first is added. So the call runs on other tensors on the memory of the parameters, and between these
and the parameters stand nodes of ours, one for each group of parameters: the backward of the call
begins the program and returns at once, and each node runs the program up to the gradients of its
group, and hands these on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from rotor import _torch
from rotor.errors import RecomputationError
from rotor.graph.emit import StepCode, deaths, emit
from rotor.graph.handover import sharing
from rotor.graph.lowering import Lowered
from rotor.graph.proving import PartsTally, Prover
from rotor.recompute import autocast_off
from rotor.stage_proofs import host_copy

__all__ = [
    "Delivery",
    "EarlyCode",
    "EarlyStep",
    "Owner",
    "Owners",
    "delivery_groups",
    "owners_of",
    "slots_of",
]

_MOST_GROUPS = 32


@dataclass(frozen=True)
class Owner:
    """What a captured call was given as one of its primals.

    Attributes
    ----------
    slots
        Which of the module's parameters it is, by their numbers in `slots_of`.
    leaves
        Which of the call's arguments it is, by their numbers in the flattened arguments.
    """

    slots: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()


Owners = dict[int, Owner]
"""For each primal that gets a gradient, what it is."""


def slots_of(module: nn.Module) -> list[_torch.Slot]:
    """Return the places of a module's parameters, one used twice standing twice."""
    return [slot for part in module.modules() for slot in _torch.parameter_slots(part)]


def owners_of(
    lowered: Lowered,
    primals: Sequence[Any],
    slots: Sequence[_torch.Slot],
    arguments: Any = (),
) -> Owners | None:
    """Return what the primals are that get gradients.

    Parameters
    ----------
    lowered
        The joint graph's operations.
    primals
        The tensors that it was called with.
    slots
        The places of the module's parameters.
    arguments
        Of the call, nested.

    Returns
    -------
    dict of int to Owner, or None
        ``None`` where something else needs a gradient too, or an argument that is changed does.
    """
    numbers: dict[int, list[int]] = {}
    for number, (values, name) in enumerate(slots):
        numbers.setdefault(id(values.get(name)), []).append(number)
    leaves: dict[int, list[int]] = {}
    for number, leaf in enumerate(_torch.tree_flatten(arguments)[0]):
        if type(leaf) in (torch.Tensor, nn.Parameter):
            leaves.setdefault(id(leaf), []).append(number)
    found: Owners = {}
    for index, gradient in enumerate(lowered.gradients):
        if gradient is None:
            continue
        primal = primals[index]
        owner = Owner(
            tuple(numbers.get(id(primal), ())) if type(primal) is nn.Parameter else (),
            tuple(leaves.get(id(primal), ())),
        )
        is_known = owner.slots or owner.leaves
        if not is_known or lowered.primals[index] in lowered.mutated:
            return None
        found[index] = owner
    return found


def delivery_groups(
    lowered: Lowered, ops: Sequence[int], indices: Collection[int] | None = None
) -> list[tuple[int, list[int]]]:
    """When the gradients of primals can leave a program, and which leave together.

    Parameters
    ----------
    lowered, ops
        The operations, and those that run.
    indices
        The gradients in question; by default all.

    Returns
    -------
    For each group the position of the last run that it needs, and its primals. What shares memory
    leaves together, when the program reads it no more.
    """
    if indices is None:
        indices = [i for i, gradient in enumerate(lowered.gradients) if gradient is not None]
    boundary = list(ops).index(lowered.loss)
    kept, _ = deaths(lowered, ops)
    last = {}
    for position in range(boundary, len(ops)):
        task = lowered.tasks[ops[position]]
        last.update(dict.fromkeys((*task.inputs, *kept[position]), position))
    together = sharing(lowered, indices)
    timed = sorted(
        (max((last.get(s, boundary) for s in storages), default=boundary), sorted(group))
        for storages, group in together
    )
    sizes = [s for s, _ in lowered.storages]
    total = sum(sum(sizes[s] for s in storages) for storages, _ in together)
    found: list[tuple[int, list[int]]] = []
    waiting: list[int] = []
    waiting_bytes = 0
    for place, (position, group) in enumerate(timed):
        waiting += group
        waiting_bytes += sum(
            sizes[s] for i in group for s in lowered.values[lowered.gradients[i]].storages
        )
        is_last = place + 1 == len(timed)
        moves = is_last or timed[place + 1][0] > position
        if is_last or (moves and waiting_bytes * _MOST_GROUPS >= total):
            found.append((position, waiting))
            waiting, waiting_bytes = [], 0
    return found


@dataclass(frozen=True)
class EarlyCode:
    """A program whose backward stops at each group of gradients; code of a step as any.

    Attributes
    ----------
    emitted
        Its functions; the backward is a generator, which puts gradients into a dictionary.
    groups
        The primals whose gradients are there at each stop.
    gradients
        How many the call has.
    prover
        What may raise after gradients have left.
    """

    emitted: StepCode
    groups: list[list[int]]
    gradients: int
    prover: Prover | None = None

    @classmethod
    def of(
        cls,
        lowered: Lowered,
        ops: Sequence[int],
        *,
        spread: bool = False,
        prover: Prover | None = None,
    ) -> EarlyCode:
        """Return the code of a program.

        Parameters
        ----------
        lowered, ops
            The operations, and those that run.
        spread
            Have new gradients leave early too; by default they leave last.
        prover
            See `rotor.graph.emit.emit`.
        """
        ops = [int(index) for index in ops]
        handed = {i for task in lowered.tasks for i in task.gradients}
        rest = [i for i, g in enumerate(lowered.gradients) if g is not None and i not in handed]
        if spread:
            late = delivery_groups(lowered, ops, rest)
        else:
            late = [(len(ops) - 1, rest)] if rest else []
        groups: list[list[int]] = []
        for position in range(ops.index(lowered.loss), len(ops)):
            over = lowered.tasks[ops[position]].gradients
            groups += [list(over)] if over else []
            groups += [indices for place, indices in late if place == position]
        return cls(emit(lowered, ops, late, prover), groups, len(lowered.gradients), prover)

    @property
    def source(self) -> str:
        """The functions as text."""
        return self.emitted.source

    @property
    def replayed(self) -> int:
        """Random operations that run more than once."""
        return self.emitted.replayed

    def prepare(self) -> None:
        """Do what must be done before a step is metered."""
        self.emitted.prepare()

    def forward(self, args: list[Any]) -> Any:
        """Outputs, saved primals and the token, from the list of primals, which is emptied."""
        return self.emitted.forward(args)

    def backward(self, args: list[Any]) -> tuple[torch.Tensor | None, ...]:
        """All gradients in the end, where no node of ours waits for them."""
        given: dict[int, torch.Tensor | None] = {}
        begin: Callable[..., Generator[None, None, None]] = self.emitted.backward
        for _ in begin(args, given):
            pass
        return tuple([given.get(index) for index in range(self.gradients)])


class Delivery:
    """One forward's backward in parts.

    Parameters
    ----------
    code
        What runs.
    device
        Of the model.
    marks
        Called when the backward begins, and when its last part has run.

    Attributes
    ----------
    withheld
        Primals whose gradients are ``None``, as outputs that they belong to got none.
    """

    def __init__(
        self,
        code: EarlyCode,
        device: torch.device,
        marks: tuple[Callable[[], object], Callable[[], object]] | None = None,
    ) -> None:
        self._code = code
        self._device = device
        self._marks = marks
        self._parts: Generator[None, None, None] | None = None
        self._given: dict[int, torch.Tensor | None] = {}
        self._next = 0
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        self.withheld: frozenset[int] = frozenset()

    def __call__(self, args: list[Any]) -> tuple[None, ...]:
        """Begin the backward; every gradient comes later."""
        self._given = {}
        self._next = 0
        if self._marks is not None:
            self._marks[0]()
        begin: Callable[..., Generator[None, None, None]] = self._code.emitted.backward
        self._parts = begin(args, self._given)
        next(self._parts)
        return (None,) * self._code.gradients

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
                    if self._marks is not None:
                        self._marks[1]()
        except RecomputationError:
            self._restore()
            self._forget()
            raise
        except BaseException:
            self._forget()
            raise
        if self._parts is None:
            self._before.clear()
        found = [(i, self._given.pop(i, None)) for i in self._code.groups[group]]
        return [None if i in self.withheld else gradient for i, gradient in found]

    @property
    def is_proved(self) -> bool:
        """Whether the backward may find that gradients were made from wrong values."""
        return self._code.prover is not None

    def remember(self, owners: Sequence[torch.Tensor]) -> None:
        """Note gradients that are about to be added to, outside of the device's memory.

        The backward holds no gradient back: in a step that is verified this is how they come back,
        unless all parts of a model are read at the end, which has copies of its own.
        """
        prover = self._code.prover
        copied = prover is not None and isinstance(prover.tally, PartsTally)
        if self._parts is not None and not copied:
            for owner in owners:
                found = owner.grad
                self._before.append((owner, found, None if found is None else host_copy(found)))

    def _restore(self) -> None:
        with torch.no_grad():
            for owner, gradient, copied in self._before:
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
                owner.grad = gradient

    def _forget(self) -> None:
        self._parts = None
        self._given = {}
        self._before.clear()


class _Deliver(Function):
    """Between what a captured call was given, of one group, and what it runs on."""

    @staticmethod
    def forward(
        ctx: Any, delivery: Delivery, group: int, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.delivery = delivery
        ctx.group = group
        ctx.owners = [tensor for tensor in given if delivery.is_proved and tensor.is_leaf]
        ctx.set_materialize_grads(False)
        # Captured calls look at types.
        return tuple(
            [
                nn.Parameter(tensor.detach()) if type(tensor) is nn.Parameter else tensor.detach()
                for tensor in given
            ]
        )

    @staticmethod
    def backward(ctx: Any, *others: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True cannot go through a captured graph: gradients "
                "of gradients need the plain model (chk.module)"
            )
        found = ctx.delivery.deliver(ctx.group)
        ctx.delivery.remember(ctx.owners)
        # A call may also return what it was given, which then has a gradient of its own.
        for k, other in enumerate(others):
            if other is not None:
                found[k] = other if found[k] is None else found[k] + other
        return None, None, *found


class EarlyStep:
    """Runs one captured call, and gives its gradients early.

    Parameters
    ----------
    code
        The program.
    owners
        Of the captured call.
    device
        Of the model.
    marks
        See `Delivery`.
    """

    def __init__(
        self,
        code: EarlyCode,
        owners: Owners,
        device: torch.device,
        marks: tuple[Callable[[], object], Callable[[], object]] | None = None,
    ) -> None:
        self.source = code.source
        self.replayed = code.replayed
        self.forward = code.forward
        self.backward = Delivery(code, device, marks)
        self._groups = code.groups
        self._owners = owners
        self._originals: dict[int, torch.Tensor] = {}

    def prepare(self) -> None:
        """Everything is ready."""

    def original(self, tensor: Any) -> Any:
        """What the call was given, from what it runs on while `around` lasts."""
        return self._originals.get(id(tensor), tensor)

    @contextmanager
    def around(self, slots: Sequence[_torch.Slot], arguments: Any) -> Iterator[Any]:
        """Have a module's parameters, and arguments, be what the call runs on.

        Parameters
        ----------
        slots
            The places of the module's parameters.
        arguments
            Of the call, nested; the context gives those to call it with.
        """
        leaves, spec = _torch.tree_flatten(arguments)
        changed: list[tuple[_torch.Slot, Any]] = []
        try:
            # Autograd runs what was made last first.
            for group in reversed(range(len(self._groups))):
                owners = [self._owners[index] for index in self._groups[group]]
                tensors = [
                    slots[owner.slots[0]][0][slots[owner.slots[0]][1]]
                    if owner.slots
                    else leaves[owner.leaves[0]]
                    for owner in owners
                ]
                given = _Deliver.apply(self.backward, group, *tensors)
                for owner, original, tensor in zip(owners, tensors, given, strict=True):
                    self._originals[id(tensor)] = original
                    for values, name in (slots[number] for number in owner.slots):
                        changed.append(((values, name), values[name]))
                        values[name] = tensor
                    for number in owner.leaves:
                        leaves[number] = tensor
            yield _torch.tree_unflatten(leaves, spec)
        finally:
            for (values, name), original in changed:
                values[name] = original
            self._originals.clear()
