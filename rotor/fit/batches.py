"""Batches of any size made of one sample, and training steps that restore all they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.calls import sample_call
from rotor.common.tensor_trees import tree_tensors
from rotor.common.undisturbed import (
    copied_arguments,
    gradients_aside,
    trial,
    values_kept,
)
from rotor.engines.chain.stages import is_plain_sequential
from rotor.meter import allocator as memory

Batch = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]
"""Arguments, keyword arguments, targets."""


def batches_of(
    model: nn.Module, sample: Any, targets: tuple[Any, ...], has_loss: bool, engine: str
) -> Callable[[int], Batch]:
    """Return a function that makes the batch of a size; arguments as for `largest_batch`."""
    if callable(sample) and not isinstance(sample, torch.Tensor | nn.Module):
        if targets:
            raise ValueError("a callable gives the targets too: leave targets= out")
        return lambda size: _checked_batch(sample(size))
    if targets and not has_loss:
        raise ValueError("targets are for a loss: give loss_fn= too")
    is_one = is_plain_sequential(model) and engine != "graph"
    args, kwargs = sample_call(sample, is_one=is_one)
    leaves, spec = core.tree_flatten((args, kwargs, targets))
    shaped = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if not shaped or not shaped[0].shape[0]:
        raise ValueError(
            "the sample holds no tensor with a first dimension, expected one batch: a tensor, a "
            "tuple of arguments, or a dictionary of keyword arguments"
        )
    length = shaped[0].shape[0]

    def of_size(size: int) -> Batch:
        rows = torch.arange(size) % length

        def taken(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copied_arguments(leaf)
            if not leaf.dim() or leaf.shape[0] != length:
                return leaf
            chosen = leaf.detach().index_select(0, rows.to(leaf.device))
            return chosen.requires_grad_(leaf.requires_grad)

        found: Batch = core.tree_unflatten([taken(leaf) for leaf in leaves], spec)
        return found

    return of_size


def _checked_batch(found: Any) -> Batch:
    kinds = (tuple, dict, tuple)
    if (
        isinstance(found, tuple)
        and len(found) == len(kinds)
        and all(isinstance(part, kind) for part, kind in zip(found, kinds, strict=True))
    ):
        return found
    raise TypeError(
        f"the callable gave {type(found).__name__}, expected (args, kwargs, targets): a tuple, a "
        "dictionary and a tuple"
    )


def device_of(batch: Batch) -> torch.device:
    """Return the device of a batch; ValueError: it holds no tensor."""
    tensors = tree_tensors(core.tree_flatten(batch[:2])[0])
    if not tensors:
        raise ValueError("the batch holds no tensor, expected at least one")
    return tensors[0].device


def sum_of(output: Any) -> torch.Tensor:
    """Return the loss of an output that has one, else the sum of its tensors."""
    if isinstance(output, torch.Tensor):
        return output.sum()
    if isinstance(output, Mapping):
        if output.get("loss") is not None:
            return sum_of(output["loss"])
        output = tuple(output.values())
    parts = [
        sum_of(part) for part in output if isinstance(part, torch.Tensor | Mapping | tuple | list)
    ]
    parts = [part for part in parts if part.requires_grad]
    if not parts:
        raise ValueError("the output holds no tensor that needs a gradient: give loss_fn=")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@contextmanager
def unchanged(
    model: nn.Module,
    device: torch.device,
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Iterator[None]:
    """Let the model train on a device, without gradients at first; restore it at the end.

    `call` has the arguments of a forward, which shows the parameters that forwards write to, such
    as clamped ones: copies of these are kept. ``None``: none are.
    """
    with (
        trial(model, (), device, is_guarded=False),
        gradients_aside(model.parameters()),
        torch.enable_grad(),
    ):
        model.train()
        written = [] if call is None else _written(model, call, device)
        with values_kept([*model.buffers(), *written]):
            yield


def _written(
    model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device
) -> list[nn.Parameter]:
    """Return the parameters that a forward writes to."""
    before = [(parameter, parameter._version) for parameter in model.parameters()]
    with trial(model, call, device) as made, torch.no_grad():
        args, kwargs = made.arguments
        model(*args, **kwargs)
        return [parameter for parameter, version in before if parameter._version != version]


def step_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak of a step above the level at its start."""
    with memory.meter(device) as meter:
        step()
    return meter.peak_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that of an allocator without memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )
