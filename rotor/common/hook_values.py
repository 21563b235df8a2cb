"""Values that forward hooks keep outside a module: in closures, defaults, objects and globals."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from rotor._pytorch import core
from rotor.common.places import ClosureCell, Contents, Entry, Place

__all__ = ["global_names", "hook_places"]

_OUTER = ("_GLOBAL", "_GLOBALS", "_NAME")
"""Ends of the names of instructions that use an outer name."""


def hook_places(modules: Iterable[nn.Module]) -> Iterator[Place]:
    """Yield places outside of the modules to which their forward hooks may write tensors."""
    seen: set[int] = set()
    for module in modules:
        for hook in core.forward_hooks(module):
            yield from _of_function(hook, seen)


def _of_function(hook: Any, seen: set[int]) -> Iterator[Place]:
    if id(hook) in seen:
        return
    seen.add(id(hook))
    if isinstance(hook, functools.partial):
        yield from _of_function(hook.func, seen)
        for value in (*hook.args, *hook.keywords.values()):
            yield from _of_value(value, seen)
    elif isinstance(hook, types.MethodType):
        yield from _of_value(hook.__self__, seen)
        yield from _of_function(hook.__func__, seen)
    elif isinstance(hook, types.FunctionType):
        for cell in hook.__closure__ or ():
            place = ClosureCell("a variable of a hook", cell)
            yield place
            yield from _of_value(place.get(), seen)
        for value in (*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()):
            yield from _of_value(value, seen)
        for name in global_names(hook.__code__) & hook.__globals__.keys():
            yield Entry(name, hook.__globals__, name)
            yield from _of_value(hook.__globals__[name], seen)
    else:
        yield from _of_value(hook, seen)


def _of_value(value: Any, seen: set[int]) -> Iterator[Place]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key in list(value):
            yield Entry("an entry of a hook", value, key)
            yield from _of_value(value.get(key), seen)
    elif isinstance(value, list):
        yield Contents("a list of a hook", value)
    elif not isinstance(value, nn.Module | type | types.ModuleType) and not callable(value):
        held = getattr(value, "__dict__", None)
        for key in list(held or ()):
            yield Entry("an attribute of a hook", held, key)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the outer names that a function, and the functions within it, use."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    # Names of attributes are among `co_names` too.
    own = frozenset(i.argval for i in dis.get_instructions(code) if i.opname.endswith(_OUTER))
    return own.union(*(global_names(part) for part in inner))
