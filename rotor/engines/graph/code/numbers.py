"""Numbers of a captured call that are inputs of its graph: of its arguments and of the model.

A graph has an operation for each step of the arithmetic that its code does with them. Here the
result of each step becomes an argument of the operations on tensors: the number of the captured
call, for which these are priced and proved, with the code that computes it anew in every call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from rotor._pytorch import symbols
from rotor.common.frames import release
from rotor.common.tensor_trees import result_tensors
from rotor.errors import CaptureError

_ATTRIBUTE = re.compile(r"L\['module'\][\w.\[\]'\"]+")
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

    Raise CaptureError if a size of a tensor depends on one of the numbers.
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
        elif node.op == "output" or not symbols.is_symbol(value) or symbols.depends_on_data(value):
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


def numbers_of(module: nn.Module | None, names: Iterable[str]) -> dict[str, Any]:
    """Return those of dynamo's expressions that are numbers of a model, and their values."""
    found = {}
    for name in filter(_ATTRIBUTE.fullmatch, names):
        with suppress(Exception):
            value = eval(name, {"L": {"module": module}})
            if type(value) in (int, float):
                found[name] = value
    return found


Found = TypeVar("Found")


class ModelNumbers:
    """Attributes of a model, such as counters, that captures take as inputs once they change."""

    def __init__(self) -> None:
        self.inputs: frozenset[str] = frozenset()
        """Dynamo's expressions of them."""
        self._constants: frozenset[str] = frozenset()

    def refuse(self) -> None:
        """Take none of the present ones any more: a call cannot be captured with them."""
        self._constants |= self.inputs
        self.inputs = frozenset()

    def captured(
        self,
        known: Mapping[str, Any],
        module: nn.Module,
        capture: Callable[[frozenset[str]], Found],
    ) -> Found | None:
        """Return a capture with those that have changed since the one before as inputs too.

        `known` are the values there, and ``capture(expressions)`` makes one. Returns ``None`` if
        none has changed, or if the code permits no such inputs.
        """
        now = numbers_of(module, known)
        changed = {name for name in now if now[name] != known[name]}
        changed -= self.inputs | self._constants
        if not (changed and symbols.takes_numbers()):
            return None
        try:
            found = capture(self.inputs | changed)
        except CaptureError as error:
            release(error)
            self._constants |= changed
            return None
        self.inputs |= changed
        return found
