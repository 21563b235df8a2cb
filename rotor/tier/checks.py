"""Checks of a model and its optimizer before homes in a second tier change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from rotor._pytorch import core, pointers
from rotor._pytorch.optimizers import parameters_of
from rotor.tier.homes import AwayTensor
from rotor.tier.updates import LEAST_BYTES
from rotor.units import exact_bytes

UPDATES = ("device", "host")
"""Accepted values of ``update=``: where an optimizer computes."""


def check_optimizers(parameters: Sequence[nn.Parameter], optimizers: Sequence[Any]) -> None:
    """Raise ValueError or TypeError if one does not suit, or all lack trained parameters."""
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    held = {id(p) for one in optimizers for p in parameters_of(one)}
    missing = [p for p in parameters if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(parameters)} parameters of the model, "
            f"{exact_bytes(sum(p.nbytes for p in missing))}, are trained and in no group of the "
            "optimizer: give offload_state= the optimizer of all of them, or a list of several, or "
            "freeze them"
        )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"offload_state must be an optimizer of torch.optim, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS computes with all parameters at once, and offload_state= updates one after the "
            "other: use another optimizer, or leave offload_state out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("offload_state= has no differentiable updates: leave differentiable out")


def goes_away(parameter: torch.Tensor) -> bool:
    """Return whether a parameter gets a home."""
    return parameter.nbytes >= LEAST_BYTES and type(parameter) is nn.Parameter


def check_model(module: nn.Module, update: str | None) -> None:
    """Raise ValueError if the parameters of a model cannot have homes."""
    parameters = list(module.parameters())
    if update is not None and update not in UPDATES:
        raise ValueError(f"unknown update {update!r}, expected one of {', '.join(UPDATES)}")
    if any(hasattr(p, "device_mesh") for p in parameters):
        raise ValueError(
            "the parameters are distributed tensors, of which each process holds a part: "
            "offload_state= is for a model of one process; FSDP2's CPUOffloadPolicy moves parts"
        )
    if any(isinstance(p, AwayTensor) for p in parameters):
        raise ValueError("the parameters of the model are in a second tier already")
    places = {p.device for p in parameters}
    if len(places) > 1:
        raise ValueError(
            f"the parameters are on several devices, {', '.join(sorted(map(str, places)))}: "
            "offload_state= is for a model on one"
        )
    _check_memory(module)
    with pointers.no_references(module):
        for name, parameter in module.named_parameters():
            if (goes_away(parameter) or parameter.is_meta) and pointers.is_held(parameter):
                raise ValueError(
                    f"parameter {name} cannot lose its bytes, for what was made of it, or a weak "
                    "reference to it, is still held, such as a loss, a view, or the weight of the "
                    "old torch.nn.utils.weight_norm (parametrizations has a new one): drop it, "
                    "and wrap again"
                )


def _check_memory(module: nn.Module) -> None:
    """Raise ValueError if a parameter that gets a home shares memory with another tensor."""
    named = [*module.named_parameters(), *module.named_buffers()]
    for prefix, part in module.named_modules():
        own = [(name, value) for name, value in vars(part).items() if type(value) is torch.Tensor]
        named += [(f"{prefix}.{name}" if prefix else name, value) for name, value in own]
    spans = sorted(
        (*pointers.span(tensor), name, goes_away(tensor))
        for name, whole in named
        for tensor in core.strided_parts(whole)
        if tensor.numel()
    )
    for k, (place, _, end, name, is_moved) in enumerate(spans):
        for other in spans[k + 1 :]:
            if other[:2] >= (place, end):
                break
            if (is_moved or other[4]) and name != other[3]:
                raise ValueError(
                    f"{name} and {other[3]} share memory, and each would have values of its own in "
                    "the second tier: make both one parameter (module.a = module.b), or one of "
                    "them a clone"
                )
