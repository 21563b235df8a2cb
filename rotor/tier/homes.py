"""Homes: places in a second tier of tensors that outlive a step, and tensors without bytes.

A tensor with a home has no bytes in memory. Every operation on it fetches them, for as long as the
operation runs, and writes them back if it changed them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotor._core import PIECE_BYTES
from rotor._pytorch import core, dispatch, pointers
from rotor.tier.interface import Tier, bytes_at_phase, bytes_within, placed
from rotor.tier.store import finish, piece_offsets

Tickets = list[Any]
_Step = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Home:
    """Place of a tensor's bytes in a tier, free again when it is dropped.

    It is in the tier beneath if `tier` has no room. The bytes have the type, shape, device and
    order of elements of `like`; operations get them on `device`, if another one. `lasts` is for
    parameters and states: in some tiers, what a step writes stays beside what the last finished one
    has written, which `keep` marks.
    """

    def __init__(
        self,
        tier: Tier,
        like: torch.Tensor,
        device: torch.device | None = None,
        *,
        lasts: bool = False,
    ) -> None:
        self.dtype, self.device, self.shape = like.dtype, device or like.device, like.shape
        # Not of `like` itself, which may be a tensor without bytes.
        form = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        self.stride = torch.empty_like(form).stride()
        self.nbytes = like.numel() * like.itemsize
        self.phase = self.version = 0
        self.offsets, self._room = piece_offsets(tier, self.nbytes)
        self._kept: tuple[list[int], int] | None = None
        places = 2 if lasts and tier.has_two_places else 1
        self.tier, self.area = placed(tier, self._room * places)
        weakref.finalize(self, self.tier.release, self.area).atexit = False

    def _memory(self, nbytes: int, device: torch.device | None = None) -> torch.Tensor:
        """Return new bytes, which the tier can read to and write from."""
        return bytes_at_phase(nbytes, self.phase, self.tier.alignment_bytes, device or self.device)

    def _shaped(self, memory: torch.Tensor) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        begin = memory.storage_offset() // self.dtype.itemsize
        return made.set_(memory.untyped_storage(), begin, self.shape, self.stride)

    def read(self, device: torch.device | None = None) -> tuple[torch.Tensor, Tickets]:
        """Begin to fetch the tensor; return it with what `wait` has to wait for."""
        memory = self._memory(self.nbytes, device)
        pieces = zip(self.offsets, memory.split(PIECE_BYTES), strict=True)
        return self._shaped(memory), [self.tier.read(self.area, k, part) for k, part in pieces]

    def fetch(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the tensor in new memory, of another device if one is given."""
        with _unseen():
            made, tickets = self.read(device)
            self.wait(tickets)
        return made

    def begin_write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Tickets]:
        """Begin to write a tensor's values.

        Return the memory that must not change before `wait` has waited for the tickets.
        """
        self.version += 1
        with _unseen():
            if tensor.stride() != self.stride or tensor.dtype != self.dtype:
                tensor = self._shaped(self._memory(self.nbytes, tensor.device)).copy_(tensor)
            self.phase = tensor.data_ptr() % self.tier.alignment_bytes
            pieces = enumerate(_bytes_of(tensor).split(PIECE_BYTES))
            return tensor, [self._begin(number, part) for number, part in pieces]

    def _begin(self, number: int, memory: torch.Tensor) -> Any:
        """Begin to write a piece, beside the one that is kept."""
        if self._kept is not None:
            kept = self._kept[0][number]
            self.offsets[number] = kept + (self._room if kept < self._room else -self._room)
        return self.tier.write(self.area, self.offsets[number], memory)

    def keep(self) -> None:
        """Have what is written from now on leave the present values where they are."""
        self._kept = self.offsets.copy(), self.phase

    def has_changed(self) -> bool:
        """Return whether anything was written since `keep`."""
        return self._kept is None or self._kept[0] != self.offsets

    def go_back(self) -> None:
        """Have the values of the last `keep`."""
        assert self._kept is not None
        self.offsets, self.phase = self._kept[0].copy(), self._kept[1]

    def write(self, tensor: torch.Tensor) -> None:
        """Write a tensor's values, complete when this returns."""
        self.wait(self.begin_write(tensor)[1])

    def fetch_part(self, number: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the elements of a piece, in their order in memory."""
        with _unseen():
            size = min(PIECE_BYTES, self.nbytes - number * PIECE_BYTES)
            memory = self._memory(size, device)
            self.wait([self.tier.read(self.area, self.offsets[number], memory)])
            return memory.view(self.dtype)

    def write_part(self, number: int, values: torch.Tensor) -> None:
        """Write the elements of a piece."""
        self.version += 1
        with _unseen():
            if values.data_ptr() % self.tier.alignment_bytes != self.phase:
                memory = self._memory(values.nbytes, values.device)
                values = memory.view(self.dtype).copy_(values)
            self.wait([self._begin(number, _bytes_of(values))])

    def wait(self, tickets: Tickets) -> None:
        """Wait for transfers; none is under way when one has failed."""
        try:
            for ticket in tickets:
                self.tier.wait(ticket)
        except BaseException:
            finish(self.tier, tickets)
            raise

    def in_memory(self) -> torch.Tensor | None:
        """Return the tensor in the tier's own memory, on which the host computes, if it has any."""
        memory = self.tier.memory(self.area)
        return None if memory is None else self._shaped(memory)


@contextmanager
def _unseen() -> Iterator[None]:
    """Run operations below autograd, and unseen by modes."""
    with dispatch.without_functions(), dispatch.without_modes(), torch.no_grad():
        yield


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, in the order in which they lie in memory."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return bytes_within(tensor.untyped_storage(), begin, tensor.numel() * tensor.itemsize)


fetch: Callable[[Home], torch.Tensor] = Home.fetch
"""Function by which operations on tensors at home get the bytes of a home."""


class AwayTensor(torch.Tensor):
    """Tensor whose bytes are at home in a tier; views of it are made again at each use."""

    __torch_function__ = pointers.OPERATIONS_ONLY  # type: ignore[assignment]
    is_away = True
    home: Home
    steps: tuple[_Step, ...]
    """Calls by which a view comes from the whole tensor."""
    add_gradient: Callable[[torch.Tensor], None]
    """Function that adds to the gradient of a parameter, which stays in the tier."""

    @staticmethod
    def of(home: Home, like: torch.Tensor | None = None, steps: tuple[_Step, ...] = ()) -> Any:
        """Return a tensor at home; a view of one has the form of `like`, and is made by `steps`."""
        form = home if like is None else like
        made = pointers.tensor_without_bytes(AwayTensor, form, home.device)
        made.home, made.steps = home, steps
        return made

    def fetched(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the tensor in new memory, of another device if one is given."""
        return self._view_of(self.home.fetch(device))

    def _view_of(self, whole: torch.Tensor) -> torch.Tensor:
        for function, args, kwargs in self.steps:
            whole = function(whole, *args, **kwargs)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], AwayTensor):
            return args[0]._viewed(func, args[1:], kwargs)
        if any(_has_away(value) and len(value) > 1 for value in args) and _is_each(func):
            for one in _each(args):
                func(*one, **kwargs)
            return None
        return _run(func, args, kwargs)

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _unseen():
            form = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            seen = func(form, *args, **kwargs)
        if isinstance(seen, torch.Tensor):
            return AwayTensor.of(self.home, seen, (*self.steps, (func, args, kwargs)))
        return type(seen)(
            AwayTensor.of(self.home, part, (*self.steps, (_part(func, k), args, kwargs)))
            for k, part in enumerate(seen)
        )

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; a new one has its values taken over."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        mine = self.shape, self.dtype, self.device
        if (values.shape, values.dtype, values.device) != mine:
            raise RuntimeError(
                f"a tensor whose bytes are in a second tier keeps its shape, type and device, "
                f"{tuple(self.shape)}, {self.dtype} and {self.device}: change them before the "
                "model is wrapped with offload_state="
            )
        if not (isinstance(values, AwayTensor) and values.home is self.home):
            with torch.no_grad():
                self.copy_(values)

    def _shared(self, *_: Any, **__: Any) -> Any:
        """Raise RuntimeError: there is no memory that an array or a process could share."""
        raise RuntimeError(
            "a tensor whose bytes are in a second tier has no memory that others could share: "
            "take that of a copy, tensor.detach().clone()"
        )

    numpy = __dlpack__ = storage = share_memory_ = _shared

    def is_shared(self) -> bool:
        """Return False."""
        return False

    def data_ptr(self) -> int:
        """Return 0."""
        return 0

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.fetched().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            return repr(_as_plain(self))

    def __format__(self, form: str) -> str:
        with torch.no_grad():
            return format(_as_plain(self), form)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = _as_plain(self)
        made: torch.Tensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy(_as_plain(self)).__reduce_ex__(protocol)


def _as_plain(tensor: AwayTensor) -> torch.Tensor:
    """Return a tensor with its values in memory, a parameter where it is one."""
    values = tensor.fetched().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _part(func: Any, number: int) -> Callable[..., torch.Tensor]:
    def part(*args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = func(*args, **kwargs)[number]
        return found

    return part


def _has_away(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(one, AwayTensor) for one in value)


def _each(args: Sequence[Any]) -> Iterable[list[Any]]:
    """Return the arguments of a call on lists for each entry of these."""
    count = max(len(value) for value in args if _has_away(value))
    for k in range(count):
        yield [
            [value[k]]
            if isinstance(value, list | tuple)
            and len(value) == count
            and isinstance(value[k], torch.Tensor)
            else value
            for value in args
        ]


def _is_each(func: Any) -> bool:
    """Return whether an operation changes each entry of lists by itself."""
    is_listed = "_foreach_" in func.name()
    return is_listed and all(r.alias_info is not None for r in func._schema.returns)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes."""
    arguments = enumerate(core.schema_arguments(func))
    names = [(k, a.name) for k, a in arguments if a.alias_info and a.alias_info.is_write]
    found = [args[k] if k < len(args) else kwargs.get(name) for k, name in names]
    return [leaf for leaf in core.tree_flatten(found)[0] if isinstance(leaf, torch.Tensor)]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on tensors fetched for it; write those it changed."""
    leaves, spec = core.tree_flatten((args, kwargs))
    whole: dict[int, tuple[Home, torch.Tensor]] = {}
    given: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, AwayTensor) and id(leaf) not in given:
            key = id(leaf.home)
            if key not in whole:
                whole[key] = leaf.home, fetch(leaf.home)
            given[id(leaf)] = leaf._view_of(whole[key][1])
    args, kwargs = core.tree_unflatten([given.get(id(leaf), leaf) for leaf in leaves], spec)
    result = func(*args, **kwargs)
    away = {id(given[id(leaf)]): leaf for leaf in leaves if id(leaf) in given}
    changed = {id(tensor) for tensor in _written(func, args, kwargs)}
    homes = {id(away[key].home) for key in changed if key in away}
    for key in homes:
        home, values = whole[key]
        home.write(values)
    found, spec = core.tree_flatten(result)
    return core.tree_unflatten([away.get(id(value), value) for value in found], spec)
