"""Pieces of state that modules and their hooks hold, and the way each is read and restored."""

from __future__ import annotations

import array
import contextvars
import copy
import ctypes
import dis
import functools
import gc
import io
import mmap
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.substitutes import exchanged, slot_names
from rotor.common.tensor_trees import tree_tensors

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "scipy"}
_IN_MEMORY: Any = io.StringIO | io.BytesIO

MISSING: Any = object()
"""Value of a place that does not exist."""


_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_PLAIN = frozenset(_SCALARS)


def tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in plain containers within it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in list(value.values()):
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset | deque):
        for item in list(value):
            yield from tensors_in(item, depth - 1)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return one copy of a tensor, an array or an iterator; any other value as it is."""
    if id(value) in memo:
        return memo[id(value)][1]
    made = value
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            made = value.detach().clone()
    elif isinstance(value, np.ndarray):
        made = value.copy()
    elif not isinstance(value, nn.Module) and hasattr(value, "__next__"):
        with warnings.catch_warnings(action="ignore"), suppress(Exception):
            is_pythons = type(value).__module__ in _PYTHONS
            made = _copied_iterator(value, memo) if is_pythons else copy.copy(value)
    memo[id(value)] = value, made
    return made


_PYTHONS = ("builtins", "itertools")
"""Modules of iterators that may read other iterators, as zip and map do."""


def _copied_iterator(value: Any, memo: dict[int, Any]) -> Any:
    def inner(part: Any) -> Any:
        if type(part) is tuple:
            return tuple(map(inner, part))
        return copied(part, memo) if hasattr(type(part), "__next__") else part

    make, arguments, *state = value.__reduce__()
    made = make(*map(inner, arguments))
    if state and state[0] is not None:
        made.__setstate__(inner(state[0]))
    return made


def iterators_within(value: Any) -> Iterator[Any]:
    """Yield an iterator, or those in a tuple, and those that iterators of Python's read."""
    if type(value) is tuple:
        for part in value:
            yield from iterators_within(part)
    elif hasattr(type(value), "__next__"):
        yield value
        if type(value).__module__ in _PYTHONS:
            with suppress(Exception):
                yield from iterators_within(value.__reduce__()[1:])


class Place:
    """A piece of state of the object `owner` that a stage changes.

    `name` is a location for messages, such as ``0.tau``. `key` is the name or key within `owner`,
    ``None`` for its contents as a whole. With `in_place` the value itself is changed, so that a
    saved one must be a copy.
    """

    __slots__ = ("in_place", "key", "name", "owner")

    def __init__(self, name: str, owner: Any, key: Any = None, *, in_place: bool = False) -> None:
        self.name = name
        self.owner = owner
        self.key = key
        self.in_place = in_place

    @property
    def identity(self) -> tuple[int, Any]:
        """Key that is equal for two places of the same state."""
        return id(self.owner), self.key

    def get(self) -> Any:
        """Return the current value."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        """Set a value that `get` or `copy_of` returned."""
        raise NotImplementedError

    def copy_of(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return the value, copied if running the stage would change it."""
        return copied(value, memo) if self.in_place else value

    def state_bytes(self, device: torch.device) -> int:
        """Return the bytes on a device of the states that a rerun holds, tensors aside."""
        del device
        return 0

    @property
    def is_generator(self) -> bool:
        """True if only stages that change it depend on it."""
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Saved:
    """State of places at construction."""

    __slots__ = ("_values",)

    def __init__(self, places: Iterable[Place]) -> None:
        memo: dict[int, Any] = {}
        self._values = [(place, place.copy_of(place.get(), memo)) for place in places]

    def __bool__(self) -> bool:
        return bool(self._values)

    def put(self, *, last: bool = False) -> None:
        """Restore the saved state; the `last` time may use up the copies."""
        memo: dict[int, Any] = {}
        for place, value in self._values:
            place.put(value if last else place.copy_of(value, memo))

    def current(self) -> list[tuple[Place, Any]]:
        """Return each place with its current value."""
        return [(place, place.get()) for place, _ in self._values]


class Entry(Place):
    """Key of a dictionary, attributes included."""

    __slots__ = ()

    def get(self) -> Any:
        """Return the value; a mark if the key is missing."""
        # The slots of a script have no `get`.
        return self.owner[self.key] if self.key in self.owner else MISSING  # noqa: SIM401

    def put(self, value: Any) -> None:
        """Set the key, or remove it."""
        if value is MISSING:
            self.owner.pop(self.key, None)
        else:
            self.owner[self.key] = value


