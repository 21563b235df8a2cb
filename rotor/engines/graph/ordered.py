"""Operators that read a gradient as if its elements were in order.

PyTorch's formulas of derivatives make the gradient contiguous before such an operator reads it, and
so do most backwards that call operators of other libraries. A capture leaves that out where the
traced gradient is contiguous. The real gradient may not be: the loss decides on its layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rotor._pytorch import captures, cudnn, symbols

__all__ = ["READERS", "VIEWS", "in_order"]

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
    if node.target in VIEWS or _is_of_others(node.target):
        found = [k for k, value in enumerate(node.args) if _is_contiguous(value)]
        return _ordered(target, found) if found else target
    return target


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
