"""Backwards of captured graphs under layouts and modes that the capture did not know.

PyTorch's formulas of derivatives make a gradient contiguous before some operators read it, and so
do most backwards that call operators of others. A capture leaves that out where the traced gradient
is contiguous. The real one may not be: it has the layout that the loss gives it.

A graph has the casts of its forward. As in plain PyTorch, a backward within autocast rounds its own
results, and computes by the settings of PyTorch's backends that it finds; what is recomputed of the
forward is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rotor._pytorch import captures, cudnn, devices, dispatch, symbols
from rotor._pytorch import traces as modes
from rotor.common.modes import autocast_off

_aten = torch.ops.aten
READERS: dict[Any, tuple[int, int | None]] = {
    _aten._cdist_backward.default: (0, None),
    _aten._weight_norm_interface_backward.default: (0, None),
    _aten.cudnn_batch_norm_backward.default: (1, 0),
    _aten.miopen_batch_norm_backward.default: (1, 0),
    _aten.native_group_norm_backward.default: (0, 1),
    cudnn.BACKWARD: (0, 1),
}
"""Position of the gradient, and of the argument whose memory format it needs, by operator."""

VIEWS = {_aten.as_strided.default, _aten.view_as_complex.default, _aten.view_as_real.default}
"""Views of a gradient that was made contiguous, or of any tensor in a forward."""

_READ_ANY_LAYOUT = ("aten", "prims", "rotor_capture", "rotor_cudnn", "rotor_looped", "rotor_script")
"""Namespaces of operators that read a tensor by its strides."""


def in_order(node: fx.Node, target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs a node, and makes gradients contiguous first where needed."""
    if node.target in READERS:
        position, like = READERS[node.target]
        return _ordered(target, [position], like)
    if (node.target in VIEWS and not _is_part(node)) or _is_of_others(node.target):
        found = [k for k, value in enumerate(node.args) if _is_contiguous(value)]
        return _ordered(target, found) if found else target
    return target


def _is_part(node: fx.Node) -> bool:
    """Return whether a node serves to read a real or imaginary part, of a tensor in any layout.

    The gradient of a complex view is made contiguous, and its parts may be read too.
    """
    return (
        node.target is _aten.view_as_real.default
        and [user.target for user in node.users] == [_aten.select.int]
        and all(n.target is not _aten.view_as_complex.default for n in node.graph.nodes)
    )


def _is_of_others(target: Any) -> bool:
    return getattr(target, "namespace", "aten") not in _READ_ANY_LAYOUT


def _is_contiguous(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    is_fixed = not any(map(symbols.is_symbol, (*value.shape, *value.stride())))
    return is_fixed and value.is_contiguous()


def _ordered(
    target: Callable[..., Any], positions: list[int], like: int | None = None
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given, memory_format = list(args), torch.contiguous_format
        if like is not None:
            memory_format = captures.memory_format_of(given[like])
        for position in positions:
            given[position] = given[position].contiguous(memory_format=memory_format)
        return target(*given, **kwargs)

    return run


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
