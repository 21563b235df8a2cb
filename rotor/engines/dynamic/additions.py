"""Gradients that a nested backward adds early, and the state of a model before a session.

Fetches of parameters in a second tier are operators of a session: it counts what they make, and
frees it; what is computed again fetches again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from rotor._core import PIECE_BYTES
from rotor._pytorch import core, devices, dispatch
from rotor._pytorch.pointers import Place
from rotor.dtr.operators import ODD_OPERATORS, Treatment
from rotor.tier import homes
from rotor.tier.homes import AwayTensor, Home


class Undo:
    """Saved values of tensors that a forward writes to."""

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self._device = device
        self._modules = modules
        self._slots = [
            (where, name, where[name], where[name].shape)
            for m in modules
            for where, name in core.buffer_slots(m)
        ]
        self._keys: set[int] | None = None
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._is_open = True
        self.inputs: list[torch.Tensor] = []
        self.random_state = devices.generator_of(device).get_state()

    def save(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Keep a copy of a storage of the model or its inputs; return the new copy."""
        if not self._is_open:
            return None
        if self._keys is None:
            parameters = [
                where[name] for m in self._modules for where, name in core.parameter_slots(m)
            ]
            tensors = [*parameters, *(b for _, _, b, _ in self._slots), *self.inputs]
            self._keys = {
                dispatch.storage_key(t.untyped_storage())
                for t in tensors
                if t.layout is torch.strided
            }
        key = dispatch.storage_key(storage)
        if key not in self._keys or key in self._saved:
            return None
        copied: torch.UntypedStorage = storage.clone()
        self._saved[key] = (storage, copied)
        return copied

    def run(self) -> None:
        """Restore everything."""
        for storage, saved in self._saved.values():
            storage.resize_(saved.nbytes())
            storage.copy_(saved)
        for where, name, buffer, shape in self._slots:
            where[name] = buffer
            if buffer.shape != shape:
                buffer.resize_(shape)
        devices.generator_of(self._device).set_state(self.random_state)

    def clear(self) -> None:
        """Drop all copies."""
        self._is_open = False
        self._saved = {}
        self._slots = []
        self.inputs = []
        self.random_state = torch.empty(0)


