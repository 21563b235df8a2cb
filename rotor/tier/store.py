"""Values of one session in a second tier, without a layout that was planned."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import dispatch
from rotor.tier.interface import Tier, Traffic, bytes_at_phase, bytes_within, placed
from rotor.tier.offload import Offload, check_device

_OTHER = 1.5


@dataclass
class _Copy:
    """Copy of a storage in an area of its tier, which is free again when it is dropped."""

    tier: Tier
    area: Any
    nbytes: int
    phase: int
    offsets: list[int]
    device: torch.device

    def __del__(self) -> None:
        self.tier.release(self.area)


class TierStore:
    """Second tier of one session of `rotor.dtr`, for values that leave memory one by one.

    A value is complete in the tier before it leaves memory, and complete in memory before it is
    read. It is written in pieces, so that a fetch to another alignment takes little more memory.

    Parameters
    ----------
    tier
        Tier, or the tier of a model with its limit and its link, ``model.offload``.
    limit_bytes
        Most bytes there at one time, those of alignment included; ``None`` for any.

    Attributes
    ----------
    limit_bytes
        Most bytes there; ``None`` for any.
    traffic
        Values that were written and fetched.
    """

    def __init__(self, tier: Tier | Offload, limit_bytes: int | None = None) -> None:
        self._offload = tier if isinstance(tier, Offload) else Offload(tier, limit_bytes)
        self.limit_bytes = self._offload.limit_bytes
        self.traffic = Traffic()
        counted = self.tier.traffic
        self._before = None if counted is None else counted.copy()

    def __repr__(self) -> str:
        return f"TierStore({self.tier!r}, {self.limit_bytes})"

    @property
    def tier(self) -> Tier:
        """Tier."""
        return self._offload.tier

    @property
    def waited_ns(self) -> int:
        """Time that the session waited for the tier."""
        return self.traffic.writing_ns + self.traffic.reading_ns

    def learn(self) -> None:
        """Count from now on on the speed that the tier has shown, if it is another one.

        Nothing is learned from a tier that does not count its transfers, nor from few bytes.
        """
        offload, link, traffic = self._offload, self._offload.link, self.tier.traffic
        if link is None or traffic is None or self._before is None:
            return
        rates = traffic.since(self._before).rates(link.latency_ns)
        if rates is None or not offload.may_learn:
            return
        planned = link.write_bytes_per_s, link.read_bytes_per_s
        share = offload.planned_share
        seen = [share * rate / speed for rate, speed in zip(rates, planned, strict=True)]
        if any(not 1 / _OTHER < k < _OTHER for k in seen):
            offload.learn(*rates)

    def extra_bytes(self, nbytes: int) -> int:
        """Return the bytes that a fetch takes for a moment beside the fetched ones."""
        alignment, piece = self.tier.alignment_bytes, _core.PIECE_BYTES
        buffers = min(2, -(-nbytes // piece)) if alignment > 1 else 0
        return buffers * (min(nbytes, piece) + alignment)

    def link_on(self, device: torch.device) -> tuple[Any, ...]:
        """Return the link to a device's memory, measured at the first time.

        Raises
        ------
        ValueError
            The tier does not reach the device.
        """
        check_device(self.tier, device)
        link = self._offload.known_link(device)
        return replace(link, padding_bytes=self.tier.room(1)).core

    def write(self, storage: torch.UntypedStorage) -> _Copy:
        """Return a complete copy of a storage's bytes.

        Raises
        ------
        OSError
            The tier has no room, or a transfer failed.
        """
        begun = time.monotonic_ns()
        tier = self.tier
        tickets = []
        with dispatch.without_functions(), dispatch.without_modes():
            source = bytes_within(storage, 0, storage.nbytes())
            offsets, nbytes = piece_offsets(tier, len(source))
            phase = source.data_ptr() % tier.alignment_bytes
            tier, area = placed(tier, nbytes)
            copy = _Copy(tier, area, len(source), phase, offsets, source.device)
            try:
                for offset, piece in zip(offsets, source.split(_core.PIECE_BYTES), strict=True):
                    tickets.append(tier.write(copy.area, offset, piece))
                for ticket in tickets:
                    tier.wait(ticket)
            except BaseException:
                finish(tier, tickets)
                raise
        self.traffic.add(len(source), time.monotonic_ns() - begun, is_write=True)
        return copy

    def fetch(self, copy: _Copy) -> torch.UntypedStorage:
        """Return a new storage with the bytes of a copy.

        Raises
        ------
        OSError
            A transfer failed.
        """
        begun = time.monotonic_ns()
        with dispatch.without_functions(), dispatch.without_modes():
            made = torch.UntypedStorage(copy.nbytes, device=copy.device)
            target = bytes_within(made, 0, copy.nbytes)
            phase = target.data_ptr() % copy.tier.alignment_bytes
            tickets: list[Any] = []
            try:
                if phase == copy.phase:
                    self._read(copy, target, tickets)
                else:
                    self._read_shifted(copy, target, tickets)
            except BaseException:
                finish(copy.tier, tickets)
                raise
        self.traffic.add(copy.nbytes, time.monotonic_ns() - begun, is_write=False)
        return made

    def _read(self, copy: _Copy, target: torch.Tensor, tickets: list[Any]) -> None:
        pieces = target.split(_core.PIECE_BYTES)
        for offset, piece in zip(copy.offsets, pieces, strict=True):
            tickets.append(copy.tier.read(copy.area, offset, piece))
        for ticket in tickets:
            copy.tier.wait(ticket)

    def _read_shifted(self, copy: _Copy, target: torch.Tensor, tickets: list[Any]) -> None:
        """Read through two buffers that begin where the tier can read to, by turns."""
        tier = copy.tier
        pieces = target.split(_core.PIECE_BYTES)
        place = (copy.phase, tier.alignment_bytes, copy.device)
        buffers = [bytes_at_phase(len(pieces[0]), *place) for _ in pieces[:2]]
        for k, offset in enumerate(copy.offsets):
            tickets.append(tier.read(copy.area, offset, buffers[k % 2][: len(pieces[k])]))
            if k > 0:
                self._take_piece(tickets[k - 1], pieces[k - 1], buffers[(k - 1) % 2])
        self._take_piece(tickets[-1], pieces[-1], buffers[(len(pieces) - 1) % 2])

    def _take_piece(self, ticket: Any, piece: torch.Tensor, buffer: torch.Tensor) -> None:
        self.tier.wait(ticket)
        piece.copy_(buffer[: len(piece)])


def piece_offsets(tier: Tier, nbytes: int) -> tuple[list[int], int]:
    """Return the places of the pieces of a value in an area, and the bytes of the area."""
    whole, rest = divmod(nbytes, _core.PIECE_BYTES)
    room = tier.room(_core.PIECE_BYTES)
    offsets = [k * room for k in range(whole + (rest > 0))]
    return offsets, whole * room + (tier.room(rest) if rest else 0)


def finish(tier: Tier, tickets: list[Any]) -> None:
    """Wait for the transfers of a step that has failed, so that none is under way afterwards."""
    for ticket in tickets:
        with suppress(Exception):
            tier.wait(ticket)
