"""Values that pass between stages: a tensor, or tensors in nested tuples, lists, dictionaries.

Numbers, strings and ``None`` may be among the tensors; they are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core

Flags = tuple[bool, ...]

_CONTAINERS = frozenset((tuple, list, dict))


def tree_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, in order; plain containers are walked without pytrees."""
    if isinstance(value, torch.Tensor):
        return [value]
    kind = type(value)
    if kind in _CONTAINERS:
        found = []
        for part in value.values() if kind is dict else value:
            if isinstance(part, torch.Tensor):
                found.append(part)
            elif part is not None and (type(part) not in _CONTAINERS or part):
                found += tree_tensors(part)
        return found
    if value is None or isinstance(value, int | float | str):
        return []
    return [leaf for leaf in core.tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def result_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's results, in order; pytrees are left alone."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in result_tensors(item)]
    return []


def output_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, also in dataclasses, mappings and plain objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            waiting.extend(_inside(item))
    return found[::-1]


def device_of(value: Any, model: nn.Module) -> torch.device:
    """Return the device of the first tensor in arguments, also in objects, or else in the model."""
    tensors = tree_tensors(value) or output_tensors(value)
    first = tensors[0] if tensors else next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _inside(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if item is None or callable(item) or isinstance(item, str | bytes | int | float | complex):
        return []
    slots = [getattr(item, name, None) for name in getattr(item, "__slots__", ())]
    return [*getattr(item, "__dict__", {}).values(), *slots]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with `function` applied to each tensor, in order; containers are new."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None:
        return None
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(part, function) for part in value])
    if kind is dict:
        return {key: map_tensors(part, function) for key, part in value.items()}
    leaves, spec = core.tree_flatten(value)
    return core.tree_unflatten(
        [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )


def detached(value: Any) -> Any:
    """Return the value with its tensors cut from the graph; storages are shared."""
    return map_tensors(value, torch.Tensor.detach)


def with_tensors(value: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return the value with its tensors replaced, in order."""
    following = iter(tensors)
    return map_tensors(value, lambda _: next(following))


def flagged(value: Any, flags: Flags) -> list[torch.Tensor]:
    """Return the flagged tensors of a value."""
    if isinstance(value, torch.Tensor):
        return [value] if flags[0] else []
    return [t for t, flag in zip(tree_tensors(value), flags, strict=True) if flag]


def grad_flags(value: Any) -> Flags:
    """Return for each tensor of a value whether it requires gradients."""
    return tuple(tensor.requires_grad for tensor in tree_tensors(value))


def differentiable(value: Any) -> Flags:
    """Return for each tensor of a value whether it could require gradients."""
    return tuple(t.is_floating_point() or t.is_complex() for t in tree_tensors(value))


def versions(value: Any) -> tuple[int, ...]:
    """Return the version counters of a value's tensors, which change when one is written to."""
    if isinstance(value, torch.Tensor):
        return (value._version,)
    return tuple(tensor._version for tensor in tree_tensors(value))


def check_output(name: str, value: Any) -> None:
    """Raise TypeError, with the stage's name, if the output of a stage cannot be passed on."""
    if isinstance(value, torch.Tensor):
        return
    leaves = core.tree_flatten(value)[0]
    wrong = [
        leaf
        for leaf in leaves
        if not isinstance(leaf, torch.Tensor | torch.Size | int | float | complex | str | None)
    ]
    if wrong or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        found = type(wrong[0] if wrong else value).__name__
        raise TypeError(
            f"stage {name} returned {found}, expected a tensor or a tuple, list or dict with "
            "tensors: return the tensors that the next stage needs"
        )