class Additions:
    """Additions of a nested backward to existing gradients of `leaves`.

    Autograd would return all gradients at the end, with a second copy of them in memory. Gradients
    of leaves that get no other part in the running backward, and that no hook waits for, are added
    in place, and those of leaves in a second tier leave for it. With `waits`, they are kept until
    `finish` or `add`, after a call of `prepare` with each; there, if their leaf is. `leave_room` is
    called with the bytes that a transfer takes; `is_idle` says which nodes have no gradients for
    leaves. In a trial, gradients leave for nowhere.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        *,
        waits: bool,
        is_trial: bool,
        prepare: Callable[[torch.Tensor], object],
        leave_room: Callable[[int, int], object],
        is_idle: Callable[[Any], bool],
    ) -> None:
        self._waits = waits
        self._is_trial = is_trial
        self._prepare = prepare
        self._leave_room = leave_room
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._taken: set[int] = set()
        self._earlier: list[dispatch.Backward] = []
        self.added = 0
        """Number of added gradients."""
        found = [leaf for leaf in leaves if _exists(leaf) and (core.is_away(leaf) or not is_trial)]
        node = dispatch.current_node()
        edges = dispatch.edges_of_leaves(node, is_idle, may_return=is_trial) if found else None
        self._leaves = [leaf for leaf in found if edges is not None and edges.get(id(leaf)) == 1]

    @property
    def is_holding(self) -> bool:
        """True if gradients wait in memory to be added."""
        return not all(core.is_away(gradient) for _, gradient in self._held)

    def __enter__(self) -> Self:
        self._earlier = dispatch.running_backwards()
        for leaf in self._leaves:
            self._hooks.append(leaf.register_hook(self._taker(leaf)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._earlier.clear()

    def _taker(self, leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def take(gradient: torch.Tensor) -> torch.Tensor:
            # Code of the backward may ask for a gradient of its own.
            if not _fits(leaf, gradient) or dispatch.in_nested_backward(self._earlier):
                return gradient
            if self._waits or isinstance(leaf, AwayTensor):
                self._prepare(gradient)
            if isinstance(leaf, AwayTensor) and self._is_trial:
                self._make_room(leaf, 2)
            elif isinstance(leaf, AwayTensor) and self._waits:
                self._held.append((leaf, self._parked(leaf, gradient)))
            elif self._waits:
                self._held.append((leaf, gradient.detach()))
            else:
                self._add(leaf, gradient)
            self._taken.add(id(leaf))
            return _nothing(gradient)

        return take

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        if isinstance(leaf, AwayTensor):
            # Two are fetched, or one by an operator, or copied into the order of its home.
            self._make_room(leaf, 2)
            with dispatch.modes_left():
                leaf.add_gradient(gradient)
        else:
            assert leaf.grad is not None
            with torch.no_grad():
                leaf.grad += gradient
        self.added += 1

    def _make_room(self, leaf: AwayTensor, count: int = 1) -> None:
        nbytes = count * (leaf.home.nbytes + leaf.home.tier.alignment_bytes)
        self._leave_room(nbytes, nbytes)

    def _parked(self, leaf: AwayTensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient whose bytes have left for the tier of its leaf."""
        home = Home(leaf.home.tier, leaf)
        self._make_room(leaf)
        home.write(gradient)
        made: torch.Tensor = AwayTensor.of(home)
        return made

    def add(self) -> None:
        """Add the gradients that wait in memory, outside any mode."""
        waiting, self._held = self._held, []
        for leaf, gradient in waiting:
            if core.is_away(gradient):
                self._held.append((leaf, gradient))
            else:
                self._add(leaf, gradient)

    def drop(self) -> None:
        """Forget the waiting gradients."""
        self._held.clear()

    def finish(
        self, asked: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Add the waiting gradients; return the rest for autograd."""
        self.add()
        while self._held:
            self._add(*self._held.pop(0))
        return [
            None if id(leaf) in self._taken else gradient
            for leaf, gradient in zip(asked, gradients, strict=True)
        ]


class Arrivals:
    """Gradients that a running backward has still to make for leaves that have none in memory."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.grad is None and not core.is_away(leaf)]
        self._missing = {id(leaf): leaf.nbytes for leaf in self._leaves}
        self._hooks: list[Any] = []

    @property
    def missing_bytes(self) -> int:
        """Bytes of the gradients that are not computed yet."""
        return sum(self._missing.values())

    def __enter__(self) -> Self:
        for key, leaf in zip(self._missing, self._leaves, strict=True):
            self._hooks.append(leaf.register_hook(self._taker(key)))
        return self

    def _taker(self, key: int) -> Callable[[torch.Tensor], None]:
        missing = self._missing

        def take(_: torch.Tensor) -> None:
            missing.pop(key, None)

        return take

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._leaves.clear()


def _exists(leaf: torch.Tensor) -> bool:
    """Return whether a tensor has a gradient to which another can simply be added."""
    if isinstance(leaf, AwayTensor):
        # One hook is that of its state.
        return not core.hooks_of([leaf]) and not core.has_accumulation_hooks(leaf, 1)
    gradient = leaf.grad if leaf.is_leaf else None
    return (
        gradient is not None
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and not gradient.requires_grad
        and not core.hooks_of([leaf])
        and not core.has_accumulation_hooks(leaf)
    )


def _fits(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    existing = leaf if core.is_away(leaf) else leaf.grad
    return (
        existing is not None
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and gradient.dtype == existing.dtype
        and gradient.device == existing.device
        and gradient.shape == existing.shape
    )


def _nothing(gradient: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor in the form of a gradient, for autograd to carry."""
    number = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return number.expand(gradient.shape)


_LIBRARY = torch.library.Library("rotor_tier", "FRAGMENT")
# What is known of an operator is kept by its numbers: versions, of which there is no end, are none.
_LIBRARY.define("fetch(int home, Tensor version) -> Tensor")
_FETCH = torch.ops.rotor_tier.fetch.default
_homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
_versions: weakref.WeakKeyDictionary[Home, tuple[int, torch.Tensor]] = weakref.WeakKeyDictionary()


@torch.library.impl(_LIBRARY, "fetch", "CompositeExplicitAutograd")
def _fetch(number: int, version: torch.Tensor) -> torch.Tensor:
    home = _homes[number]
    if home.version != int(version):
        raise RuntimeError(
            f"a parameter in a second tier, of shape {tuple(home.shape)}, was written to in place "
            "between its forward and its backward, which computes again what was computed from "
            "it: write to it, or step the optimizer, after the backward"
        )
    # What is computed again has to lie in its storage as before, which a tier may not read to.
    with dispatch.without_functions(), dispatch.without_modes(), torch.no_grad():
        made = torch.empty_strided(home.shape, home.stride, dtype=home.dtype, device=home.device)
        parts = made.as_strided((made.numel(),), (1,)).split(PIECE_BYTES // made.itemsize)
        for k, part in enumerate(parts):
            part.copy_(home.fetch_part(k))
    return made


def _needs(args: Any) -> tuple[int, int]:
    home = _homes[args[0]]
    return home.nbytes, min(home.nbytes, PIECE_BYTES) + home.tier.alignment_bytes


ODD_OPERATORS["rotor_tier::fetch"] = Treatment(needs=_needs)


def _by_operator(home: Home) -> torch.Tensor:
    if not dispatch.has_modes():
        # Another thread's, which no session sees.
        return home.fetch()
    _homes[id(home)] = home
    version, number = _versions.get(home, (None, None))
    if number is None or version != home.version:
        with dispatch.without_modes():
            number = torch.tensor(home.version)
        _versions[home] = home.version, number
    made: torch.Tensor = _FETCH(id(home), number)
    return made


AS_OPERATORS: Place = (homes, "fetch", _by_operator)
"""Place of the fetches of tensors at home, with those by operators, which a session sees.

A session is entered before, which waits for those of other threads. What runs again raises
RuntimeError if its home was written to since.
"""
