"""State that the code of modules depends on: recorded when it runs, put back when it runs again.

Attributes, hooks, parameters and buffers by slot, and the global names, closures, classes and
objects that the code reaches, are recorded by identity; tensors by their version too. What was
replaced meanwhile is put back for the time of another run; what was written to is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, repeat
from operator import attrgetter, is_
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rotor._pytorch import core
from rotor._pytorch import traces as modes
from rotor.common.module_state import Watch
from rotor.common.places import (
    MISSING,
    Attribute,
    Contents,
    Entry,
    Inner,
    Place,
    is_library,
    is_put_back,
    is_scalar,
)
from rotor.errors import RecomputationError

_MOST_ITEMS = 1_000
"""Number of items above which a container is known by its identity and length alone."""

_MOST_BYTES = 1 << 12
"""Bytes of an array above which its contents are not known."""

Identities = Collection[tuple[int, Any]]
_versions = attrgetter("_version")
_required = attrgetter("requires_grad")


class _Source:
    """Values of one owner, in a fixed order."""

    def __init__(self, name: str, owner: Any, keys: Sequence[Any], read: Callable[[], Any]) -> None:
        self.name = name
        self.owner = owner
        self.keys = list(keys)
        self.read = read

    def has_its_keys(self) -> bool:
        """Return whether the owner has the same keys as at construction."""
        return True

    def replaced(self, before: Sequence[Any], kept: Identities) -> Callable[[], None] | None:
        """Put earlier values back, except for `kept` places; return a function that undoes it."""
        raise NotImplementedError


class _Dict(_Source):
    def __init__(self, name: str, owner: dict[Any, Any]) -> None:
        super().__init__(name, owner, list(owner), owner.values)

    def has_its_keys(self) -> bool:
        return list(self.owner) == self.keys

    def replaced(self, before: Sequence[Any], kept: Identities) -> Callable[[], None] | None:
        now = dict(self.owner)
        wanted = dict(zip(self.keys, before, strict=True))
        for key in [key for key in {**wanted, **now} if (id(self.owner), key) in kept]:
            if key in now:
                wanted[key] = now[key]
            else:
                wanted.pop(key, None)
        if list(now) == list(wanted) and _all_same(now.values(), wanted.values()):
            return None
        _refill(self.owner, wanted)
        return partial(_refill, self.owner, now)


class _Places(_Source):
    """Values of some places of one owner."""

    def __init__(self, name: str, places: Sequence[Place], read: Callable[[], Any] | None) -> None:
        keys = [place.key for place in places]
        read = read or (lambda: [place.get() for place in places])
        super().__init__(name, places[0].owner, keys, read)
        self._places = places

    def replaced(self, before: Sequence[Any], kept: Identities) -> Callable[[], None] | None:
        changed = [
            (place, now)
            for place, earlier in zip(self._places, before, strict=True)
            if place.identity not in kept and not is_put_back(now := place.get(), earlier)
        ]
        if not changed:
            return None
        values = dict(zip(self._places, before, strict=True))
        for place, _ in changed:
            place.put(values[place])

        def undo() -> None:
            for place, now in changed:
                place.put(now)

        return undo


class _Items(_Source):
    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner, range(len(owner)), owner.__iter__)

    def has_its_keys(self) -> bool:
        return len(self.owner) == len(self.keys)

    def replaced(self, before: Sequence[Any], kept: Identities) -> Callable[[], None] | None:
        place = Contents(self.name, self.owner)
        now = place.get()
        is_equal = len(now) == len(before) and _all_same(now, before)
        if place.identity in kept or is_equal:
            return None
        place.put(before)
        return partial(place.put, now)


class _Length(_Source):
    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner, [None], lambda: (len(owner),))

    def replaced(self, before: Sequence[Any], kept: Identities) -> Callable[[], None] | None:
        if len(self.owner) != before[0]:
            raise RecomputationError(
                f"{self.name}, of more than {_MOST_ITEMS} items, has grown or shrunk between a "
                "forward and its recomputation in the backward, which may depend on it: change it "
                "after the backward"
            )
        return None


class _Memory(_Source):
    """Contents of a small array of NumPy's."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner, [None], lambda: (owner.tobytes(),))

    def replaced(self, before: Sequence[Any], kept: Identities) -> Callable[[], None] | None:
        place = Inner(self.name, self.owner)
        if place.identity in kept or self.owner.tobytes() == before[0]:
            return None
        now = place.get()
        place.put(np.frombuffer(before[0], now.dtype).reshape(now.shape))
        return partial(place.put, now)


