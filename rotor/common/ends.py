"""Ends of a forward: arguments apart from what they were made of, results joined to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from rotor._pytorch import backwards, core
from rotor.common.substitutes import exchanged
from rotor.common.tensor_trees import output_tensors, tree_tensors, with_tensors

__all__ = ["apart_of", "join", "with_views"]


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
    steps = zip(view.size(), view.stride(), strict=True)
    end = view.storage_offset() + sum((size - 1) * stride for size, stride in steps) + 1
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(base)
    return is_dense and first <= view.storage_offset() and end <= last
