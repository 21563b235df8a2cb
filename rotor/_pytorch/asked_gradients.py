"""Gradients that the code of a forward asks for, of values that it has computed.

Captured graphs leave ``requires_grad_`` out: gradients of parameters do not depend on it. A graph
that returns such a value is refused: its gradients are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from rotor.errors import CaptureError

__all__ = ["check_outputs", "noted"]

_ASKED = "rotor_asked"


def _note(variable: Any) -> None:
    """Have a computed value require gradients in what dynamo knows of it, not in its graph."""
    node = variable.as_proxy().node
    node.meta["example_value"].requires_grad_()
    node.meta[_ASKED] = variable.requires_grad = True


def _may_be_noted(variable: Any) -> bool:
    from torch._dynamo.variables.tensor import TensorVariable

    # What the caller, or a module, has would require gradients after the call too.
    return (
        isinstance(variable, TensorVariable) and not variable.source and not variable.requires_grad
    )


@contextmanager
def noted() -> Iterator[None]:
    """Have dynamo note in the context which computed values are to require gradients."""
    from torch._dynamo.variables import builtin
    from torch._dynamo.variables.tensor import TensorVariable

    # The class and the name of its method differ between versions.
    owner = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
    name = "_call_setattr" if hasattr(owner, "_call_setattr") else "call_setattr"
    set_attribute, call_method = getattr(owner, name), TensorVariable.call_method
    kinds: Any = TensorVariable

    def is_true(value: Any) -> bool:
        return bool(value.is_python_constant() and value.as_python_constant() is True)

    def noting_set(self: Any, tx: Any, obj: Any, attribute: Any, value: Any) -> Any:
        is_asked = attribute.is_python_constant() and (
            attribute.as_python_constant() == "requires_grad"
        )
        if is_asked and is_true(value) and _may_be_noted(obj):
            _note(obj)
            return value
        return set_attribute(self, tx, obj, attribute, value)

    def noting_call(self: Any, tx: Any, method: str, args: Any, kwargs: Any) -> Any:
        asked = [*args, *kwargs.values()]
        if method == "requires_grad_" and all(map(is_true, asked)) and _may_be_noted(self):
            _note(self)
            return self
        return call_method(self, tx, method, args, kwargs)

    try:
        setattr(owner, name, noting_set)
        kinds.call_method = noting_call
        yield
    finally:
        setattr(owner, name, set_attribute)
        kinds.call_method = call_method


def _with_gradients(node: fx.Node) -> set[int]:
    """Return the ids of a node's values that require gradients."""
    values = _pytree.tree_leaves(node.meta.get("example_value"))
    return {id(v) for v in values if isinstance(v, torch.Tensor) and v.requires_grad}


def check_outputs(graph: fx.Graph) -> None:
    """Raise CaptureError if a graph returns a value that requires gradients as asked alone."""
    asked: set[int] = set()
    known: set[int] = set()
    for node in graph.nodes:
        values = _with_gradients(node)
        inputs = {value for given in node.all_input_nodes for value in _with_gradients(given)}
        if node.op == "output" and inputs & asked - known:
            raise CaptureError(
                "the forward has a value that it computed require gradients, and returns or keeps "
                "it, or what it computed of it alone: captured graphs have no gradients of it"
            )
        if _ASKED in node.meta:
            asked |= values
        elif node.op == "placeholder" or inputs & known:
            known |= values
        elif inputs & asked:
            asked |= values
