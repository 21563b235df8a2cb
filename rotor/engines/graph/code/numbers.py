"""Numbers among the arguments of a captured call that are inputs of its graph.

A graph has an operation for each step of the arithmetic that its code does with them. Here the
result of each step becomes an argument of the operations on tensors: the number of the captured
call, for which these are priced and proved, with the code that computes it anew in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from rotor._pytorch import symbols
from rotor.common.tensor_trees import result_tensors
from rotor.errors import CaptureError

_ITEM = torch.ops.aten._local_scalar_dense.default


class Written:
    """Number of a captured call that other calls compute."""

    target: Callable[..., Any] | str
    """Function that computes it, or the name of its variable."""
    operands: tuple[Any, ...]
    """Arguments of the function."""


class _Whole(Written, int):
    pass


class _Real(Written, float):
    pass


def _written(value: Any, target: Any, operands: tuple[Any, ...] = ()) -> Written:
    kinds: dict[type, Any] = {int: _Whole, float: _Real}
    if type(value) not in kinds:
        raise CaptureError(f"a number among the arguments becomes a {type(value).__name__}")
    made: Written = kinds[type(value)](value)
    made.target, made.operands = target, operands
    return made


def _plain(value: Any) -> Any:
    """Return a number without its code."""
    if isinstance(value, _Whole):
        return int(value)
    return float(value) if isinstance(value, _Real) else value


def write_numbers(module: fx.GraphModule) -> dict[str, str]:
    """Replace the nodes of numbers in a joint graph; return the code of each variable.

    Raise CaptureError if a size of a tensor, or a result, depends on one of the numbers.
    """
    known: dict[fx.Node, Any] = {}
    variables: dict[str, str] = {}
    primals: dict[fx.Node, int] = {}

    def add(node: fx.Node, primal: fx.Node, code: str) -> None:
        name = f"n{primals[primal]}"
        variables[name] = f"p{primals[primal]}{code}"
        known[node] = _written(symbols.hint_of(node.meta["val"]), name)

    for node in module.graph.nodes:
        value = node.meta.get("val")
        if any(map(symbols.has_symbols, result_tensors(value))):
            raise CaptureError("a number among the arguments is the size of a tensor")
        if node.op == "placeholder":
            if "tangent" not in node.name:
                primals[node] = len(primals)
            if symbols.is_symbol(value):
                add(node, node, "")
        elif node.op == "output":
            if any(given in known for given in node.all_input_nodes):
                raise CaptureError("a number among the arguments is a result")
        elif not symbols.is_symbol(value) or symbols.depends_on_data(value):
            node.args = map_arg(node.args, lambda given: known.get(given, given))
            node.kwargs = map_arg(node.kwargs, lambda given: known.get(given, given))
        elif node.target is _ITEM:
            add(node, node.args[0], ".item()")
        else:
            operands = map_arg(node.args, lambda given: known[given])
            known[node] = _written(node.target(*map(_plain, operands)), node.target, operands)
    for node in reversed(known):
        if node.op != "placeholder":
            module.graph.erase_node(node)
    return variables
