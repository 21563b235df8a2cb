"""State of modules outside their parameters and buffers.

Attributes, plain tensors, containers and generators that a forward may change: in the modules
themselves, in objects that they hold, in hooks on them, in global names that their code uses, and
in context variables.
A `Watch` notes all of it, finds what has changed since, and puts it back.
"""

from __future__ import annotations

import argparse
import array
import builtins
import csv
import functools
import gc
import io
import logging
import queue
import random
import threading
import types
import warnings
import weakref
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.places import (
    LRU_CACHE,
    MISSING,
    Attribute,
    ClosureCell,
    Contents,
    ContextValue,
    Entry,
    Inner,
    Place,
    are_put_back,
    copied,
    is_library,
    is_put_back,
    is_same,
    is_scalar,
    iterators_within,
    modules_named,
    names_in,
    same_state,
    state_of,
)
from rotor.common.streams import is_file
from rotor.common.substitutes import slot_names

_Identities = Collection[tuple[int, Any]] | None

_MOST_CELLS = 100_000
_MOST_ENTRIES = 1000
"""Entries of a container of a library, such as a vocabulary, above which it is left unwatched."""
_MOST_FOREIGN = 10_000
_SMALL_BYTES = 1 << 12
"""Size of tensors on the CPU that are copied even where writes to tensors are seen."""

_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_WATCHED: tuple[type, ...] = (
    *(types.SimpleNamespace, argparse.Namespace, UserDict, UserList, weakref.WeakSet),
    *(queue.Queue, threading.Event, csv.DictWriter),
)
"""Kinds of objects of libraries that are watched as the user's own are."""

_WRAPPERS: Any = (
    types.MethodType
    | types.BuiltinFunctionType
    | staticmethod
    | classmethod
    | property
    | functools.partial
    | functools.partialmethod
    | functools.cached_property
    | functools.singledispatchmethod
)
"""Types of code that runs other code."""
_PARTS = "__self__", "__func__", "fget", "fset", "fdel", "func", "args", "keywords", "dispatcher"
"""Names of attributes by which wrappers hold what they run, and what they run it with."""
_CODE: Any = types.FunctionType | types.ModuleType | type | _WRAPPERS
_UNFOLLOWED: Any = torch.Tensor | nn.Module | io.IOBase | logging.Manager | _CODE
"""Values of objects of libraries that are left unwatched, beside iterators."""
_OPAQUE = frozenset(
    [
        *("_queue.SimpleQueue", "sqlite3.Connection", "sqlite3.Cursor", "decimal.Context"),
        *("_hashlib.HASH", "_hashlib.HMAC", "zlib.Compress", "zlib.Decompress"),
        *("numpy.nditer", "numpy.random.bit_generator.SeedSequence"),
    ]
)
"""Types of objects whose state can be changed, and not put back."""


