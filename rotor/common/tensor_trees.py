"""Values that pass between stages: a tensor, or tensors in nested tuples, lists, dictionaries.

Numbers, strings and ``None`` may be among the tensors; they are passed on unchanged. The end of a
forward takes arguments apart from what they were made of, and joins results to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from rotor._pytorch import backwards, core
from rotor.common.substitutes import exchanged

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


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first one of a tensor to its last one."""
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return 0 if 0 in shape else sum(steps, 1)


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


class NotPassedOn(TypeError):
    """Output of a stage that no chain can pass on."""


def check_output(name: str, value: Any) -> None:
    """Raise NotPassedOn, with the stage's name, if the output of a stage cannot be passed on."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.jagged:
            raise NotPassedOn(
                f"stage {name} returned a jagged tensor, whose sizes are known only in a step: "
                'give the model a padded tensor, or use engine="dynamic"'
            )
        return
    leaves = core.tree_flatten(value)[0]
    wrong = [
        leaf
        for leaf in leaves
        if not isinstance(leaf, torch.Tensor | torch.Size | int | float | complex | str | None)
    ]
    if wrong or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        found = type(wrong[0] if wrong else value).__name__
        raise NotPassedOn(
            f"stage {name} returned {found}, expected a tensor or a tuple, list or dict with "
            "tensors: return the tensors that the next stage needs"
        )


class _Joined(Function):
    """Node between a tensor of the caller's and the same value in a newer graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, newer: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *gradients


def join(tensor: torch.Tensor | None, newer: torch.Tensor) -> None:
    """Have what is computed of a tensor from now on be differentiated through a newer graph."""
    if tensor is None or tensor._version or not newer.requires_grad:
        return
    with backwards.version_kept(tensor), backwards.hooks_moved(tensor, newer):
        _Joined.apply(tensor, newer)


class _Bridge(Function):
    """Node before an argument, which passes gradients on once the dictionary is empty."""

    @staticmethod
    def forward(ctx: Any, apart: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        ctx.apart = apart
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *(gradients if not ctx.apart else [None])


def apart_of(value: Any, apart: dict[int, torch.Tensor], is_differentiable: bool) -> Any:
    """Return arguments cut from what they were computed of, for that may be other arguments.

    If gradients are to be differentiated, each is connected to it by a node of its own.
    """
    tensors = tree_tensors(value)
    asked = {id(t): t for t in tensors if t.requires_grad and not isinstance(t, nn.Parameter)}
    for k, tensor in asked.items():
        if not is_differentiable:
            leaf = tensor.detach().requires_grad_()
            apart[k] = leaf if tensor.is_leaf else leaf.view_as(leaf)
        elif len(asked) > 1 or not tensor.is_leaf:
            apart[k] = _Bridge.apply(apart, tensor)
    return with_tensors(value, [apart.get(id(tensor), tensor) for tensor in tensors])


def with_views(output: Any) -> Any:
    """Return a result in whose graph tensors that share memory are views of the largest.

    As plain results of a node they would be unrelated: a write to one of them would change the
    values of others, but not their gradients.
    """
    found = [t for t in output_tensors(output) if t.grad_fn is not None]
    if len(found) < 2:
        return output
    bases: dict[Any, torch.Tensor] = {}
    views: dict[int, torch.Tensor] = {}
    for tensor in sorted(found, key=torch.Tensor.numel, reverse=True):
        if tensor.layout == torch.strided:
            place = core.storage_identity(tensor), tensor.dtype
            base = bases.setdefault(place, tensor)
            if not backwards.are_related(base, tensor) and _covers(base, tensor):
                geometry = tensor.size(), tensor.stride(), tensor.storage_offset()
                views[id(tensor)] = base.as_strided(*geometry)
    return exchanged(output, views) if views else output


def _covers(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether the elements of a view are among those of a dense tensor."""
    first, last = base.storage_offset(), base.storage_offset() + base.numel()
    end = view.storage_offset() + extent_of(view.size(), view.stride())
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(base)
    return is_dense and first <= view.storage_offset() and end <= last
