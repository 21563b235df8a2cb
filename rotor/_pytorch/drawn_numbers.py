"""Numbers of Python's that are tensors without dimensions in a captured graph.

Dynamo makes such inputs of numbers that a forward draws. They promote types as tensors do: beside a
tensor without dimensions, a number of Python's has less weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rotor.errors import CaptureError

__all__ = ["check_numbers"]

_OF_PYTHON = torch.float64, torch.int64, torch.bool


def check_numbers(graph: fx.Graph) -> None:
    """Raise CaptureError if an operation gives other types, or bits, than with Python's numbers."""
    numbers = {node: node.meta["example_value"] for node in graph.nodes if _is_number(node)}
    if not numbers:
        return
    for node in graph.nodes:
        given = [one for one in node.all_input_nodes if one in numbers]
        if not given or node.op == "output":
            continue
        value = node.meta.get("example_value")
        others = [one.meta.get("example_value") for one in node.all_input_nodes]
        tensors = [one for one in others if isinstance(one, torch.Tensor)]
        if len(tensors) == len(others) == len(given) and _is_of_python(value):
            numbers[node] = value
            continue
        holds_code = isinstance(node.target, torch._ops.HigherOrderOperator)
        weighs = any(_weighs(numbers[one], other) for one in given for other in tensors)
        if len(tensors) == len(given) or holds_code or weighs:
            raise CaptureError(
                f"the forward draws a number for {node.target}, which gives another type, or other "
                "bits, with a tensor in its place, as captured graphs have one"
            )


def _is_number(node: fx.Node) -> bool:
    """Return whether a node is an input that is a number of Python's."""
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    return argument is not None and argument.pass_arg_as_tensor and not argument.is_tensor


def _is_of_python(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.ndim and value.dtype in _OF_PYTHON


def _weighs(number: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor in the place of a number changes the type of an operation."""
    like = torch.empty([1] * other.ndim, dtype=other.dtype, device="meta")
    alone = torch.empty([], dtype=number.dtype, device="meta")
    python = 1.0 if number.dtype == torch.float64 else 1
    return torch.result_type(like, alone) != torch.result_type(like, python)
