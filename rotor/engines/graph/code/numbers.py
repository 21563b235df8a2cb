"""Numbers that captured code reads: those of arguments and of the model may be inputs of a graph.

A graph has an operation for each step of the arithmetic that its code does with them. Here the
result of each step becomes an argument of the operations on tensors: the number of the captured
call, for which these are priced and proved, with the code that computes it anew in every call.

What the code of a backward reads when it runs, in custom functions and hooks, is a constant of the
graph: it must be as it was in the forward.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from rotor._pytorch import core, symbols
from rotor.common.frames import release
from rotor.common.places import MISSING, is_same, is_scalar
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


class LateReads:
    """The values in a forward, which runs a function with these arguments, a module first.

    `expressions` are dynamo's, with their code. Other arguments live as long as this if one of
    these is within them.
    """

    def __init__(
        self,
        expressions: Mapping[str, CodeType],
        function: Callable[..., Any],
        arguments: Sequence[Any],
    ) -> None:
        self._expressions, self._globals = expressions, function.__globals__
        names = function.__code__.co_varnames
        self._first = names[0]
        named = zip(names[1:], arguments[1:], strict=False)
        text = " ".join(expressions)
        self._others = {name: value for name, value in named if f"L['{name}']" in text}
        self._module = weakref.ref(arguments[0])
        self._values = self._now()

    def _now(self) -> list[Any]:
        local = {**self._others, self._first: self._module()}
        scope = {"G": self._globals, "L": local}
        return [_known(code, scope) for code in self._expressions.values()]

    def changed(self) -> str:
        """Return the place of a value that has changed since; empty if none has."""
        pairs = zip(self._expressions, self._values, self._now(), strict=True)
        found = next((name for name, before, now in pairs if not is_same(before, now)), "")
        return core.module_path(found).removeprefix("G.")

    def check(self) -> None:
        """Raise RuntimeError if one has changed."""
        if name := self.changed():
            raise RuntimeError(
                f"{name} has changed since the forward, and a backward or a hook of the model "
                'reads it: change it after the backward, or use engine="dynamic"'
            )


def _known(code: CodeType, scope: dict[str, Any]) -> Any:
    """Return what tells whether a value is still the same one; its parts are read apart."""
    try:
        value = eval(code, scope)
    except Exception:
        return MISSING
    if isinstance(value, torch.Tensor):
        return value, None if value.is_inference() else value._version
    if isinstance(value, dict | list | tuple | set | deque):
        return type(value), len(value)
    return value if is_scalar(value) else type(value)
