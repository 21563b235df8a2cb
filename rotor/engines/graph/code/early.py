"""Early gradients: they leave the backward of a program as soon as they are computed.

A captured call is one node of autograd, which returns all gradients at the end of its backward. A
consumer of single gradients, such as DistributedDataParallel, which sends some while others are
computed, then waits for all; and gradients to be added to existing ones all exist before the first
addition. So the call runs on other tensors in the memory of the parameters, and between these and
the parameters are nodes of ours, one for each group of parameters: the backward of the call begins
the program and returns at once, and each node runs the program up to the gradients of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from rotor._pytorch import core
from rotor.common.substitutes import exchanged, substituted
from rotor.engines.graph.code.actions import Kind, actions_of, deaths
from rotor.engines.graph.code.emit import Emitted, emit
from rotor.engines.graph.code.offloading import Layout
from rotor.engines.graph.code.pricing import Pooling
from rotor.engines.graph.code.proving import Prover
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.engines.proofs import PutBack, gradients_before
from rotor.errors import RecomputationError
from rotor.tier.state import AwayState

_MOST_GROUPS = 32

Mark = Callable[[], object]
Marks = tuple[Mark, Mark]
"""Functions that are called when a backward begins, and when it ends."""


@dataclass(frozen=True)
class Owner:
    """Origin of a primal of a captured call."""

    slots: tuple[int, ...] = ()
    """Parameters of the module, by their numbers in `slots_of`."""
    leaves: tuple[int, ...] = ()
    """Arguments of the call, by their numbers in the flattened arguments."""


Owners = dict[int, Owner]
"""Origin of each primal that gets a gradient."""


def slots_of(module: nn.Module) -> list[core.Slot]:
    """Return the slots of a module's parameters, repeated for shared ones."""
    return [slot for part in module.modules() for slot in core.parameter_slots(part)]


def owners_of(
    lowered: Lowered,
    primals: Sequence[Any],
    slots: Sequence[core.Slot],
    arguments: Any = (),
) -> Owners | None:
    """Return the origins of the primals that get gradients, among parameters and `arguments`.

    None if another tensor needs a gradient too, if an argument that is changed does, or if the call
    itself reads gradients.
    """
    if lowered.reads_gradients:
        return None
    numbers: dict[int, list[int]] = {}
    for number, slot in enumerate(slots):
        numbers.setdefault(id(core.value_in(slot)), []).append(number)
    leaves: dict[int, list[int]] = {}
    for number, leaf in enumerate(core.tree_flatten(arguments)[0]):
        if type(leaf) in (torch.Tensor, nn.Parameter):
            leaves.setdefault(id(leaf), []).append(number)
    found: Owners = {}
    for index, gradient in enumerate(lowered.gradients):
        if gradient is None:
            continue
        number = lowered.primal_of(index)
        primal = primals[number]
        owner = Owner(
            tuple(numbers.get(id(primal), ())) if type(primal) is nn.Parameter else (),
            tuple(leaves.get(id(primal), ())),
        )
        is_known = owner.slots or owner.leaves
        if not is_known or lowered.primals[number] in lowered.mutated:
            return None
        found[index] = owner
    return found


def sharing(lowered: Lowered, indices: Collection[int]) -> list[tuple[set[int], list[int]]]:
    """Return gradients grouped by shared memory: the storages and gradients of each group."""
    together: list[tuple[set[int], list[int]]] = []
    for index in indices:
        storages = set(lowered.values[lowered.gradients[index]].storages)
        joined = [group for group in together if group[0] & storages]
        together = [group for group in together if not group[0] & storages]
        together.append(
            (
                storages.union(*(group[0] for group in joined)),
                [*(i for group in joined for i in group[1]), index],
            )
        )
    return together


