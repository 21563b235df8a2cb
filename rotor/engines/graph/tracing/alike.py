"""Modules of a model that look alike, and a watch on them while a capture of one stands for all."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import nn

from rotor._pytorch import core
from rotor._pytorch.region_guards import layout_check
from rotor._pytorch.scripts import StandIn

Slot = tuple[dict[str, Any], str]
"""Dictionary that holds a tensor, and its key there."""

_FEWEST = 4
_PLAIN = (torch.Tensor, nn.Parameter)
_PLAIN_OR_NONE = {*_PLAIN, type(None)}
_CONTAINERS = (list, dict, set)
_values_of = methodcaller("values")


def own_slots(module: nn.Module) -> dict[int, Slot]:
    """Return the slots of a module's parameters and buffers, by the identities of the tensors."""
    found: dict[int, Slot] = {}
    for part in module.modules():
        for slots, name in (*core.parameter_slots(part), *core.buffer_slots(part)):
            found.setdefault(id(slots[name]), (slots, name))
    return found


class Alike(NamedTuple):
    """Modules of which several of one class stand side by side."""

    modules: list[nn.Module]
    """None has a tensor that is shared with another module, or lies in the memory of one."""
    obstacles: list[str]
    """Reasons why other modules with a twin are not among `modules`."""


def alike_modules(model: nn.Module) -> Alike:
    """Return the modules of a model of which several of one class and form stand side by side."""
    seen: Counter[Any] = Counter()
    for part in model.modules():
        for slots, name in (*core.parameter_slots(part), *core.buffer_slots(part)):
            tensor = slots[name]
            is_plain = type(tensor) in _PLAIN and tensor.layout == torch.strided
            seen[core.storage_identity(tensor) if is_plain else None] += 1
    found: list[nn.Module] = []
    obstacles: dict[str, None] = {}
    for part in model.modules():
        if any(part is one for one in found):
            continue
        children: dict[type, list[nn.Module]] = {}
        for _, child in core.child_modules(part):
            children.setdefault(type(child), []).append(child)
        for alike in children.values():
            if len(alike) < _FEWEST or len({*map(id, alike)}) < len(alike):
                continue
            forms = Counter(map(_form, alike))
            for child in alike:
                # A child without a twin is searched for alike modules within it.
                if next(child.children(), None) is not None and forms[_form(child)] > 1:
                    obstacle = _obstacle(child, seen)
                    if obstacle:
                        obstacles[obstacle] = None
                    else:
                        found.append(child)
    return Alike(found, list(obstacles))


def _form(module: nn.Module) -> Any:
    """Return the classes of a module's parts, and the shapes of its parameters."""
    return (
        tuple([(name, type(part)) for name, part in module.named_modules()]),
        tuple([(name, parameter.shape) for name, parameter in module.named_parameters()]),
    )


def _obstacle(module: nn.Module, seen: Counter[Any]) -> str:
    """Return the reason why no other module's trace can stand for a module; empty if none."""
    for part in module.modules():
        if isinstance(part, StandIn):
            return "a script is run whole"
        if core.updates_statistics(part):
            return f"{type(part).__name__} updates its statistics"
        for slots, name in (*core.parameter_slots(part), *core.buffer_slots(part)):
            tensor = slots[name]
            if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
                return f"{name} is a {type(tensor).__name__}"
            if seen[core.storage_identity(tensor)] > 1:
                return f"{name} is shared with another module"
    return ""


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.device, tensor.stride()


class Watch:
    """Check, before each step, that modules are as they were when another one was traced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._slots: list[Slot] = []
        self._layouts: list[tuple[Any, ...]] = []
        self._have_layouts: Callable[[Sequence[Any]], bool] = lambda tensors: False
        self._empty: list[Any] = []
        self._held: list[dict[str, Any]] = []
        self._values: list[tuple[Any, ...]] = []
        self._tensors: list[dict[str, Any]] = []
        self._classes: list[tuple[type, ...]] = []
        self._containers: list[tuple[Any, tuple[int, ...]]] = []

    def begin(self, slots: Sequence[Slot], modules: Iterable[nn.Module]) -> None:
        """Note the state of modules, and the slots of the tensors that a step takes from them."""
        self._slots = list(slots)
        taken = [held[name] for held, name in slots]
        self._layouts = list(map(_layout, taken))
        self._have_layouts = layout_check(taken)
        kept = self._held, self._values, self._tensors, self._classes, self._containers
        for noted in (*kept, self._empty):
            noted.clear()
        model = self._model()
        assert model is not None
        chosen = {id(part) for module in modules for part in module.modules()}
        for part in model.modules():
            if any(id(child) in chosen for child in part.children()):
                self._note_values(core.child_slots(part))
            if id(part) in chosen:
                self._note(part)

    def _note_values(self, held: dict[str, Any]) -> None:
        self._held.append(held)
        self._values.append(tuple(held.values()))

    def _note(self, part: nn.Module) -> None:
        self._note_values(vars(part))
        for value in vars(part).values():
            is_container = type(value) in _CONTAINERS or isinstance(value, dict)
            if not is_container or value is core.child_slots(part):
                continue
            if not value:
                self._empty.append(value)
            elif isinstance(value, dict) and _PLAIN_OR_NONE.issuperset(map(type, value.values())):
                # A tensor of the same layout may take another's place.
                self._tensors.append(value)
                self._classes.append(tuple(map(type, value.values())))
            else:
                self._containers.append((value, _identities(value)))

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the modules belong to a model."""
        return self._model() is model

    def tensors(self, others: Sequence[Any]) -> list[Any] | None:
        """Return the tensors that a step takes from the modules; None if something has changed.

        They must differ from one another, and from `others`, the step's other inputs.
        """
        try:
            if list(map(tuple, map(_values_of, self._held))) != self._values:
                return None
        except (RuntimeError, TypeError, ValueError):
            # Values that cannot be compared count as changed.
            return None
        found = [held.get(name) for held, name in self._slots]
        if not self._have_layouts(found) and any(
            not isinstance(tensor, torch.Tensor) or _layout(tensor) != layout
            for tensor, layout in zip(found, self._layouts, strict=True)
        ):
            return None
        if any(self._empty):
            return None
        if [tuple(map(type, held.values())) for held in self._tensors] != self._classes:
            return None
        if any(_identities(value) != known for value, known in self._containers):
            return None
        count = len(found) + len(others)
        return found if len({*map(id, found), *map(id, others)}) == count else None


def _identities(value: Any) -> tuple[int, ...]:
    if isinstance(value, dict):
        # A tensor of the same layout may take another's place.
        return tuple(0 if isinstance(item, torch.Tensor) else id(item) for item in value.values())
    return tuple(map(id, value))
