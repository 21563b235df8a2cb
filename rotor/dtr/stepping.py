"""A session that is left and entered again: a model's forward and backward, without the loss."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import torch

from rotor._core import Needs
from rotor._pytorch import backwards, core, dispatch
from rotor._pytorch.pointers import Place
from rotor.common.accounting import LOSS_GRADIENTS
from rotor.dtr.context import running
from rotor.dtr.runtime import Session
from rotor.dtr.storages import StorageRef
from rotor.meter.allocator import Segment

Unknown = list[tuple[Needs, int]]
"""Operators whose needs had to be guessed, and the bytes of the generator's state before each."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_READY, _RAN = "ready", "ran "


class Holding(Protocol):
    """Collection of gradients that wait to be added to others."""

    added: int

    @property
    def is_holding(self) -> bool:
        """True if gradients are waiting."""

    def add(self) -> None:
        """Add them, so that they take no memory."""


class StepSession(Session):
    """Session whose program pauses; evicted results and known needs are kept meanwhile.

    `limit` is in bytes above the level at the beginning. `before_write` is called before the bytes
    of a storage change that the program does not compute: a copy that it makes and returns counts.
    `additions` are gradients of the running backward that wait, and are added when memory is short.
    """

    def __init__(
        self,
        limit: int,
        *,
        device: torch.device,
        before_write: Callable[[torch.UntypedStorage], torch.UntypedStorage | None],
        **settings: Any,
    ) -> None:
        super().__init__(limit, device=device, **settings)
        self._aimed = limit
        self._before_write = before_write
        self._mark: Callable[[str], None] | None = None
        self._unknown: Unknown = []
        self._kept_refs: list[StorageRef] = []
        self.additions: Holding | None = None

    # -- actions that the session takes on its own

    def _protect(self, node: int) -> int:
        copied = self._before_write(self._storage(node))
        if copied is not None:
            self._adopt(copied, False)
        return super()._protect(node)

    # -- operators with unknown needs under a meter, which keeps others from measuring them

    def mark_unknown(self, mark: Callable[[str], None]) -> Unknown:
        """Have a meter's parts begin before and after such operators; for `learn_needs`."""
        if self._is_cpu:
            self._mark = mark
        return self._unknown

    def _make_room(self, nbytes: int, least: int, *, is_wish: bool = False) -> None:
        if self.additions is not None and self.additions.is_holding:
            super()._make_room(nbytes, least, is_wish=True)
            if not self._fits(least):
                self.additions.add()
        super()._make_room(nbytes, least, is_wish=is_wish)
        if self._mark is not None:
            self._mark(_READY)

    def _has_run(self, needs: Needs, state: torch.Tensor | None) -> None:
        if self._mark is not None and not needs.is_measured:
            self._mark(f"{_RAN}{len(self._unknown)}")
            self._unknown.append((needs, 0 if state is None else state.nbytes))

    # -- pausing

    def running(self, *places: Place) -> AbstractContextManager[None]:
        """Watch operators while the context lasts; RuntimeError if a budget is active already."""
        return running(self, places=places)

    def aim(self, wished: int) -> None:
        """Keep within so many bytes if possible, and within the limit in any case."""
        assert self.limit is not None
        self._aimed = wished
        self._book.limit(max(min(wished, self.limit - self._slack_bytes) - self._proof_bytes, 0))

    def _follow(self) -> None:
        self.aim(self._aimed)

    def _warn_of_excess(self) -> None:
        """Give no warning: the meter of the step does."""

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have these tensors in memory whenever the session pauses: after `leave_room`."""
        storages = [part.untyped_storage() for t in tensors for part in core.strided_parts(t)]
        self._kept_refs = [ref for s in storages if (ref := self._handler.reference(s)) is not None]

    def leave_room(self, nbytes: int, least: int) -> None:
        """Evict until `nbytes` of the limit are left; BudgetError: fewer than `least` are."""
        slack_bytes = self._handler.slack_bytes
        if slack_bytes > 0:
            # The allocator may add slack to each of the blocks that a loss makes.
            nbytes += slack_bytes * min(nbytes // slack_bytes, LOSS_GRADIENTS)
        nodes = {ref.node for ref in self._kept_refs if ref() is not None}
        with self._handler, dispatch.without_functions(), dispatch.without_modes():
            self._book.begin(list(nodes))
            self._catch_up()
            self._make_room(nbytes, least)
            self._book.abort()

    @property
    def current_bytes(self) -> int:
        """Bytes in memory now, above the level at the beginning."""
        return int(self._book.counters()["current_bytes"])

    def count(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count tensors that were made outside for as long as they live."""
        for tensor in tensors:
            if tensor is not None:
                self._see_parts(tensor)

    # -- results to which Python refers

    def note_results(self, others: Iterable[torch.Tensor]) -> None:
        """Have `held` know what operators make from now on, and other tensors."""
        self._handler.made = [weakref.ref(tensor) for tensor in others]

    def held(self) -> list[tuple[torch.Tensor, int]]:
        """Return the noted tensors to which Python refers, and how often."""
        return self._handler.held()

    def held_by(
        self, nodes: Iterable[Any], held: Iterable[tuple[torch.Tensor, int]]
    ) -> tuple[Counter[int], set[int]]:
        """Return how often objects are referred to from what the nodes of a graph alone hold.

        Such holders are attributes of functions, wrappers of tensors, and what hooks made of saved
        tensors, with all that only these refer to: Python has no other way to what is inside. The
        references are by `id`; the second result has the holders' numbers. `held` is of now.
        """
        known = {id(tensor): count for tensor, count in held}
        noted = set(map(id, self._handler.made or ()))
        contexts, tensors, packed = backwards.saved_by(nodes)
        holders, references = set(map(id, contexts)), Counter[int]()
        found: dict[int, Any] = {}
        _add(found, references, gc.get_referents(*contexts))
        _add(found, references, packed)
        found |= {id(tensor): tensor for tensor in tensors if type(tensor) not in _PLAIN}
        del contexts, tensors, packed
        waiting = found.keys() - holders
        with dispatch.without_functions():
            while waiting:
                owned = [
                    found[key]
                    for key in waiting
                    if references[key] == (known.get(key) or _holders(found, key, noted))
                ]
                holders.update(map(id, owned))
                parts = _add(found, references, gc.get_referents(*owned))
                bases = {id(base): base for base in backwards.bases_of(owned)}
                found |= bases
                waiting = (parts | bases.keys()) - holders
                del owned, bases
        return references, holders

    def forget_results(self) -> None:
        """Note no results any more."""
        self._handler.made = None

    # -- storages while the session is paused

    def protect(self, storage: torch.UntypedStorage) -> None:
        """Prepare a write to a storage: compute what depends on it, and keep that in memory."""
        ref = self._handler.reference(storage)
        if ref is not None and self._is_open:
            with self._handler, dispatch.without_modes():
                super()._protect(ref.node)
            self.leave_room(0, 0)

    def has_lost(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether a result was evicted that depends on these tensors, written to since.

        Results that were not evicted are kept in memory from now on.
        """
        for tensor in tensors:
            ref = self._handler.reference(tensor.untyped_storage())
            if ref is None:
                continue
            nodes = self._book.dependents(ref.node)
            found = [self._book.describe(node) for node in nodes]
            if not all(node.is_material or node.is_away for node in found):
                return True
            with dispatch.without_modes():
                self._restore(nodes)
        return False

    def close(self, *, warn: bool = True) -> None:
        """Bring back what is evicted and still in use, and forget everything."""
        with dispatch.without_modes():
            super().close(warn=warn)
        self._mark = self.additions = None
        self.forget_results()


def learn_needs(unknown: Unknown, segments: Iterable[Segment]) -> None:
    """Record the needs of operators from `StepSession.mark_unknown` that a meter measured."""
    for before, after in pairwise(segments):
        if before.name != _READY or not after.name.startswith(_RAN):
            continue
        needs, state_bytes = unknown[int(after.name.removeprefix(_RAN))]
        start = before.start_bytes + state_bytes
        made = max(after.start_bytes - start, 0)
        workspace = max(before.peak_bytes - start - made, 0)
        if needs.is_measured:
            made, workspace = max(made, needs.made_bytes), max(workspace, needs.workspace_bytes)
        needs.made_bytes, needs.workspace_bytes, needs.is_measured = made, workspace, True


def _add(found: dict[int, Any], references: Counter[int], values: list[Any]) -> set[int]:
    """Count references to values, which are kept in `found`; return their numbers."""
    keys = list(map(id, values))
    references.update(keys)
    found.update(zip(keys, values, strict=True))
    return set(keys)


def _holders(found: dict[int, Any], key: int, noted: Container[int]) -> int:
    """Return the number of references of Python's to an object in `found` but for that one."""
    # One more belongs to the call.
    count = sys.getrefcount(found[key]) - 2
    weak = weakref.getweakrefs(found[key])
    if isinstance(found[key], torch.Tensor):
        count -= dispatch.owners_of(found[key]) > 1
        if len(weak) == 1 and id(weak[0]) in noted and sys.getrefcount(weak[0]) == 3:
            return count
    return count + len(weak)