def delivery_groups(
    lowered: Lowered, numbers: Sequence[int], indices: Collection[int] | None = None
) -> list[tuple[int, list[int]]]:
    """Return groups of gradients that leave a program together, and the moments when they can.

    For each group, the position of the last run that it needs, and its primals, of those in
    `indices`. Gradients that share memory leave together, after the program's last read of it.
    """
    if indices is None:
        indices = [i for i, gradient in enumerate(lowered.gradients) if gradient is not None]
    boundary = list(numbers).index(lowered.loss)
    actions = actions_of(lowered, numbers)
    kept, _ = deaths(lowered, actions)
    last = {}
    for position in range(boundary, len(actions)):
        last.update(dict.fromkeys((*actions[position].reads, *kept[position]), position))
    timed = [
        (max((last.get(s, boundary) for s in storages), default=boundary), group, storages)
        for storages, group in sharing(lowered, indices)
    ]
    return [(position, group) for position, group, _ in gathered(lowered, timed, _MOST_GROUPS)]


def gathered(
    lowered: Lowered, timed: Iterable[tuple[int, Collection[int], Collection[int]]], most: int
) -> list[tuple[int, list[int], list[int]]]:
    """Return groups of gradients that leave together, in order: moments, gradients and storages.

    Those of `timed` are joined until they have 1 / `most` of the bytes of all of them.
    """
    ordered = sorted((place, sorted(group), sorted(lying_on)) for place, group, lying_on in timed)
    sizes = [size for size, _ in lowered.storages]
    total = sum(sizes[s] for *_, lying_on in ordered for s in lying_on)
    found: list[tuple[int, list[int], list[int]]] = []
    indices: list[int] = []
    storages: list[int] = []
    for k, (place, group, lying_on) in enumerate(ordered):
        indices, storages = [*indices, *group], [*storages, *lying_on]
        is_last = k + 1 == len(ordered)
        waits = not is_last and ordered[k + 1][0] == place
        if is_last or (not waits and sum(sizes[s] for s in storages) * most >= total):
            found.append((place, indices, storages))
            indices, storages = [], []
    return found


Parts = Callable[[list[Any], dict[int, torch.Tensor | None]], Generator[None, None, None]]
"""Backward that stops at once, and where it has put a group of gradients into the dictionary."""


@dataclass(frozen=True, kw_only=True)
class EarlyCode(Emitted):
    """Code of a program whose backward stops at each group of gradients.

    Its `backward` is for a call without nodes of ours: all gradients come at the end.
    """

    parts: Parts
    groups: list[list[int]]
    """Primals whose gradients are complete at each stop."""
    gradients: list[list[int]]
    """For each primal the numbers of its gradient's terms."""
    prover: Prover | None = None
    """Prover that may raise after gradients have left."""

    @classmethod
    def _made(
        cls,
        emitted: Emitted,
        parts: Parts,
        groups: list[list[int]],
        lowered: Lowered,
        prover: Prover | None = None,
    ) -> EarlyCode:
        terms = _terms(lowered)
        known = vars(emitted) | {"backward": partial(_at_the_end, parts, terms)}
        return cls(**known, parts=parts, groups=groups, gradients=terms, prover=prover)

    @classmethod
    def in_order(cls, code: Emitted, lowered: Lowered, numbers: Sequence[int]) -> EarlyCode:
        """Return a program's code, with gradients that leave at its end as they were made."""
        groups = [group for _, group in delivery_groups(lowered, numbers)]

        def parts(args: list[Any], given: dict[int, torch.Tensor | None]) -> Any:
            yield
            given.update(enumerate(code.backward(args)))
            for _ in groups:
                yield

        return cls._made(code, parts, groups, lowered)

    @classmethod
    def of(
        cls,
        lowered: Lowered,
        numbers: Sequence[int],
        *,
        spread: bool = False,
        prover: Prover | None = None,
        layout: Layout | None = None,
        pooling: Pooling | None = None,
    ) -> EarlyCode:
        """Return the code of a program.

        With `spread`, new gradients leave early too; by default they leave last.
        """
        numbers = [int(number) for number in numbers]
        actions = actions_of(lowered, numbers)
        handed = {i for task in lowered.tasks for i in task.gradients}
        rest = [i for i, g in enumerate(lowered.gradients) if g is not None and i not in handed]
        if spread:
            late = delivery_groups(lowered, numbers, rest)
        else:
            late = [(len(numbers) - 1, rest)] if rest else []
        groups: list[list[int]] = []
        for position in range(numbers.index(lowered.loss), len(numbers)):
            kind, number = actions[position][:2]
            over = lowered.tasks[number].gradients if kind is Kind.RUN else ()
            groups += [list(over)] if over else []
            groups += [indices for place, indices in late if place == position]
        emitted = emit(lowered, numbers, late, prover, layout, pooling)
        parts: Any = emitted.backward
        return cls._made(emitted, parts, groups, lowered, prover)


