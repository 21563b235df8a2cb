"""Backwards of captured graphs within autocast.

A graph has the casts of its forward. As in plain PyTorch, a backward within autocast rounds its own
results; what is recomputed of the forward is as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rotor._pytorch import devices, modes
from rotor.common.generators import autocast_off

__all__ = ["in_either_mode", "within_autocast"]


def in_either_mode(backward: Callable[..., Any], emit: Callable[[], Any]) -> Callable[..., Any]:
    """Return a backward that runs other code within autocast.

    Parameters
    ----------
    backward
        Code for the backward outside of it.
    emit
        Function that emits the program for one within it; it is called once, if at all.
    """
    other = functools.cache(lambda: emit().backward)

    def run(*args: Any) -> Any:
        return (other() if modes.in_autocast() else backward)(*args)

    return run


def within_autocast(operation: Any, node: fx.Node, *, is_backward: bool) -> Callable[..., Any]:
    """Return the operation of a node for a backward within autocast."""
    if is_backward:
        return lambda *args, **kwargs: _cast(operation(*args, **kwargs), node.meta["val"])
    device = devices.accelerator_in_use().type

    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast_off(device):
            return operation(*args, **kwargs)

    return call


def _cast(made: Any, known: Any) -> Any:
    """Return results in the types of known ones."""
    if isinstance(made, torch.Tensor):
        return made.to(known.dtype)
    if isinstance(made, list | tuple):
        return [_cast(*both) for both in zip(made, known, strict=True)]
    return made