class Dependencies(Watch):
    """Places that the code of modules reads, as far as they are known from what it names.

    `modules` are modules by name, and functions that are no modules. Without `with_parameters`,
    slots of parameters are left out: FSDP2 swaps them while modules run.
    """

    most: ClassVar[int] = 2_000

    def __reduce__(self) -> Any:
        """Become ``None`` in copies of the owner, which find their own places."""
        return type(None), ()

    def __init__(self, modules: Iterable[tuple[str, Any]], *, with_parameters: bool = True) -> None:
        self._sources: list[_Source] = []
        self._empty: list[dict[Any, Any]] = []
        self._with_parameters = with_parameters
        for hooks in modes.GLOBAL_HOOKS:
            self._dict("hooks of all modules", hooks)
        super().__init__(modules)
        self._reads = [source.read for source in self._sources]
        self._latest = self.values()
        self._set_tensors()

    # -- finding the places

    def _dict(self, name: str, owner: dict[Any, Any]) -> None:
        if owner:
            self._sources.append(_Dict(name, owner))
        else:
            self._empty.append(owner)

    def _module(self, name: str, module: nn.Module) -> None:
        slots = vars(module)
        self._dict(name, slots)
        for registry in core.registries_of(module, with_parameters=self._with_parameters):
            self._dict(name, registry)
        for hook in core.forward_hooks(module):
            self._waiting.append((f"a hook of {name}", hook, None))
        for key, child in core.child_modules(module):
            self._waiting.append((f"{name}.{key}", child, None))
        for key, value in slots.items():
            if key not in self.internals:
                self._waiting.append((f"{name}.{key}", value, None))
        self._class(type(module))

    def _class(self, kind: type) -> None:
        metaclass: type = type(kind)
        for base in (*kind.__mro__, *metaclass.__mro__):
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            is_own = not is_library(base.__module__)
            names = [key for key in vars(base) if is_own and not key.startswith("__")]
            if not is_own and "forward" in vars(base):
                names = ["forward"]
            self._named(base.__qualname__, base, Attribute, names)
            if is_own:
                self._waiting += [(base.__qualname__, v, None) for v in vars(base).values()]

    def _named(self, name: str, owner: Any, kind: type[Place], keys: Sequence[Any]) -> None:
        places = [kind(f"{name}.{key}" if key is not None else name, owner, key) for key in keys]
        read = None
        if isinstance(owner, type) or kind is Entry:
            get = vars(owner).get if isinstance(owner, type) else owner.get
            read = partial(map, get, list(keys), repeat(MISSING))
        if places:
            self._sources.append(_Places(name, places, read))

    def _values(
        self,
        name: str,
        owner: Any,
        kind: type[Place],
        keys: Callable[[], Iterable[Any]],
        unique: Any = None,
    ) -> None:
        self._keep.append(owner)
        found = list(keys())
        if kind is Entry and unique is None:
            if len(owner) > _MOST_ITEMS:
                self._sources.append(_Length(name, owner))
                return
            self._dict(name, owner)
        else:
            self._named(name, owner, kind, found)
        for key in found:
            place = kind(f"{name}.{key}" if key is not None else name, owner, key)
            self._waiting.append((place.name, place.get(), place))

    def _contents(self, name: str, value: Any) -> None:
        if isinstance(value, bytearray) or len(value) > _MOST_ITEMS:
            self._sources.append(_Length(name, value))
            return
        self._sources.append(_Items(name, value))
        for k, item in enumerate(list(value)):
            self._waiting.append((f"{name}[{k}]", item, None))

    def _state(self, name: str, owner: Any) -> None:
        """Leave out states of generators and contents of large arrays."""
        is_small = isinstance(owner, np.ndarray) and 0 < owner.nbytes <= _MOST_BYTES
        if is_small and not owner.dtype.hasobject:
            self._sources.append(_Memory(name, owner))

    def _mutable(self, value: Any, holder: Place | None) -> None:
        """Leave tensors out: their versions tell whether they were written to."""

    # -- reading them

    def values(self) -> list[Any]:
        """Return the present values of all places, and the dictionaries that were empty."""
        found: list[Any] = list(filter(None, self._empty))
        for read in self._reads:
            found += read()
        return found

    def recorded(self) -> tuple[Dependencies, list[Any], list[torch.Tensor]] | None:
        """Return the present values and the tensors among them; ``None`` if places have changed."""
        values = self.values()
        if not _are_equal(values, self._latest):
            if not self._has_same_places(values):
                return None
            self._latest = self.values()
            self._set_tensors()
        return self, self._latest, self._tensors

    def forget(self, lasting: Collection[int]) -> None:
        """Hold no tensor from now on whose id is not among these, until the next record."""
        if any(id(tensor) not in lasting for tensor in self._tensors):
            values = self._latest
            gone = [isinstance(v, torch.Tensor) and id(v) not in lasting for v in values]
            self._latest = [None if is_gone else v for v, is_gone in zip(values, gone, strict=True)]
            self._set_tensors()

    def _has_same_places(self, values: list[Any]) -> bool:
        return (
            len(values) == len(self._latest)
            and not any(self._empty)
            and all(source.has_its_keys() for source in self._sources)
            and all(
                a is b or (_is_leaf(a) and _is_leaf(b)) or self._has_followed(a, b, values)
                for a, b in zip(values, self._latest, strict=True)
            )
        )

    def _has_followed(self, now: Any, before: Any, values: list[Any]) -> bool:
        """Watch a list in the place of the one that it has replaced, if they are alike."""
        if not (type(now) is type(before) is list and len(now) == len(before)):
            return False
        if not all(map(_is_leaf, [*now, *before])) or any(value is before for value in values):
            return False
        for k, source in enumerate(self._sources):
            if source.owner is before:
                source.owner, source.read = now, now.__iter__
                self._reads[k] = source.read
        return True

    def _set_tensors(self) -> None:
        found = {id(v): v for v in self._latest if isinstance(v, torch.Tensor)}
        self._tensors = [t for t in found.values() if not t.is_inference()]

    def by_source(self, values: list[Any]) -> Iterator[tuple[_Source, list[Any]]]:
        """Yield each source with its part of recorded values."""
        following = iter(values)
        for source in self._sources:
            yield source, list(islice(following, len(source.keys)))

    def refill_empty(self) -> list[Callable[[], None]]:
        """Empty the dictionaries that were empty before; return functions that undo it."""
        found = [(owner, dict(owner)) for owner in self._empty if owner]
        for owner, _ in found:
            owner.clear()
        return [partial(_refill, owner, now) for owner, now in found]

    def name_of(self, tensor: torch.Tensor, values: list[Any]) -> str:
        """Return the name of a recorded tensor."""
        for source, part in self.by_source(values):
            for key, value in zip(source.keys, part, strict=True):
                if value is tensor:
                    return f"{source.name}.{key}"
        return "a tensor"


