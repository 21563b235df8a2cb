"""Emitted lines that move values between memory and a second tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rotor.engines.graph.actions import Action, Kind, offloaded, root_names
from rotor.engines.graph.lowering import Lowered

__all__ = ["Moves"]


class _Lines(Protocol):
    """Writer of a function, with a table of its variables."""

    lines: list[str]

    def define(self, name: str, storages: Sequence[int]) -> None:
        """Note a variable on storages."""

    def drop(self, storages: Sequence[int]) -> None:
        """Write the end of all variables on storages."""


class Moves:
    """Writer of the moves between memory and a second tier."""

    def __init__(
        self,
        lowered: Lowered,
        actions: Sequence[Action],
        kept: Sequence[set[int]],
        dying: Sequence[set[int]],
    ) -> None:
        self._names = root_names(lowered)
        self._actions = actions
        self._kept = kept
        self._dying = dying
        self._written: dict[int, list[int]] = {}
        found = offloaded(actions)
        for storage, positions in found.items():
            for position in positions:
                self._written.setdefault(position, []).append(storage)
        self._offloaded = set(found)
        self.pending: set[int] = set()
        """Storages that are being fetched, and have not been read."""

    def move(self, writer: _Lines, position: int) -> None:
        """Write the end of an offload, or the begin of a fetch."""
        kind, storage = self._actions[position][:2]
        if kind is Kind.FETCH:
            if storage in self._kept[position]:
                writer.lines.append(f"{self._names[storage]} = tier.fetch({storage})")
                writer.define(self._names[storage], [storage])
                self.pending.add(storage)
            return
        self.receive(writer, [storage])
        if storage in self._offloaded:
            writer.lines.append(f"tier.written({storage})")
        writer.drop(sorted(self._dying[position]))

    def send(self, writer: _Lines, position: int) -> None:
        """Write the begin of the offloads of new values."""
        for storage in self._written.get(position, ()):
            writer.lines.append(f"tier.write({storage}, {self._names[storage]})")

    def receive(self, writer: _Lines, storages: Sequence[int]) -> None:
        """Write the waits for fetched storages that are about to be read."""
        for storage in storages:
            if storage in self.pending:
                self.pending.discard(storage)
                writer.lines.append(f"tier.fetched({storage})")
