"""Tensors that stand in for others, in the caller's own containers.

A call that writes to a dictionary, a list or an object of its caller's must be given this object,
not a copy: so tensors are exchanged within such containers, and exchanged back when the call ends.
Values that a call returns, or keeps in attributes, are recognised by their containers too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core

__all__ = ["exchanged", "substituted"]


@contextmanager
def substituted(
    value: Any, given: Mapping[int, torch.Tensor], slots: Sequence[core.Slot] = ()
) -> Iterator[Any]:
    """Give a value with tensors replaced in the context; tuples alone are copied.

    Tensors are found in tuples, lists, dictionaries and objects with attributes, and in `slots`.
    The substitutes in `given` are by ``id``.
    """
    found: dict[int, torch.Tensor] = {}
    try:
        _exchange_in(slots, given, found)
        yield exchanged(value, given, found) if given else value
    finally:
        if given:
            theirs = {id(given[key]): tensor for key, tensor in found.items() if key in given}
            exchanged(value, theirs)
            _exchange_in(slots, theirs, {})


def _exchange_in(
    slots: Sequence[core.Slot], given: Mapping[int, torch.Tensor], found: dict[int, torch.Tensor]
) -> None:
    for where, name in slots:
        if name in where:
            where[name] = exchanged(where[name], given, found)


def exchanged(
    value: Any, given: Mapping[int, torch.Tensor], found: dict[int, torch.Tensor] | None = None
) -> Any:
    """Return the value with tensors replaced as by `substituted`; tuples alone are copied.

    The tensors of the value are put into `found`, by ``id``.
    """
    return _exchanged(value, given, {} if found is None else found, set())


# A closure that calls itself would keep the tensors until the next garbage collection.
def _exchanged(
    item: Any, given: Mapping[int, torch.Tensor], found: dict[int, torch.Tensor], seen: set[int]
) -> Any:
    if isinstance(item, torch.Tensor):
        found[id(item)] = item
        return given.get(id(item), item)
    if id(item) in seen:
        return item
    if isinstance(item, dict | list | deque):
        seen.add(id(item))
        places: Any = item.items() if isinstance(item, dict) else enumerate(item)
        for key, part in list(places):
            new = _exchanged(part, given, found, seen)
            if new is not part:
                item[key] = new
    elif (parts := core.parts_of(item)) is not None:
        made = [_exchanged(part, given, found, seen) for part in parts[0]]
        changes = any(a is not b for a, b in zip(parts[0], made, strict=True))
        return core.tree_unflatten(made, parts[1]) if changes else item
    if isinstance(item, type | nn.Module) or callable(item):
        return item
    seen.add(id(item))
    for name in (*getattr(item, "__dict__", ()), *getattr(item, "__slots__", ())):
        part = getattr(item, name, None)
        new = _exchanged(part, given, found, seen)
        if new is not part:
            object.__setattr__(item, name, new)
    return item
