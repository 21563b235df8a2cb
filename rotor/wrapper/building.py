"""Construction of the graph of one training step from a module and sample arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.calls import targets_of
from rotor.engines.contract import Call, Settings
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.pricing import build_graph
from rotor.engines.graph.costs.estimate import Machine
from rotor.engines.graph.costs.recorded import MEASURED, Profile, Source
from rotor.graph.graph import Graph
from rotor.wrapper.driver import Driver
from rotor.wrapper.transparent import TransparentModule


def build(
    model: nn.Module,
    *args: Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    **kwargs: Any,
) -> Graph:
    """Return the graph of a module's training step: forward, loss and backward, with costs.

    The module is captured in training mode and its operations are measured one by one; the module
    is left unchanged. Without a loss function the loss is one operation that takes no time and the
    bytes that `Checkpointable` reserves for an unknown loss.

    Parameters
    ----------
    model
        Any module.
    *args, **kwargs
        Samples of its arguments, at least one of them a tensor.
    loss_fn
        ``loss_fn(output, *targets)``: the loss's own operations become part of the graph.
    targets
        Samples of the loss function's arguments after the output.
    profile
        A `Machine`, from whose speeds the costs are estimated, or a `Profile` that was recorded
        elsewhere: nothing is run, and the module and its samples may be meta tensors. Any other
        value of this name is an argument of the module. By default operations are measured here.

    Returns
    -------
    Graph
        Sizes in bytes as the allocator rounds them, times in nanoseconds, modules by their paths.

    Raises
    ------
    CaptureError
        No single graph of the module exists; the message has the reason and the line of code.
    ValueError
        No argument holds a tensor, nothing needs a gradient, or the devices differ; targets
        without a loss function, or the reverse.
    TypeError
        The model is no module.
    """
    source: Source = MEASURED
    if isinstance(kwargs.get("profile"), Machine | Profile):
        source = kwargs.pop("profile")
    step = capture_step(model, args, kwargs, loss_fn=loss_fn, targets=targets, profile=source)
    return step_graph(step)


def capture_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    profile: Source = MEASURED,
) -> CapturedStep:
    """Return a captured and priced training step of a module, from the arguments of `build`."""
    has_targets = not isinstance(targets, tuple | list) or len(targets) > 0
    if has_targets != (loss_fn is not None):
        raise ValueError(
            "give a loss function and its targets together, or neither; an argument of the model "
            "that is named so goes by its position"
        )
    model = getattr(model, "module", model) if isinstance(model, TransparentModule) else model
    mode: Any = nullcontext()
    given = (args, kwargs, targets)
    tensors = core.tree_flatten(given)[0]
    if isinstance(model, nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    if any(isinstance(t, torch.Tensor) and t.device.type == "meta" for t in tensors):
        if profile == MEASURED:
            raise ValueError(
                "operations on meta tensors cannot be measured: give profile=, a Machine or a "
                "Profile"
            )
        mode, model, (args, kwargs, targets) = _without_values(model, given)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    driver = Driver(Settings(model, engine="graph", loss_fn=loss_fn, profile=profile))
    asked = targets_of(targets) if has_targets else None
    with mode:
        step: CapturedStep = driver.measure(Call(args, kwargs, asked))
    return step


def capture_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CapturedStep, list[Any]]:
    """Capture and measure a training step; return it with its input tensors."""
    driver = Driver(Settings(model, engine="graph"))
    primals: list[Any] = []
    vars(driver.engines[0])["primals"] = primals
    step: CapturedStep = driver.measure(Call(args, kwargs))
    return step, primals


def _without_values(module: nn.Module, given: Any) -> tuple[Any, nn.Module, Any]:
    """Return a mode, and a module and its arguments to use in it, without the values of meta
    tensors.

    Fake tensors that behave as tensors of a CPU take the place of meta tensors, since autograd does
    not know every operation on those.
    """
    mode = core.fake_mode()
    memo: dict[int, Any] = {}

    def like(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
            return tensor
        if id(tensor) not in memo:
            with mode:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    leaves, spec = core.tree_flatten(given)
    given = core.tree_unflatten([like(leaf) for leaf in leaves], spec)
    for tensor in (*module.parameters(), *module.buffers()):
        like(tensor)
    return mode, copy.deepcopy(module, memo), given


def step_graph(step: CapturedStep) -> Graph:
    """Return the graph of a captured step, with the assumed loss of a step not seen yet."""
    return build_graph(step.lowered, step.costs, step.loss_workspace(0, None))
