"""Functions of PyTorch, and methods of its tensors, that somebody replaces in a process.

A capture runs PyTorch's functions once, on stand-ins of tensors: their code is not followed, and
guards say nothing of it. What was there is compared before each step. Code of others that took
their place is followed where captured code calls it as a method, and refused within PyTorch's own.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core
from rotor.errors import CaptureError

_MODULES: list[Any] = [
    torch, torch.nn.functional, torch.functional, torch._tensor, torch._C._nn, torch.linalg,
    torch.special, torch.fft,
]  # fmt: skip
NAMESPACES = tuple(map(vars, _MODULES))
_VALUES = methodcaller("values")
_HOME = os.path.dirname(torch.__file__) + os.sep
_ANSWERED = {
    "__len__", "__iter__", "size", "shape", "dim", "ndim", "ndimension", "numel", "nelement",
    "stride", "dtype", "device", "layout", "is_contiguous", "requires_grad", "grad", "data",
}  # fmt: skip
"""Attributes of tensors that dynamo answers, without a trace in its graphs."""
_KNOWN = frozenset(sys.stdlib_module_names - {"unittest"}) | {
    "torch", "rotor", "typing_extensions",
}  # fmt: skip


def is_code(value: Any) -> bool:
    """Return whether a value of a class or a module may run when it is used."""
    return callable(value) or hasattr(type(value), "__get__")


class TorchFunctions:
    """Functions that PyTorch has at construction."""

    def __init__(self) -> None:
        self._seen = list(map(list, map(_VALUES, NAMESPACES)))
        names = [[k for k, value in held.items() if is_code(value)] for held in NAMESPACES]
        self._reads = [itemgetter(*known) for known in names]
        self._functions = self._read()
        self.versions: tuple[int, ...] = ()
        """Versions of `NAMESPACES` in which they are known to be the same; empty if unknown."""

    def _read(self) -> list[Any]:
        return [read(held) for read, held in zip(self._reads, NAMESPACES, strict=True)]

    def are_same(self) -> bool:
        """Return whether none of them was replaced or deleted since."""
        versions = _core.versions(NAMESPACES) or ()
        now = list(map(list, map(_VALUES, NAMESPACES)))
        if now != self._seen:
            try:
                functions = self._read()
            except KeyError:
                return False
            for old, new in zip(chain(*self._functions), chain(*functions), strict=True):
                if new is not old and not _is_wrapped(new, old):
                    return False
            self._functions = functions
        self._seen, self.versions = now, versions  # Modules that are imported later add names.
        return True


def _function(value: Any) -> Any:
    """Return the function that a descriptor, or a partial one, calls."""
    while True:
        inner = getattr(value, "fget", None) or getattr(value, "__func__", None)
        if inner is None and isinstance(value, functools.partial):
            inner = value.func
        if inner is None:
            return value
        value = inner


def _is_of_others(value: Any) -> bool:
    """Return whether a value of PyTorch's is code that is not its own."""
    if isinstance(value, type | types.ModuleType) or not is_code(value):
        return False
    function = _function(value)
    if isinstance(function, types.FunctionType):
        file = function.__code__.co_filename
        package = str(function.__globals__.get("__name__")).partition(".")[0]
        return not file.startswith(_HOME) and package not in _KNOWN
    return type(function).__module__.partition(".")[0] not in {*_KNOWN, "builtins"}


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield the places in which PyTorch has code that is not its own: owners, names and values."""
    for owner in (*_MODULES, torch.Tensor, torch.nn.Parameter):
        for name, value in vars(owner).items():
            if _is_of_others(value):
                yield owner, name, value


def _is_wrapped(new: Any, old: Any) -> bool:
    """Return whether functions are one of PyTorch's, which its compiler has wrapped meanwhile."""
    if new == old:
        return True
    are_own = not (_is_of_others(new) or _is_of_others(old))
    return are_own and inspect.unwrap(new) is inspect.unwrap(old)


def _refusal(owner: Any, name: str, value: Any) -> CaptureError:
    kind = f"{owner.__name__}.{name}"
    return CaptureError(f"{kind} was replaced by {value!r}, which no graph follows")


def _refusing(owner: Any, name: str, value: Any) -> Any:
    """Return what stands in for code of others, and refuses calls from this thread."""
    thread = threading.get_ident()

    def refuse() -> None:
        if threading.get_ident() == thread:
            raise _refusal(owner, name, value)

    if isinstance(value, property):

        def reading(tensor: Any) -> Any:
            refuse()
            return value.__get__(tensor)

        return property(reading, value.fset, value.fdel)

    def calling(*args: Any, **kwargs: Any) -> Any:
        refuse()
        is_method = isinstance(owner, type) and hasattr(type(value), "__get__")
        # As found by a call on an instance, which is the first argument.
        called = value.__get__(args[0]) if is_method else value
        return called(*args[is_method:], **kwargs)

    return calling


@contextmanager
def replacements_refused() -> Iterator[None]:
    """Refuse captures in the context that run code in the place of PyTorch's, unfollowed."""
    with ExitStack() as entered:
        for owner, name, value in list(_replacements()):
            stand_in = {name: _refusing(owner, name, value)}
            entered.enter_context(core.replaced(owner, **stand_in))
        yield


def methods_followed() -> AbstractContextManager[None]:
    """Return a context in which captures follow methods of tensors that are not PyTorch's own.

    Raises CaptureError if one of those is among them that no capture asks for.
    """
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables import UserFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable

    for owner, name, value in _replacements():
        # PyTorch 2.14 answers for properties such as Tensor.T without reading them.
        is_answered = name in _ANSWERED or isinstance(value, property)
        if is_answered and isinstance(owner, type):
            raise _refusal(owner, name, value)
    call_method: Callable[..., Any] = TensorVariable.call_method

    def calling(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method = getattr(self.python_type(), name, None)
        if not isinstance(method, types.FunctionType) or not _is_of_others(method):
            return call_method(self, tx, name, args, kwargs)
        source = GlobalSource(tx.output.install_global_by_id(name, method))
        followed = UserFunctionVariable(method, source=source)
        return followed.call_function(tx, [self, *args], kwargs)

    return core.replaced(TensorVariable, call_method=calling)