def _position(iterator: Any) -> Any:
    """Return the positions of an iterator and of those within; `MISSING` if one reports none."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return [repr(one.__reduce__()[1:]) for one in iterators_within(iterator)]
        except Exception:
            return MISSING


class _Values:
    """Saved named values of one owner: a dictionary, an object, a class, a closure."""

    def __init__(
        self, name: str, owner: Any, kind: type[Place], keys: Callable[[], Iterable[Any]]
    ) -> None:
        self.name = name
        self.owner = owner
        self.kind = kind
        self.keys = keys
        self.before = {place.key: place.get() for place in self.places()}
        self.new_key = id(owner), MISSING

    def places(self) -> list[Place]:
        return [
            self.kind(f"{self.name}.{key}" if key is not None else self.name, self.owner, key)
            for key in self.keys()
        ]

    def former(self, place: Place) -> Any:
        return self.before.get(place.key)

    def changed(self, same: Callable[[Any, Any], bool] = is_same) -> list[Place]:
        places = {place.key: place for place in self.places()}
        for key in self.before:
            if key not in places:
                places[key] = self.kind(f"{self.name}.{key}", self.owner, key)
        return [
            place
            for key, place in places.items()
            if not same(place.get(), self.before.get(key, MISSING))
        ]

    def restore(self, among: _Identities = None) -> None:
        for place in self.changed(is_put_back):
            is_new = place.key not in self.before
            if among is None or place.identity in among or (is_new and self.new_key in among):
                place.put(self.before.get(place.key, MISSING))
        if among is None and type(self.owner) is dict and list(self.keys()) != list(self.before):
            # An entry that was removed comes back at its place.
            for key in list(self.before):
                self.owner[key] = self.owner.pop(key)


class _Whole:
    """Saved contents of a container, or saved state of an object."""

    def __init__(self, place: Place, same: Callable[[Any, Any], bool]) -> None:
        self.place = place
        self.same = same
        self.before = place.get()

    def places(self) -> list[Place]:
        return [self.place]

    def former(self, place: Place) -> Any:
        del place
        return self.before

    def changed(self) -> list[Place]:
        return [] if self.same(self.before, self.place.get()) else [self.place]

    def restore(self, among: _Identities = None) -> None:
        if among is None or self.place.identity in among:
            now = self.place.get()
            same = are_put_back if isinstance(self.place, Contents) else self.same
            if not same(now, self.before):
                self.place.put(self.before)


class _Mutable:
    """Saved tensor or iterator that may be changed in place, with its holder."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.holders: list[Place] = []
        self.is_tensor = isinstance(value, torch.Tensor)
        self.version = value._version if self.is_tensor else _position(value)
        self.copy = copied(value, {})

    def changed(self) -> list[Place]:
        if self.is_tensor:
            same = self.value._version == self.version and _same_bits(self.value, self.copy)
        else:
            same = _position(self.value) == self.version
        if same:
            return []
        return [type(h)(h.name, h.owner, h.key, in_place=True) for h in self.holders]

    def restore(self, among: _Identities = None) -> None:
        changed = self.changed()
        if not changed or (among is not None and changed[0].identity not in among):
            return
        if self.is_tensor:
            # The holder keeps the tensor, and no graph takes it for changed.
            with torch.no_grad():
                self.value.data.copy_(self.copy)
            return
        memo: dict[int, Any] = {}
        for holder in self.holders:
            value = holder.get()
            if isinstance(holder, Contents):
                value = [self.copy if item is self.value else item for item in value]
            else:
                value = self.copy
            holder.in_place = True
            holder.put(holder.copy_of(value, memo))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch.no_grad():
        pairs = zip(core.strided_parts(a), core.strided_parts(b), strict=True)
        return all(
            torch.equal(x, y)
            or (torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()))
            for x, y in pairs
        )


