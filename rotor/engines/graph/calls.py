"""Calls of a wrapped model: checks of their arguments, and their keys."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn

from rotor.common.tensor_trees import device_of
from rotor.common.undisturbed import (
    Trial,
    generators_kept,
    random_states,
    random_states_kept,
)

logger = logging.getLogger("rotor")

__all__ = ["check_arguments", "run_once", "takes_targets"]


def takes_targets(module: nn.Module) -> bool:
    """Return whether a model's own forward has an argument called ``targets``."""
    parameters = inspect.signature(module.forward).parameters
    return "targets" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def check_arguments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise if the model cannot be called with these arguments, or is on several devices."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{type(module).__name__} cannot be called with this sample: {error}; give a tuple of "
            "its positional arguments, or a dictionary of keyword arguments"
        ) from None
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the model is on several devices ({', '.join(sorted(map(str, devices)))}), and one "
            "limit is for one device: wrap the parts, one on each device"
        )


def run_once(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    """Have a model prepare itself as in its first forward; return whether one completed.

    The forward runs twice without gradients, which fails for a forward that computes some itself.
    Changes that the second run does not make again stay; all others are undone. A model that draws
    random numbers to prepare itself has to do so in a step.
    """
    device = device_of((args, kwargs), module)
    runs: list[Trial] = []
    ends: list[list[bytes]] = []
    try:
        for _ in range(2):
            runs.append(Trial(module, (args, kwargs), device))
            given, named = runs[-1].arguments
            draws = random_states_kept(device), generators_kept(module.modules())
            with runs[-1].guarded(), torch.no_grad(), draws[0], draws[1]:
                module.forward(*given, **named)
                ends.append(random_states(module.modules(), device))
    except Exception as error:
        logger.info("a forward without gradients failed: %s", error)
    if len(ends) < 2 or ends[0] != ends[1]:
        for run in reversed(runs):
            run.end()
        return False
    first, again = runs
    first.end(again)
    return True
