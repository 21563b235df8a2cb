"""Stand-ins: for tensors in the caller's containers, for forwards, for objects.

A call that writes to a dictionary, a list or an object of its caller's must be given this object,
not a copy: so tensors are exchanged within such containers, and exchanged back when the call ends.
Values that a call returns, or keeps in attributes, are recognised by their containers too.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FrameType
from typing import Any, Self

import torch
from torch import nn

from rotor._pytorch import core


class PatchedForwards:
    """Context, entered once, in which modules run a replacement of their forward.

    `make` returns the replacement for a module and its forward; no module may come twice. The
    forward of a module with a ``compile()`` of its own is compiled, and its replacement is not.
    """

    def __init__(
        self, modules: Iterable[nn.Module], make: Callable[[nn.Module, Any], Callable[..., Any]]
    ) -> None:
        self._own = [_Own(module) for module in modules]
        self._new = {id(o.module): (o, make(o.module, o.callable())) for o in self._own}

    def __enter__(self) -> Self:
        for own, replacement in self._new.values():
            own.replace(replacement)
        return self

    def __exit__(self, *_: object) -> None:
        for own in self._own:
            own.restore()
        # The replacements would keep what refers to this context, such as a meter.
        self._new.clear()

    @contextmanager
    def paused(self, module: nn.Module | None = None) -> Iterator[None]:
        """Restore the forward of one of the modules, or of all, in the context."""
        patched = list(self._new.values()) if module is None else [self._new[id(module)]]
        for own, _ in patched:
            own.restore()
        try:
            yield
        finally:
            for own, replacement in patched:
                own.replace(replacement)


class _Own:
    """Forward of a module as it was, and the call that ``compile()`` has made of it, if any."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._forward = module.__dict__.get("forward")
        self._compiled = module.__dict__.get(core.COMPILED)

    def callable(self) -> Any:
        """Return the forward; where it is compiled, without the hooks that are compiled with it."""
        compiled, slots = self._compiled, self.module.__dict__
        if compiled is None:
            return self.module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            replaced = slots.get("forward")
            hooks = {name: slots[name] for name in core.HOOKS}
            _set_forward(self.module, self._forward)
            slots.update({name: {} for name in hooks})
            try:
                return compiled(*args, **kwargs)
            finally:
                slots.update(hooks)
                _set_forward(self.module, replaced)

        return run

    def replace(self, replacement: Any) -> None:
        """Set another forward, which runs as it is."""
        _set_forward(self.module, replacement)
        if self._compiled is not None:
            self.module.__dict__[core.COMPILED] = None

    def restore(self) -> None:
        """Set what was there."""
        _set_forward(self.module, self._forward)
        if self._compiled is not None:
            self.module.__dict__[core.COMPILED] = self._compiled


def _set_forward(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


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
        for name in slot_names(type(holder)):
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


def slot_names(kind: type) -> list[str]:
    """Return the names in ``__slots__`` of a class and its bases."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found.extend([slots] if isinstance(slots, str) else slots)
    return found


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
