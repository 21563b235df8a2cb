"""Batches of any size made of one sample, and training steps that restore all they change."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, dispatch
from rotor.common.calls import sample_call
from rotor.common.tensor_trees import tree_tensors
from rotor.common.undisturbed import copied_arguments, gradients_aside, trial, values_kept
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
        sized = [
            resized(leaf, 0, length, size)
            if isinstance(leaf, torch.Tensor)
            else copied_arguments(leaf)
            for leaf in leaves
        ]
        found: Batch = core.tree_unflatten(sized, spec)
        return found

    return of_size


def resized(leaf: torch.Tensor, dimension: int, length: int, size: int) -> torch.Tensor:
    """Return a tensor cut, or repeated, to a size along a dimension if it is of that length."""
    if leaf.dim() <= dimension or leaf.shape[dimension] != length:
        return leaf
    places = (torch.arange(size) % length).to(leaf.device)
    return leaf.detach().index_select(dimension, places).requires_grad_(leaf.requires_grad)


def _checked_batch(found: Any) -> Batch:
    match found:
        case (tuple(), dict(), tuple()) if isinstance(found, tuple):
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
    return functools.reduce(operator.add, parts)


def check_counts(**counts: Any) -> None:
    """Raise ValueError if an argument is no whole number of 1 or more."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}, expected a whole number of 1 or more")


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
    # All processes measure the plain model.
    with trial(model, call, device, peers=dispatch.every_rank()) as made, torch.no_grad():
        args, kwargs = made.arguments
        model(*args, **kwargs)
        return [parameter for parameter, version in before if parameter._version != version]


def training_step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return a step that runs the backward of a loss, and drops the gradients of a model."""
    parameters = list(model.parameters())

    def step() -> None:
        loss().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


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
