"""A session that is left and entered again: forward and backward of a model, the loss outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch

from rotor._pytorch import dispatch
from rotor.dtr.context import running
from rotor.dtr.records import Needs
from rotor.dtr.runtime import Session
from rotor.dtr.storages import StorageRef
from rotor.meter.allocator import Segment

__all__ = ["StepSession", "Unknown", "learn_needs"]

Unknown = list[tuple[Needs, int]]
"""Operators whose needs had to be guessed, and the bytes of the generator's state before each."""

_READY, _RAN = "ready", "ran "


class Holding(Protocol):
    """What keeps gradients back that could be added to others."""

    added: int

    @property
    def is_holding(self) -> bool:
        """Whether there are any."""

    def add(self) -> None:
        """Add them, so that they take no memory."""


class StepSession(Session):
    """A session whose program pauses. What was evicted stays so, and what is known is kept.

    Parameters
    ----------
    limit
        Bytes above the level at the beginning.
    device
        The device whose memory counts.
    before_write
        Called before the bytes change of a storage that is not computed by the program; a copy
        that it makes, it returns, so that it counts.
    **settings
        As for `Session`.

    Attributes
    ----------
    additions
        Gradients of the running backward that wait, and go where memory is short.
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
        self._before_write = before_write
        self._foreign: dict[int, StorageRef] = {}
        self._mark: Callable[[str], None] | None = None
        self._unknown: Unknown = []
        self.additions: Holding | None = None

    # -- what a session does on its own, and what is noted of it

    def _adopt(self, storage: torch.UntypedStorage, is_foreign: bool) -> StorageRef:
        ref = super()._adopt(storage, is_foreign)
        if is_foreign:
            self._foreign[ref.key] = ref
        return ref

    def _protect(self, node: int) -> int:
        copied = self._before_write(self._storage(node))
        if copied is not None:
            self._adopt(copied, False)
        return super()._protect(node)

    # -- operators whose needs are not known, under a meter, which keeps others from measuring them

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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Operators are watched while it lasts.

        Raises
        ------
        RuntimeError
            A budget holds already: they do not nest.
        """
        with running(self):
            yield

    def aim(self, wished: int) -> None:
        """Keep within so many bytes where that is possible, and within the limit in any case."""
        self._book.limit(max(wished, 0))

    def leave_room(self, nbytes: int, least: int) -> None:
        """Evict until `nbytes` are left of the limit; BudgetError: fewer than `least` are."""
        with dispatch.without_modes():
            self._make_room(nbytes, least)

    @property
    def current_bytes(self) -> int:
        """What is in memory now, above the level at the beginning."""
        return int(self._book.counters()["current_bytes"])

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made outside for as long as it lives."""
        self._see_fresh(tensor)

    # -- storages while the session is paused

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of a tensor was made in this session."""
        key = dispatch.storage_key(tensor.untyped_storage())
        ref = self._table.get(key)
        return ref is not None and self._foreign.get(key) is not ref

    def protect(self, storage: torch.UntypedStorage) -> None:
        """Before a storage is written to: compute what depends on it, and keep that in memory."""
        ref = self._table.get(dispatch.storage_key(storage))
        if ref is not None and self._is_open:
            with self._lock, dispatch.without_modes():
                super()._protect(ref.node)

    def has_lost(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether something was evicted that was computed from these tensors, written to since.

        What was not evicted is kept in memory from now on.
        """
        for tensor in tensors:
            ref = self._table.get(dispatch.storage_key(tensor.untyped_storage()))
            if ref is None:
                continue
            nodes = self._book.dependents(ref.node)
            if not all(self._book.describe(node).is_material for node in nodes):
                return True
            with dispatch.without_modes():
                self._restore(nodes)
        return False

    def close(self, *, warn: bool = True) -> None:
        """Bring back what is evicted and still in use, and forget everything."""
        with dispatch.without_modes():
            super().close(warn=warn)
        self._foreign.clear()
        self._mark = self.additions = None


def learn_needs(unknown: Unknown, segments: Iterable[Segment]) -> None:
    """Note what operators took while a meter ran.

    Parameters
    ----------
    unknown
        From `StepSession.mark_unknown`.
    segments
        The parts that were metered; others are passed over.
    """
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
