"""Interface of a second tier of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rotor import _core

_LEAST_BYTES = 1 << 20
"""Bytes each way from which transfers show a speed."""


@dataclass
class Traffic:
    """Transfers of a tier that have been waited for.

    Attributes
    ----------
    written_bytes, read_bytes
        Bytes that were moved.
    writing_ns, reading_ns
        Time in which they moved.
    writes, reads
        Number of transfers.
    waited_ns
        Time for which a device waited for them, if `Tier.wait` itself returns at once.
    """

    written_bytes: int = 0
    read_bytes: int = 0
    writing_ns: int = 0
    reading_ns: int = 0
    writes: int = 0
    reads: int = 0
    waited_ns: int = 0

    def add(self, nbytes: int, ns: int, *, is_write: bool) -> None:
        """Count a transfer.

        Parameters
        ----------
        nbytes
            Its bytes.
        ns
            Nanoseconds in which they moved.
        is_write
            True if they were written.
        """
        if is_write:
            self.written_bytes += nbytes
            self.writing_ns += ns
            self.writes += 1
        else:
            self.read_bytes += nbytes
            self.reading_ns += ns
            self.reads += 1

    def since(self, earlier: Traffic) -> Traffic:
        """Return the transfers after an earlier moment."""
        return Traffic(*(getattr(self, f) - getattr(earlier, f) for f in self.__annotations__))

    def take(self, other: Traffic) -> None:
        """Take over the figures of another object."""
        for name in self.__annotations__:
            setattr(self, name, getattr(other, name))

    def rates(self, latency_ns: int) -> tuple[float, float] | None:
        """Return the bytes per second of writes and of reads; ``None`` where few bytes moved.

        Each transfer takes `latency_ns` beside the time of its bytes.
        """
        if min(self.written_bytes, self.read_bytes) < _LEAST_BYTES:
            return None
        writing = self.writing_ns - self.writes * latency_ns
        reading = self.reading_ns - self.reads * latency_ns
        return (self.written_bytes / max(writing, 1) * 1e9, self.read_bytes / max(reading, 1) * 1e9)

    def copy(self) -> Traffic:
        """Return the same figures as another object."""
        return self.since(Traffic())


class TransferError(OSError):
    """Transfer of a tier that failed, or that has brought other bytes than were written."""


class Tier(ABC):
    """Second tier of memory: five methods that any place with room for bytes can offer.

    Bytes are given and taken as tensors of type uint8 and one dimension. Transfers are in the order
    in which they were begun: a read that is begun after a write to its place returns what the write
    brought. All methods may be called from several threads.

    Attributes
    ----------
    alignment_bytes
        Power of two: offsets are multiples of it, and a read goes to an address that equals,
        modulo this number, the address of the write. 1 leaves both free.
    least_bytes
        Size of the smallest value that is worth a transfer.
    wears_out
        True if bytes written use up its life, which reports then name.
    duplex
        True if writes and reads do not wait for each other.
    device_types
        Types of the devices whose memory it reads and writes.
    traffic
        Transfers so far, if the tier counts them.
    has_memory
        True if the host computes with its bytes, as of `memory`.
    has_two_places
        True if what is written to a home stays beside what the last finished step has left there.
    beneath
        Slower tier of the same devices, for what this one has no room for; ``None``: none.
    """

    alignment_bytes: int = 1
    least_bytes: int = 1 << 16
    duplex: bool = False
    wears_out: bool = False
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})
    traffic: Traffic | None = None
    has_memory: bool = False
    has_two_places: bool = False
    beneath: Tier | None = None

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Return an area for one training step; raise OSError if there is no room.

        Parameters
        ----------
        nbytes
            Bytes that the step will use at most, at offsets of its own.

        Returns
        -------
        object
            The area, as the other methods take it.
        """

    @abstractmethod
    def write(self, area: Any, offset: int, source: torch.Tensor) -> Any:
        """Begin to copy bytes to an area; return a ticket for `wait`.

        Parameters
        ----------
        area
            Result of `allocate`.
        offset
            First byte in the area.
        source
            Bytes, unchanged until the ticket has been waited for.

        Returns
        -------
        object
            A ticket.
        """

    @abstractmethod
    def read(self, area: Any, offset: int, target: torch.Tensor) -> Any:
        """Begin to copy bytes from an area; return a ticket for `wait`.

        Parameters
        ----------
        area, offset
            As of the write.
        target
            New memory of as many bytes, read by nobody until the ticket has been waited for.

        Returns
        -------
        object
            A ticket.
        """

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Wait until a transfer is complete for the operations that follow on its device.

        Errors of the transfer are raised here, also if a ticket is waited for again.
        """

    @abstractmethod
    def release(self, area: Any) -> None:
        """Free an area; the transfers of the step have been waited for."""

    def reaches(self, device: torch.device) -> bool:
        """Return whether the tier reads and writes the memory of a device."""
        return device.type in self.device_types

    def memory(self, area: Any) -> torch.Tensor | None:
        """Return the bytes of an area where the host computes with them; ``None``: nowhere.

        Transfers to and from the area have ended.
        """
        return None

    def spare_bytes(self) -> int | None:
        """Return the bytes of the largest area that it has room for; ``None``: any."""
        return None

    def room(self, nbytes: int) -> int:
        """Return the bytes of an area that a buffer takes, also in the tier beneath."""
        return _core.tier_room(self.alignment_bytes, nbytes)

    def close(self) -> None:  # noqa: B027
        """Give up the place; by default nothing has to be done."""


def placed(tier: Tier, nbytes: int) -> tuple[Tier, Any]:
    """Return a tier that has room for an area, the given one or one beneath it, and the area."""
    while tier.beneath is not None:
        try:
            return tier, tier.allocate(nbytes)
        except OSError:
            tier = tier.beneath
    return tier, tier.allocate(nbytes)


def bytes_at_any_phase(nbytes: int, alignment: int) -> int:
    """Return the bytes of memory in which so many find an address of any phase."""
    return nbytes + alignment - 1


def bytes_at_phase(nbytes: int, phase: int, alignment: int, device: torch.device) -> torch.Tensor:
    """Return new bytes whose address has a phase modulo an alignment."""
    size = bytes_at_any_phase(nbytes, alignment)
    room = torch.empty(size, dtype=torch.uint8, device=device)
    begin = (phase - room.data_ptr()) % alignment
    return room[begin : begin + nbytes]


def bytes_within(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a storage as a tensor that shares its memory."""
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage, begin, (nbytes,), (1,))
