"""Replacement of objects wherever Python refers to them."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Container, Mapping, Sequence
from types import CellType, FrameType
from typing import Any

__all__ = ["replace_references"]


def replace_references(
    found: Sequence[Any], given: Mapping[int, Any], skipped: Container[int]
) -> None:
    """Replace objects in containers, attributes, variables of closures and globals.

    This looks at all objects that the garbage collector knows, other than containers whose ``id``
    is in `skipped`. Local variables of frames that run, and memory of extensions, keep what they
    refer to. `given` holds the substitutes of the objects in `found`, by ``id``.
    """
    # What is frozen is not found; freezing again would keep garbage that was made since.
    gc.unfreeze()
    while found:
        made: dict[int, Any] = {}
        holders = []
        for holder in gc.get_referrers(*found):
            if holder is found or id(holder) in skipped or isinstance(holder, FrameType):
                continue
            if isinstance(holder, tuple | frozenset):
                made[id(holder)] = _copy(holder, given)
                holders.append(holder)
            else:
                _replace_in(holder, given)
        found, given = holders, made


def _copy(holder: Any, given: Mapping[int, Any]) -> Any:
    items = [given.get(id(item), item) for item in holder]
    base = tuple if isinstance(holder, tuple) else frozenset
    return base.__new__(type(holder), items)


def _replace_in(holder: Any, given: Mapping[int, Any]) -> None:
    if isinstance(holder, dict):
        for key in [key for key, item in holder.items() if id(item) in given]:
            _set_item(holder, key, given[id(holder[key])])
    elif isinstance(holder, list | deque):
        for k, item in enumerate(holder):
            if id(item) in given:
                holder[k] = given[id(item)]
    elif isinstance(holder, set):
        for item in [item for item in holder if id(item) in given]:
            holder.remove(item)
            holder.add(given[id(item)])
    elif isinstance(holder, CellType):
        holder.cell_contents = given[id(holder.cell_contents)]
    elif not isinstance(holder, type):
        if hasattr(holder, "__dict__"):
            _replace_in(vars(holder), given)
        for name in _slots(type(holder)):
            item = getattr(holder, name, None)
            if id(item) in given:
                object.__setattr__(holder, name, given[id(item)])


def _set_item(holder: dict[Any, Any], key: Any, value: Any) -> None:
    # PyTorch and Python know attributes of a class by more than its dictionary.
    owners = gc.get_referrers(holder) if "__module__" in holder else []
    for owner in owners:
        if isinstance(owner, type) and vars(owner).get(key) is holder[key]:
            setattr(owner, key, value)
            return
    holder[key] = value


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found.extend([slots] if isinstance(slots, str) else slots)
    return found
