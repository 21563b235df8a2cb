"""Values that the code of a backward reads when it runs: of custom functions, and of hooks.

In a captured graph they are constants, those of its forward.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from rotor._pytorch import core
from rotor.common.places import MISSING, is_same, is_scalar


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
