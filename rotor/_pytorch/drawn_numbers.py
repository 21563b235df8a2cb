"""Numbers of Python's and NumPy's that are tensors without dimensions in a captured graph.

Dynamo makes such tensors of numbers that a forward draws, of NumPy's scalars, and of results of
NumPy's functions. Types of results depend on them as on tensors: beside a tensor without
dimensions, a number of Python's would count for less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rotor.errors import CaptureError

__all__ = ["check_numbers"]

_OF_PYTHON = torch.float64, torch.int64, torch.bool


def check_numbers(graph: fx.Graph) -> None:
    """Raise CaptureError if an operation gives other types, or bits, than with such numbers."""
    from torch._dynamo import utils

    numpys = (
        utils.numpy_to_tensor_wrapper,
        utils.numpy_method_wrapper,
        utils.numpy_operator_wrapper,
    )
    numbers: dict[fx.Node, torch.Tensor] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        is_scalar = isinstance(value, torch.Tensor) and not value.ndim
        if is_scalar and (_is_input(node) or isinstance(node.target, numpys)):
            numbers[node] = value
            continue
        given = [numbers[one] for one in node.all_input_nodes if one in numbers]
        is_symbol = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        if not given or node.op == "output" or is_symbol or isinstance(node.target, numpys):
            continue
        others = [n.meta.get("example_value") for n in node.all_input_nodes if n not in numbers]
        tensors = [one for one in others if isinstance(one, torch.Tensor)]
        is_alone = not tensors
        if is_alone and is_scalar and value.dtype in (*_OF_PYTHON, *(n.dtype for n in given)):
            numbers[node] = value
            continue
        holds_code = isinstance(node.target, torch._ops.HigherOrderOperator)
        weighs = any(_weighs(number, other) for number in given for other in tensors)
        if is_alone or holds_code or weighs:
            raise CaptureError(
                "the forward draws a number, or has one of NumPy's, for "
                f"{node.target}, which gives another type, or other bits, with a tensor in its "
                "place, as captured graphs have one"
            )


def _is_input(node: fx.Node) -> bool:
    """Return whether a node is an input that is no tensor of the caller's."""
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    return argument is not None and bool(argument.pass_arg_as_tensor)


def _weighs(number: torch.Tensor, other: Any) -> bool:
    """Return whether a tensor in the place of a number changes the type of an operation."""
    like = torch.empty([1] * other.ndim, dtype=other.dtype, device="meta")
    alone = torch.empty([], dtype=number.dtype, device="meta")
    python = 1.0 if number.dtype.is_floating_point else 1
    return torch.result_type(like, alone) != torch.result_type(like, python)