class Attribute(Place):
    """Attribute of a class, or one in ``__slots__``."""

    __slots__ = ()

    def get(self) -> Any:
        """Return the value; a mark if the attribute is missing."""
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.key, MISSING)
        return getattr(self.owner, self.key, MISSING)

    def put(self, value: Any) -> None:
        """Set the attribute, or delete it."""
        if value is not MISSING:
            setattr(self.owner, self.key, value)
        elif self.get() is not MISSING:
            delattr(self.owner, self.key)


class ClosureCell(Place):
    """Variable that a function shares with its enclosing one."""

    __slots__ = ()

    def get(self) -> Any:
        """Return the value; a mark if the variable is not set."""
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING

    def put(self, value: Any) -> None:
        """Set the variable."""
        if value is not MISSING:
            self.owner.cell_contents = value


class ContextValue(Place):
    """Value of a context variable."""

    __slots__ = ("_token",)

    _token: contextvars.Token[Any]

    def get(self) -> Any:
        """Return the value; a mark if the variable has none."""
        return self.owner.get(MISSING)

    def put(self, value: Any) -> None:
        """Set the value; none is left after one that was set here, otherwise the default."""
        token = getattr(self, "_token", None)
        if value is MISSING and token is not None and token.old_value is token.MISSING:
            del self._token
            self.owner.reset(token)
            return
        if value is MISSING:
            with suppress(LookupError):
                value = contextvars.Context().run(self.owner.get)
        if value is not MISSING:
            self._token = self.owner.set(value)