def _at_the_end(
    parts: Parts, gradients: Sequence[Sequence[int]], args: list[Any]
) -> tuple[torch.Tensor | None, ...]:
    """Return all gradients, the sums of their terms."""
    given: dict[int, torch.Tensor | None] = {}
    for _ in parts(args, given):
        pass
    found: list[torch.Tensor | None] = []
    for terms in gradients:
        known = [part for part in map(given.get, terms) if part is not None]
        found.append(reduce(torch.add, known) if known else None)
    return tuple(found)


def _terms(lowered: Lowered) -> list[list[int]]:
    """Return the numbers of the terms of each primal's gradient."""
    terms: list[list[int]] = [[] for _ in lowered.primals]
    for index in range(len(lowered.gradients)):
        terms[lowered.primal_of(index)].append(index)
    return terms


class Delivery:
    """Backward of one forward, in parts; `marks` run before the first and after the last part."""

    def __init__(
        self,
        code: EarlyCode,
        marks: Marks | None = None,
        expect: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self._code = code
        self._marks = marks
        self._expect = expect
        self._parts: Generator[None, None, None] | None = None
        self._given: dict[int, torch.Tensor | None] = {}
        self._next = 0
        self._undo: list[PutBack] = []
        self.withheld: frozenset[int] = frozenset()
        """Primals whose gradients are None, because their outputs got none."""

    def __call__(self, args: list[Any]) -> tuple[None, ...]:
        """Begin the backward; every gradient comes later."""
        self._given = {}
        self._next = 0
        if self._marks is not None:
            self._marks[0]()
        self._parts = self._code.parts(args, self._given)
        next(self._parts)
        return (None,) * len(self._code.gradients)

    def deliver(self, group: int) -> list[torch.Tensor | None]:
        """Run the backward up to the gradients of a group; return them, once."""
        try:
            while self._next <= group and self._parts is not None:
                next(self._parts)
                self._next += 1
            if self._next == len(self._code.groups) and self._parts is not None:
                self._parts.close()
                self._parts = None
                if self._marks is not None:
                    self._marks[1]()
        except RecomputationError:
            with torch.no_grad():
                for put_back in self._undo:
                    put_back()
            self.forget()
            raise
        except BaseException:
            self.forget()
            raise
        if self._parts is None:
            self._undo.clear()
        found = [(i, self._given.pop(i, None)) for i in self._code.groups[group]]
        return [None if i in self.withheld else gradient for i, gradient in found]

    @property
    def is_proved(self) -> bool:
        """True if the backward may find that gradients were made from wrong values."""
        return self._code.prover is not None

    @property
    def has_use_of_owners(self) -> bool:
        """True if `remember` needs the owners of gradients."""
        return self.is_proved or self._expect is not None

    def remember(self, owners: Sequence[torch.Tensor]) -> None:
        """Copy gradients that are about to be added to, to memory outside of the device.

        A verified step does not wait with its gradients: if it fails, it restores the copies, but
        for those that its proof has.
        """
        if self._expect is not None:
            # After the last gradients nothing of this call waits until they have left.
            self._expect(() if self._parts is None else owners)
        prover = self._code.prover
        if self._parts is not None and prover is not None and not prover.step.has_state:
            self._undo.append(gradients_before(owners))

    def forget(self) -> None:
        """Drop gradients that are not delivered."""
        self._parts = None
        self._given = {}
        self._undo.clear()


class _Deliver(Function):
    """Node between the arguments of a captured call, of one group, and the tensors it runs on."""

    @staticmethod
    def forward(
        ctx: Any,
        delivery: Delivery,
        group: int,
        forms: Sequence[torch.Tensor],
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.delivery = delivery
        ctx.group = group
        ctx.owners = [tensor for tensor in given if delivery.has_use_of_owners and tensor.is_leaf]
        ctx.set_materialize_grads(False)
        # Captured calls check that the types of tensors are as in the capture.
        return tuple(
            [
                nn.Parameter(tensor.detach()) if type(tensor) is nn.Parameter else tensor.detach()
                for tensor in forms
            ]
        )

    @staticmethod
    def backward(ctx: Any, *others: torch.Tensor | None) -> Any:
        found = ctx.delivery.deliver(ctx.group)
        ctx.delivery.remember(ctx.owners)
        # A call may also return one of its arguments, which then has a gradient of its own.
        for k, other in enumerate(others):
            if other is not None:
                found[k] = other if found[k] is None else found[k] + other
        return None, None, None, *found


class EarlyStep:
    """Runner of one captured call that delivers its gradients early; `marks` as in `Delivery`.

    `state` has the parameters for which tensors without bytes stand in the call, if they do.
    """

    def __init__(
        self,
        code: EarlyCode,
        owners: Owners,
        marks: Marks | None = None,
        state: AwayState | None = None,
    ) -> None:
        self.forward = code.forward
        self.backward = Delivery(code, marks, None if state is None else state.expect)
        self._state = state
        self._groups = code.groups
        self._owners = owners
        self._originals: dict[int, torch.Tensor] = {}
        self._substitutes: list[torch.Tensor] = []

    def original(self, tensor: Any) -> Any:
        """Return the argument of the call for a tensor on which it runs, within `around`."""
        return self._originals.get(id(tensor), tensor)

    def returned(self, output: Any) -> Any:
        """Return the result of the call, within `around`, with arguments as the caller has them."""
        return exchanged(output, self._originals)

    @contextmanager
    def around(self, slots: Sequence[core.Slot], arguments: Any) -> Iterator[Any]:
        """Replace a module's parameters, and arguments, by the tensors on which the call runs.

        The context gives the arguments to call it with.
        """
        leaves = core.tree_flatten(arguments)[0]
        substitutes: dict[int, torch.Tensor] = {}
        changed: list[tuple[core.Slot, Any]] = []
        try:
            # Autograd runs the latest node first.
            for group in reversed(range(len(self._groups))):
                owners = [self._owners[index] for index in self._groups[group]]
                tensors = [
                    slots[owner.slots[0]][0][slots[owner.slots[0]][1]]
                    if owner.slots
                    else leaves[owner.leaves[0]]
                    for owner in owners
                ]
                # Tensors without bytes stand for parameters, whose gradients these are.
                state = self._state
                roots = tensors if state is None else map(state.parameter_of, tensors)
                given = _Deliver.apply(self.backward, group, tensors, *roots)
                # Some stand for the same argument, and no call holds all: ids must stay theirs.
                self._substitutes += given
                for owner, original, tensor in zip(owners, tensors, given, strict=True):
                    self._originals[id(tensor)] = original
                    for values, name in (slots[number] for number in owner.slots):
                        changed.append(((values, name), values[name]))
                        values[name] = tensor
                    if owner.leaves:
                        substitutes[id(original)] = tensor
            with substituted(arguments, substitutes) as replaced:
                yield replaced
        finally:
            for (values, name), original in changed:
                values[name] = original
            self._originals.clear()
            self._substitutes.clear()