class Record:
    """State that some code depended on when it began to run, from `Dependencies.recorded`."""

    __slots__ = ("_places", "_required", "_tensors", "_values", "_versions")

    def __init__(self, recorded: tuple[Dependencies, list[Any], list[torch.Tensor]]) -> None:
        self._places, self._values, self._tensors = recorded
        self._versions = list(map(_versions, self._tensors))
        self._required = list(map(_required, self._tensors))

    def written(self) -> list[torch.Tensor]:
        """Return the tensors that were written to since."""
        if list(map(_versions, self._tensors)) == self._versions:
            return []
        return [
            tensor
            for tensor, version in zip(self._tensors, self._versions, strict=True)
            if tensor._version != version
        ]

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of a recorded tensor."""
        return self._places.name_of(tensor, self._values)

    @contextmanager
    def put_back(self, kept: Identities) -> Iterator[None]:
        """Put back what was replaced since, except for `kept` places, for the time of a run."""
        undo: list[Callable[[], object]] = []
        try:
            self.restore(kept, undo)
            yield
        finally:
            for function in reversed(undo):
                function()

    def restore(self, kept: Identities, undo: list[Callable[[], object]]) -> None:
        """Put back what was replaced since for good; add functions that undo it to a list."""
        now = self._places.values()
        frozen = list(map(_required, self._tensors)) != self._required
        if _are_equal(now, self._values) and not frozen:
            return
        undo += self._places.refill_empty()
        for source, before in self._places.by_source(self._values):
            if (function := source.replaced(before, kept)) is not None:
                undo.append(function)
        for tensor, flag in zip(self._tensors, self._required, strict=True):
            if tensor.requires_grad != flag and tensor.is_leaf:
                undo.append(partial(tensor.requires_grad_, tensor.requires_grad))
                tensor.requires_grad_(flag)


def _is_leaf(value: Any) -> bool:
    """Return whether nothing within a value is watched."""
    return value is MISSING or is_scalar(value) or isinstance(value, torch.Tensor)


def _are_equal(a: list[Any], b: list[Any]) -> bool:
    """Return whether values are the same, without a look at what tensors hold."""
    return len(a) == len(b) and (all(map(is_, a, b)) or _all_same(a, b))


def _all_same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    return all(map(is_put_back, a, b))


def _refill(owner: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Give a dictionary these entries, in this order."""
    for key in owner.keys() - content.keys():
        del owner[key]
    owner.update(content)
    if list(owner) != list(content):
        owner.clear()
        owner.update(content)
