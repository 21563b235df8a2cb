"""Ends of a forward that runs again: apart from what they were made of, joined to the results."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from rotor._pytorch import backwards
from rotor.common.tensor_trees import tree_tensors, with_tensors

__all__ = ["apart_of", "join"]


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
    """Return arguments without what they were computed of, which other arguments may be.

    Those that are to be differentiated lead on to it, each by a node of its own.
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
