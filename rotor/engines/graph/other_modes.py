"""Backwards of captured graphs in other modes than their forwards.

A graph has the casts of its forward. As in plain PyTorch, a backward within autocast rounds its own
results, and computes by the settings of PyTorch's backends at its time; operations of the forward
that it recomputes have the modes of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rotor._pytorch import devices, dispatch, modes
from rotor.common.generators import autocast_off

__all__ = ["OtherModes"]


class OtherModes:
    """Code of a program for backwards in other modes than their forward.

    `backward` is the code for the same modes; `emit` makes the code for others, and is called at
    most once. `token` is the position of the forward's token, which has its settings, among the
    inputs.
    """

    def __init__(
        self, backward: Callable[..., Any], emit: Callable[[OtherModes], Any], token: int
    ) -> None:
        self._backward, self._emit, self._token = backward, emit, token
        self._other: Callable[..., Any] | None = None
        self._flags: tuple[Any, ...] = ()

    def __call__(self, args: list[Any], *given: Any) -> Any:
        """Run the backward."""
        flags = args[self._token].flags
        if not modes.in_autocast() and flags == dispatch.backend_flags():
            return self._backward(args, *given)
        self._flags = flags
        if self._other is None:
            self._other = self._emit(self).backward
        return self._other(args, *given)

    def operation(self, operation: Any, node: fx.Node, *, is_backward: bool) -> Callable[..., Any]:
        """Return the operation of a node for a backward in other modes."""
        if is_backward:
            return lambda *args, **kwargs: _cast(operation(*args, **kwargs), node.meta["val"])
        device = devices.accelerator_in_use().type

        def call(*args: Any, **kwargs: Any) -> Any:
            present = dispatch.backend_flags()
            try:
                if present != self._flags:
                    dispatch.write_flags(self._flags)
                with autocast_off(device):
                    return operation(*args, **kwargs)
            finally:
                if present != self._flags:
                    dispatch.write_flags(present)

        return call


def _cast(made: Any, known: Any) -> Any:
    """Return results in the types of known ones."""
    if isinstance(made, torch.Tensor):
        return made.to(known.dtype)
    if isinstance(made, list | tuple):
        return [_cast(*both) for both in zip(made, known, strict=True)]
    return made
