"""Branches on tensors that depend on no input, taken while dynamo captures code.

Dynamo traces without values and refuses every branch on a tensor. The value of one that is made of
numbers alone, such as a comparison of positions, is the same in each call.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _python_dispatch

from rotor._pytorch import core

__all__ = ["constant_branches"]

core.check(("utils._python_dispatch._disable_current_modes",))

_JUMPS = [n for name, n in dis.opmap.items() if name.startswith("POP_JUMP") and "NONE" not in name]


class _Varies(Exception):
    """Signal that a value differs from call to call."""


class _Repeats(_python_dispatch.TorchDispatchMode):
    """Context in which operators whose results vary raise `_Varies`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        if torch.Tag.nondeterministic_seeded in operator.tags or "empty" in str(operator):
            raise _Varies
        return operator(*args, **(kwargs or {}))


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return the value of a node that depends on no input; raise `_Varies` if there is none."""
    if node not in known:
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda arg: _value(arg, known) if isinstance(arg, fx.Node) else arg,
        )
        if node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_function":
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            raise _Varies
    return known[node]


def _truth(node: fx.Node) -> bool | None:
    """Return the truth of a node's value; ``None`` if it depends on an input."""
    with _python_dispatch._disable_current_modes(), torch.no_grad(), _Repeats():
        try:
            return bool(_value(node, {}))
        except (_Varies, RuntimeError, TypeError):
            return None


@contextmanager
def constant_branches() -> Iterator[None]:
    """Have dynamo take branches on tensors that depend on no input."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import ConstantVariable, TensorVariable

    def taken(jump: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def run(tx: Any, instruction: Any) -> None:
            condition = tx.stack[-1]
            if isinstance(condition, TensorVariable):
                truth = _truth(condition.as_proxy().node)
                if truth is not None:
                    tx.stack[-1] = ConstantVariable.create(truth)
            jump(tx, instruction)

        return run

    kinds: list[Any] = [InstructionTranslatorBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kept = [(kind.dispatch_table, list(kind.dispatch_table)) for kind in kinds]
    for table, before in kept:
        for opcode in _JUMPS:
            table[opcode] = before[opcode] and taken(before[opcode])
    try:
        yield
    finally:
        for table, before in kept:
            table[:] = before
