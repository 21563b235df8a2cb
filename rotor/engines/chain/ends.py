"""Ends of the graphs of stages that run apart from each other.

An input that requires gradients has a node before it, as in the plain model, where it has the graph
of earlier stages: a stage may ask. Large outputs are handed on by a node that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks

from rotor._pytorch import core
from rotor.common.tensor_trees import Flags, tree_tensors, with_tensors

_HANDOFF_BYTES = 16_384
"""Size below which outputs are kept through their backward: a handoff would cost more time."""


@cache
def token_of(device: torch.device) -> torch.Tensor:
    """Return a scalar that stands for values of a device without their memory."""
    return torch.zeros((), device=device)


@cache
def source_of(device: torch.device) -> torch.Tensor:
    """Return the leaf before the inputs of stages on a device; no gradient is kept in it."""
    return torch.zeros((), device=device, requires_grad=True)


class _Handoff(Function):
    """Root of a stage's graph: its backward returns the gradient and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, cell: list[Any], token: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.cell = cell
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.cell.pop()


class _Input(Function):
    """Node before an input, in the place of earlier stages: keeps the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (ctx.gradient,) = gradients
        return None, None


_apply_handoff = core.bare_apply(_Handoff)
_apply_input = core.bare_apply(_Input)


def root_of(
    outputs: list[torch.Tensor], token: torch.Tensor
) -> tuple[torch.Tensor, list[Any] | None]:
    """Return the root of a stage's graph, and its backward's cell of gradients, if it has one."""
    if len(outputs) == 1 and outputs[0].nbytes < _HANDOFF_BYTES:
        return outputs[0], None
    cell: list[Any] = []
    return _apply_handoff(cell, token, *outputs), cell


def leaf_flags(value: Any) -> Flags:
    """Return for each tensor of a value whether it is a leaf."""
    return tuple(tensor.is_leaf for tensor in tree_tensors(value))


def as_inputs(
    value: Any, flags: Flags, leaf: torch.Tensor, leaves: Flags | None = None
) -> tuple[Any, list[torch.Tensor]]:
    """Return a copy of a stage's input that shares storages, and those of its tensors with a flag
    set.

    The flags tell which tensors require gradients; each has a node before it that follows `leaf`,
    but for those that `leaves` names, which become leaves themselves (by default none).
    """
    tensors = tree_tensors(value)
    found = [
        tensor.detach()
        if not flag
        else tensor.detach().requires_grad_()
        if leaves is not None and leaves[k]
        else _apply_input(leaf, tensor.detach())
        for k, (tensor, flag) in enumerate(zip(tensors, flags, strict=True))
    ]
    wanted = [tensor for tensor, flag in zip(found, flags, strict=True) if flag]
    return found[0] if tensors and value is tensors[0] else with_tensors(value, found), wanted


def arrived_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that a backward through everything left at an input of `as_inputs`."""
    return tensor.grad if tensor.is_leaf else getattr(tensor.grad_fn, "gradient", None)


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing of a tensor that a graph saves."""


def _refuse(_: None) -> torch.Tensor:
    raise RuntimeError(
        "a stage of the chain computes gradients in its forward, and branches on whether they are "
        'enabled, so that it can only run where its graph is kept: use engine="dynamic"'
    )


keeping_nothing = partial(saved_tensors_hooks, _drop, _refuse)
"""Context in which graphs are recorded that keep no tensors."""


def peak_estimate(
    forward: Callable[[], Any], parameters: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> int:
    """Return roughly the bytes of a step without recomputation; the forward runs, and keeps none.

    They are those of the saved tensors other than the parameters and `others`, and the gradients
    that the backward has made by then; two of them, as large as a saved tensor, are in flight.
    """
    gradients = {
        core.storage_identity(p): p.nbytes if p.requires_grad and p.grad is None else 0
        for p in parameters
    }
    known = set(map(core.storage_identity, others))
    references: list[Any] = []
    saved: list[tuple[int, int]] = []
    kept = 0

    def keep(tensor: torch.Tensor) -> None:
        nonlocal kept
        for part in core.strided_parts(tensor):
            place = core.storage_identity(part)
            if place in gradients:
                saved.append((kept, gradients[place]))
            elif place not in known:
                known.add(place)
                references.append(core.storage_reference(part))
                kept += part.untyped_storage().nbytes()
                saved.append((kept + 2 * part.untyped_storage().nbytes(), 0))

    with saved_tensors_hooks(keep, _refuse), torch.enable_grad():
        forward()
    peak, grown = 0, 0
    for level, gradient in reversed(saved):
        grown += gradient
        peak = max(peak, level + grown)
    return peak