class Watch:
    """State at construction of modules by name, and of functions that are no modules.

    Without `copies_tensors` the values of tensors, small ones aside, are left to others. `slots_of`
    returns containers of a module to note as well: of parameters, buffers, children and hooks.
    `generators` are the names of running generators (functions with ``yield``), and `streams` those
    of streams that can be written to: neither can be set back. Nor can the objects of C that
    `opaque` names with their types. `files` are open files that can be written to, and `hidden` are
    modules by name that no module has as a child.
    """

    most: ClassVar[int] = _MOST_CELLS
    internals: ClassVar[frozenset[str]] = frozenset([*vars(nn.Module()), "training"])

    def __init__(
        self,
        modules: Iterable[tuple[str, Any]],
        *,
        copies_tensors: bool = True,
        slots_of: Callable[[nn.Module], Iterable[Any]] = lambda module: (),
    ) -> None:
        self._copies_tensors = copies_tensors
        self._slots_of = slots_of
        self._cells: dict[Any, _Values | _Whole | _Mutable] = {}
        self._waiting: deque[tuple[str, Any, Place | None]] = deque()
        self._seen: set[int] = set()
        self._attributed: set[int] = set()
        self._keep: list[Any] = []
        self._own: set[int] = set()
        self._slots: set[int] = set()
        self._foreign: set[int] = set()
        self.generators: list[str] = []
        self.files: list[Any] = []
        self.streams: list[str] = []
        self.opaque: list[str] = []
        self.hidden: list[tuple[str, nn.Module]] = []
        modules = list(modules)
        for _, module in modules:
            if isinstance(module, nn.Module):
                self._own.update(id(inner) for inner in module.modules())
        self._state("Python's random generator", random)
        self._state("NumPy's random generator", np.random)
        for name, module in modules:
            self._waiting.append((name, module, None))
        while self._waiting and len(self._seen) < self.most:
            self._visit(*self._waiting.popleft())
        self._owners = {
            key[0] for key, cell in self._cells.items() if not isinstance(cell, _Mutable)
        }

    # -- current state

    def _visit(self, name: str, value: Any, holder: Place | None) -> None:
        if is_scalar(value) or value is MISSING:
            return
        is_foreign = holder is not None and id(holder.owner) in self._foreign
        if isinstance(value, torch.Tensor):
            is_slot = holder is not None and id(holder.owner) in self._slots
            is_value = not isinstance(value, nn.Parameter) and value.grad_fn is None
            # NumPy may write to a small one, which nobody would see.
            copies = not is_slot if self._copies_tensors else _is_small(value)
            if is_value and copies:
                self._mutable(value, holder)
            if not is_foreign:
                self._tensor(name, value)
            return
        if id(value) in self._seen:
            return
        if is_foreign and (len(self._foreign) > _MOST_FOREIGN or not _is_followed(value)):
            return
        self._seen.add(id(value))
        self._keep.append(value)
        if is_foreign:
            self._foreign.add(id(value))
        self._found(name, value, holder, is_foreign=is_foreign)
        if not isinstance(value, nn.Module | _CODE):
            self._attributes(name, value, is_foreign=is_foreign)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        # Attributes of the kinds of tensors that libraries define are their own state.
        if type(tensor) in _TENSORS or not is_library(type(tensor).__module__):
            slots = vars(tensor)
            if id(slots) not in self._attributed:
                self._attributed.add(id(slots))
                self._values(name, slots, Entry, lambda: list(slots))

    def _found(self, name: str, value: Any, holder: Place | None, *, is_foreign: bool) -> None:
        if isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, _CODE):
            self._code(name, value)
        elif isinstance(value, dict):
            self._values(name, value, Entry, lambda: list(value))
        elif isinstance(value, list | set | deque | bytearray | array.array):
            self._contents(name, value)
        elif isinstance(value, tuple | frozenset):
            for k, item in enumerate(value):
                self._waiting.append((f"{name}[{k}]", item, None))
        elif isinstance(value, types.MappingProxyType):
            # As the one of the implementations of a function of `functools.singledispatch`.
            self._waiting += [(name, part, None) for part in gc.get_referents(value)]
        elif isinstance(value, types.GeneratorType):
            self.generators.append(name)
        elif isinstance(value, types.CellType | ContextVar):
            place = ClosureCell if isinstance(value, types.CellType) else ContextValue
            self._values(name, value, place, lambda: [None])
        elif isinstance(value, LRU_CACHE):
            if not is_library(value.__module__):
                self._state(name, value)
                self._waiting.append((name, value.__wrapped__, None))
        elif state_of(value) is not MISSING:
            self._state(name, value)
            if getattr(getattr(value, "dtype", None), "hasobject", False):
                self._waiting += [(name, item, None) for item in value.flat]
        elif isinstance(value, io.IOBase) and is_library(type(value).__module__):
            self._stream(name, value)
        elif not is_foreign and f"{type(value).__module__}.{type(value).__qualname__}" in _OPAQUE:
            self.opaque.append(f"{name} is a {type(value).__qualname__}")
        elif hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
            self._mutable(value, holder)
            if any(isinstance(one, types.GeneratorType) for one in iterators_within(value)):
                self.generators.append(name)
        elif not is_foreign and not isinstance(value, _WATCHED):
            self._library_object(name, value)

    def _stream(self, name: str, value: io.IOBase) -> None:
        if is_file(value):
            self.files.append(value)
        elif not value.closed and value.writable():
            self.streams.append(name)

    def _module(self, name: str, module: nn.Module) -> None:
        slots, internals = vars(module), self.internals
        if type(module).__module__.startswith("rotor.") and is_library(type(module).__module__):
            slots = {}
        self._values(name, slots, Entry, lambda: [key for key in slots if key not in internals])
        for inner in self._slots_of(module):
            # The values of parameters and buffers are kept by others.
            self._slots.add(id(inner))
            self._visit(name, inner, None)
        for hook in core.forward_hooks(module):
            self._waiting.append((f"a hook of {name}", hook, None))
        if id(module) not in self._own:
            self.hidden.append((name, module))
            buffers = {key: slots for slots, key in core.buffer_slots(module)}
            for key, where in buffers.items():
                place = Entry(f"{name}.{key}", where, key)
                self._waiting.append((place.name, place.get(), place))
        for key, child in core.child_modules(module):
            self._waiting.append((f"{name}.{key}", child, None))
        self._class(type(module))

    def _class(self, kind: type) -> None:
        metaclass: type = type(kind)
        for base in (*kind.__mro__, *metaclass.__mro__):
            if is_library(base.__module__) or id(base) in self._seen:
                continue
            self._seen.add(id(base))

            def keys(base: type = base) -> list[str]:
                return [key for key in vars(base) if not key.startswith("__")]

            self._values(base.__qualname__, base, Attribute, keys)
            code = [value for value in vars(base).values() if isinstance(value, _CODE | LRU_CACHE)]
            self._waiting += [(base.__qualname__, value, None) for value in code]

    def _code(self, name: str, value: Any) -> None:
        if isinstance(value, type):
            self._seen.discard(id(value))
            self._class(value)
        elif isinstance(value, _WRAPPERS):
            self._waiting += [(name, getattr(value, key, None), None) for key in _PARTS]
        elif isinstance(value, types.FunctionType) and not is_library(value.__module__):
            for variable, cell in zip(
                value.__code__.co_freevars, value.__closure__ or (), strict=True
            ):
                if id(cell) not in self._seen:
                    self._seen.add(id(cell))
                    self._values(variable, cell, ClosureCell, lambda: [None])
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self._waiting.append((name, default, None))
            used, own = names_in(value.__code__), value.__globals__
            names = [n for n in used.outer if n in own or not hasattr(builtins, n)]
            self._values(value.__module__, own, Entry, names.copy, unique=value)
            self._values(name, value.__dict__, Entry, lambda: list(value.__dict__))
            for helper in modules_named(value):
                names = [n for n in used.used if n in vars(helper) or n in used.stored]
                self._values(helper.__name__, vars(helper), Entry, names.copy, unique=value)

    def _library_object(self, name: str, value: Any) -> None:
        if is_library(type(value).__module__):
            # A writer of CSV holds a stream, `np.vectorize` a function, and `Config[int]` a class.
            held = [*gc.get_referents(value), *getattr(value, "__dict__", {}).values()]
            for one in [getattr(one, "__self__", one) for one in held]:
                is_code = isinstance(one, type | types.FunctionType)
                if isinstance(one, io.IOBase) or (is_code and not is_library(one.__module__)):
                    self._waiting.append((name, one, None))

    def _attributes(self, name: str, value: Any, *, is_foreign: bool) -> None:
        slots, kind = getattr(value, "__dict__", None), type(value)
        is_foreign |= is_library(kind.__module__) and not isinstance(value, _WATCHED)
        if is_foreign and _keeps_own_state(kind.__module__):
            return
        if isinstance(slots, dict):
            if is_foreign:
                self._foreign.add(id(slots))
            self._values(name, slots, Entry, lambda: list(slots))
        if not is_foreign:
            names = [n for n in slot_names(kind) if n not in ("__dict__", "__weakref__")]
            if names:
                self._values(name, value, Attribute, lambda: names)
            self._class(kind)

    def _values(
        self,
        name: str,
        owner: Any,
        kind: type[Place],
        keys: Callable[[], Iterable[Any]],
        unique: Any = None,
    ) -> None:
        self._keep.append(owner)
        cell = _Values(name, owner, kind, keys)
        self._cells[id(owner), id(unique) if unique is not None else None] = cell
        for place in cell.places():
            self._waiting.append((place.name, place.get(), place))

    def _contents(self, name: str, value: Any) -> None:
        place = Contents(name, value)
        self._cells[id(value), None] = _Whole(place, is_same)
        if not isinstance(value, bytearray | array.array):
            for k, item in enumerate(list(value)):
                self._waiting.append((f"{name}[{k}]", item, place))

    def _state(self, name: str, owner: Any) -> None:
        self._keep.append(owner)
        self._cells[id(owner), None] = _Whole(Inner(name, owner), same_state)

    def _mutable(self, value: Any, holder: Place | None) -> None:
        if holder is None:
            return
        key = (id(value), "in place")
        if key not in self._cells:
            self._keep.append(value)
            self._cells[key] = _Mutable(value)
        cell = self._cells[key]
        assert isinstance(cell, _Mutable)
        cell.holders.append(holder)

    # -- changes

    def changed(self) -> list[Place]:
        """Return the places whose state has changed."""
        found: dict[Any, Place] = {}
        formers = []
        for cell in self._cells.values():
            for place in cell.changed():
                if place.identity not in found or place.in_place:
                    found[place.identity] = place
                if isinstance(cell, _Values):
                    formers.append((place, cell.former(place)))
        for place, former in formers:
            # What was written to and replaced will be written to again.
            place.in_place |= (id(former), None) in found
        for place in self._moved():
            place.in_place = True
            found[place.identity] = place
        return list(found.values())

    def reaches(self, place: Place) -> bool:
        """Return whether the modules could read or change a place."""
        return id(place.owner) in self._owners

    def _held(self) -> Iterator[tuple[Place, Any]]:
        """Yield each place with what it holds, and with what it held at construction."""
        for cell in [cell for cell in self._cells.values() if not isinstance(cell, _Mutable)]:
            for place in cell.places():
                yield from _within(place, place.get())
                yield from _within(place, cell.former(place))

    def storages(self, among: _Identities = None) -> set[int]:
        """Return the identities of the storages of tensors, at places of these identities only."""
        held = [h for place, h in self._held() if among is None or place.identity in among]
        tensors = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
        return {core.storage_identity(part) for t in tensors for part in core.strided_parts(t)}

    def identities(self, storages: Collection[int] = ()) -> set[tuple[int, Any]]:
        """Return the identities of the places that changed, or that hold what changed.

        `storages` are the identities of the storages that were written to.
        """
        holders = defaultdict(list)
        waiting = []
        for place, held in self._held():
            if isinstance(held, torch.Tensor):
                parts = core.strided_parts(held) if storages else ()
                if any(core.storage_identity(part) in storages for part in parts):
                    waiting.append(place.identity)
            if not is_scalar(held):
                holders[id(getattr(held, "__dict__", held))].append(place.identity)
        waiting += [place.identity for place in self.changed()]
        # Entries that each run makes under another key are no preparation.
        waiting += [
            cell.new_key
            for cell in self._cells.values()
            if isinstance(cell, _Values) and any(p.key not in cell.before for p in cell.changed())
        ]
        found: set[tuple[int, Any]] = set()
        while waiting:
            identity = waiting.pop()
            if identity not in found:
                found.add(identity)
                waiting += holders[identity[0]]
        return found

    def _moved(self) -> Iterator[Place]:
        """Yield the places within objects that were exchanged: each run writes to another one."""
        cells = [(k[0], c) for k, c in self._cells.items() if not isinstance(c, _Mutable)]
        pairs = [
            (place, cell.former(place), place.get())
            for _, cell in cells
            for place in (cell.changed(is_put_back) if isinstance(cell, _Values) else cell.places())
            if not isinstance(place, Inner)
        ]
        before = {id(held) for place, former, _ in pairs for _, held in _within(place, former)}
        waiting = [
            now
            for place, *values in pairs
            for former, now in zip(*(list(_within(place, value)) for value in values), strict=False)
            if now[1] is not former[1] and id(now[1]) in before and not is_scalar(now[1])
        ]
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()[1]
            owner = id(getattr(value, "__dict__", value))
            for cell in [cell for key, cell in cells if key == owner and key not in seen]:
                yield from cell.places()
                waiting += [held for p in cell.places() for held in _within(p, p.get())]
            seen.add(owner)

    def restore(
        self, among: Collection[tuple[int, Any]] | None = None, again: Watch | None = None
    ) -> None:
        """Restore the state at construction; of places of these identities only, if given.

        What `again`, the watch of a second run, has not found any more is restored too: it was
        replaced, and is put back where it was.
        """
        known = set() if again is None else {key[0] for key in again._cells}
        for key, cell in self._cells.items():
            is_left = again is not None and key[0] not in known
            cell.restore(None if is_left else among)


def _keeps_own_state(module: str) -> bool:
    """Return whether objects of a module, as those of FSDP2, are in order as a run leaves them."""
    return module.startswith(("torch.", "rotor.")) and not module.startswith("torch.optim.")


def _is_followed(value: Any) -> bool:
    """Return whether a value of an object of a library is watched."""
    if isinstance(value, dict | list | set | deque):
        return len(value) <= _MOST_ENTRIES
    is_plain = not isinstance(value, _UNFOLLOWED) and not hasattr(type(value), "__next__")
    return is_plain and hasattr(value, "__dict__")


def _within(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """Yield a place with its value, or with each of those in a container or a tuple."""
    for held in _unpacked(tuple(value) if isinstance(place, Contents) else value):
        yield place, held


def _is_small(tensor: torch.Tensor) -> bool:
    is_strided = type(tensor) in _TENSORS and tensor.layout == torch.strided
    return is_strided and tensor.is_cpu and tensor.nbytes <= _SMALL_BYTES


def _unpacked(value: Any) -> Iterator[Any]:
    """Yield a value, or what is in it if it is a tuple."""
    if isinstance(value, tuple | frozenset):
        for item in value:
            yield from _unpacked(item)
    else:
        yield value