class Contents(Place):
    """Contents of a list, set, deque, bytearray or array."""

    __slots__ = ()

    def get(self) -> Any:
        """Return the elements."""
        return list(self.owner)

    def copy_of(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return the elements, tensors copied where they are changed in place."""
        return [copied(item, memo) for item in value] if self.in_place else value

    def put(self, value: Any) -> None:
        """Replace the elements."""
        if isinstance(self.owner, array.array):
            del self.owner[:]
        else:
            self.owner.clear()
        if isinstance(self.owner, set):
            self.owner.update(value)
        else:
            self.owner.extend(value)


LRU_CACHE: Any = type(functools.lru_cache(len))
"""Type of functions that keep results."""

_MEMORY: Any = mmap.mmap | ctypes._SimpleCData | ctypes.Array | ctypes.Structure | ctypes.Union
"""Types of objects that are memory, and hold nothing else."""


class Inner(Place):
    """State of an object that exposes it: a generator, an array, a file, a function's cache."""

    __slots__ = ()

    def get(self) -> Any:
        """Return the state."""
        return state_of(self.owner)

    def put(self, value: Any) -> None:
        """Set the state."""
        _set_state(self.owner, value)

    @property
    def is_generator(self) -> bool:
        """True if the object is a generator: drawing from it changes it."""
        return not isinstance(self.owner, np.ndarray | io.IOBase | LRU_CACHE | _MEMORY)

    def state_bytes(self, device: torch.device) -> int:
        """Return the bytes of two states: the saved one, and the current one in a rerun."""
        state = self.get()
        is_here = isinstance(state, torch.Tensor) and device.type == "cpu"
        return 2 * state.nbytes if is_here else 0


def state_of(owner: Any) -> Any:
    """Return the state of an object in the form of `_set_state`; `MISSING` if it has none."""
    if owner is np.random or isinstance(owner, torch.Generator | np.random.RandomState):
        return owner.get_state()
    if owner is random or isinstance(owner, random.Random):
        return owner.getstate()
    if isinstance(owner, np.random.Generator):
        return owner.bit_generator.state
    if isinstance(owner, np.ndarray):
        return owner.copy()
    if isinstance(owner, LRU_CACHE):
        return [id(key) for key in _kept_results(owner)]
    if isinstance(owner, _MEMORY):
        with suppress(TypeError, ValueError):
            return _bytes_of(owner).raw
    if isinstance(owner, io.IOBase):
        try:
            if isinstance(owner, _IN_MEMORY):
                return owner.__getstate__()
            return owner.tell() if not owner.writable() and owner.seekable() else MISSING
        except (OSError, ValueError):
            return MISSING
    return MISSING


def _kept_results(function: Any) -> dict[Any, Any]:
    """Return the dictionary of the results that a function with a cache keeps.

    Python passes over links of its list of latest uses whose entries are gone.
    """
    held = [h for h in gc.get_referents(function) if type(h) is dict and h is not vars(function)]
    return held[0] if held else {}


def _bytes_of(memory: Any) -> Any:
    """Return the bytes of an object that is memory, to be read and written as ``raw``."""
    size = len(memory) if isinstance(memory, mmap.mmap) else ctypes.sizeof(memory)
    return (ctypes.c_char * size).from_buffer(memory)


def _set_state(owner: Any, state: Any) -> None:
    if isinstance(owner, _MEMORY):
        _bytes_of(owner).raw = state
    elif isinstance(owner, LRU_CACHE):
        kept = _kept_results(owner)
        for key in [key for key in kept if id(key) not in state]:
            del kept[key]
    elif isinstance(owner, _IN_MEMORY):
        owner.__setstate__(state)
    elif isinstance(owner, io.IOBase):
        owner.seek(state)
    elif isinstance(owner, np.ndarray):
        owner[...] = state
    elif isinstance(owner, np.random.Generator):
        owner.bit_generator.state = state
    elif owner is random or isinstance(owner, random.Random):
        owner.setstate(state)
    else:
        owner.set_state(state)


_USES = (
    ("_GLOBAL", "_GLOBALS", "LOAD_NAME"),
    ("IMPORT_NAME", "IMPORT_FROM"),
    ("STORE_ATTR",),
)
"""Ends of the names of instructions with names of the first kinds of `Names`."""

_BY_NAME = {"globals", "vars", "__dict__", "getattr", "setattr", "modules", "import_module"}
"""Names in code that may ask for a value by its name."""


def slots_with_tensors(
    modules: Iterable[nn.Module], *, with_parameters: bool = False
) -> Iterator[tuple[core.Slot, Any]]:
    """Yield the places of buffers, and of attributes that may hold tensors, with their values."""
    for module in modules:
        slots = core.buffer_slots(module)
        if with_parameters:
            slots += core.parameter_slots(module)
        for slot in slots:
            yield slot, slot[0][slot[1]]
        for name, value in list(vars(module).items()):
            if name not in _OWN_NAMES and _may_hold_tensors(value):
                yield (vars(module), name), value


_OWN_NAMES = frozenset(vars(nn.Module()))


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(
        isinstance(item, torch.Tensor | list | tuple | dict) for item in value
    )


def kept_tensors(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return tensors that attributes of modules hold, and what their forward hooks write to."""
    found = [tensor for _, value in slots_with_tensors(modules) for tensor in tree_tensors(value)]
    for place in hook_places(modules):
        found += tensors_in(place.get())
    return found


def exchange_kept(modules: Sequence[nn.Module], given: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors, by their ids, in attributes of modules and in containers of hooks."""
    for (where, name), value in slots_with_tensors(modules):
        if not given.keys().isdisjoint(map(id, tree_tensors(value))):
            where[name] = exchanged(value, given)
    for place in hook_places(modules):
        held = place.get()
        if not given.keys().isdisjoint(map(id, tensors_in(held))):
            place.put(exchanged(held, given))


def hook_places(modules: Iterable[nn.Module]) -> Iterator[Place]:
    """Yield places outside of the modules to which their code and hooks may write tensors."""
    seen: set[int] = set()
    for module in modules:
        for hook in core.forward_hooks(module):
            yield from _places_of(hook, seen)
    for kind in dict.fromkeys(base for module in modules for base in type(module).__mro__):
        yield from _places_of(kind, seen)


def _places_of(value: Any, seen: set[int]) -> Iterator[Place]:
    if id(value) in seen or isinstance(value, nn.Module | types.ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key in list(value):
            yield Entry("an entry of a hook", value, key)
            yield from _places_of(value.get(key), seen)
    elif isinstance(value, list | deque):
        yield Contents("a list of a hook", value)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _places_of(part, seen)
    elif isinstance(value, types.MethodType):
        yield from _places_of(value.__self__, seen)
        yield from _places_of(value.__func__, seen)
    elif is_library(getattr(value, "__module__", "builtins")):
        return
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            place = ClosureCell("a variable of a hook", cell)
            yield place
            yield from _places_of(place.get(), seen)
        for part in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield from _places_of(part, seen)
        for held in (value.__globals__, *map(vars, modules_named(value))):
            for name in names_in(value.__code__).used & held.keys():
                yield Entry(name, held, name)
                yield from _places_of(held[name], seen)
    else:
        for name, part in list(getattr(value, "__dict__", {}).items()):
            if isinstance(value, type):
                yield Attribute(name, value, name)
                yield from _places_of(part, seen)
            else:
                yield Entry(name, vars(value), name)
        yield from _places_of(type(value), seen)


class Names(NamedTuple):
    """Names in the code of a function and of the functions within it.

    Where the code asks for values by their names, its strings are among each of these.
    """

    outer: frozenset[str]
    """Names of globals."""
    imported: frozenset[str]
    """Names of modules that it imports, or of what it imports from them."""
    stored: frozenset[str]
    """Names of attributes that it sets."""
    used: frozenset[str]
    """All names but those of its own variables."""


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """Return the names in the code of a function and of the functions within it."""
    inner = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    texts = [const for const in code.co_consts if isinstance(const, str)]
    names = [text for text in texts if text.replace(".", "").isidentifier()]
    found = [] if _BY_NAME.isdisjoint(code.co_names) else names
    steps = list(dis.get_instructions(code))
    own = [[step.argval for step in steps if step.opname.endswith(ends)] for ends in _USES]
    parts = zip([*own, code.co_names], *inner, strict=True)
    return Names(*(frozenset(found).union(*part) for part in parts))


def modules_named(function: types.FunctionType) -> list[types.ModuleType]:
    """Return the user's modules that a function names, imports, or reaches from these by name."""
    names, outer = names_in(function.__code__), function.__globals__
    package = (outer.get("__package__") or "").split(".")
    above = [".".join(package[:k]) + "." for k in range(1, len(package) + 1)]
    waiting = [outer.get(name) for name in names.outer]
    waiting += [sys.modules.get(start + n) for n in names.imported for start in ("", *above)]
    found: dict[int, types.ModuleType] = {}
    while waiting:
        module: Any = waiting.pop()
        is_new = isinstance(module, types.ModuleType) and id(module) not in found
        if is_new and not is_library(module.__name__):
            found[id(module)] = module
            waiting += [vars(module).get(name) for name in names.used]
    return list(found.values())


@functools.cache
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def is_library(name: str | None) -> bool:
    """Return whether the state of a Python module of this name is left unwatched."""
    name = name or ""
    package = name.split(".")[0]
    if package == "rotor":
        return not name.startswith("rotor.models")
    return name != "__main__" and (package in _LIBRARIES or _is_installed(package))


def is_scalar(value: Any) -> bool:
    """Return whether a value cannot be changed, and holds no others, as attributes of its own."""
    return type(value) in _PLAIN or (
        isinstance(value, _SCALARS) and not _has_attributes(type(value))
    )


def _has_attributes(kind: type) -> bool:
    return kind.__dictoffset__ != 0 or bool(slot_names(kind))


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are the same object, or equal scalars and states."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return False
    if isinstance(a, _SCALARS):
        is_equal = a == b or repr(a) == repr(b)
        return is_equal and _same_entries(
            getattr(a, "__dict__", None), getattr(b, "__dict__", None)
        )
    if isinstance(a, tuple | list) and len(a) == len(b):
        return all(is_same(one, other) for one, other in zip(a, b, strict=True))
    return False


def is_put_back(value: Any, before: Any) -> bool:
    """Return whether a place has its former value again: an equal list is another one."""
    return value is before or (not isinstance(before, list | tuple) and is_same(value, before))


def are_put_back(values: list[Any], before: list[Any]) -> bool:
    """Return whether a container has its former elements again."""
    return len(values) == len(before) and all(map(is_put_back, values, before))


def _same_entries(a: dict[str, Any] | None, b: dict[str, Any] | None) -> bool:
    if not a or not b:
        return not a and not b
    return is_same(list(a), list(b)) and is_same(list(a.values()), list(b.values()))


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states of `state_of` are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same_state(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes() and a.dtype == b.dtype)
    return bool(a == b)
