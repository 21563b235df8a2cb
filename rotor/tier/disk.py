"""Disk as the second tier of a CPU."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rotor import _core
from rotor.tier.interface import Tier, Traffic, TransferError
from rotor.units import exact_bytes


@dataclass
class _Area:
    begin: int
    end: int
    written: dict[int, _Ticket] = field(default_factory=dict)
    """Last write to each offset: the phase and the checksum of what is there."""


class Space:
    """Range of bytes in which areas are taken and given back.

    An area may be given back at any moment, by a garbage collection too: it is free at the next
    request. `end` is the end of the last area that was ever taken, or of a space of fixed size.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.end = nbytes or 0
        self._is_fixed = nbytes is not None
        self._free: list[tuple[int, int]] = [(0, self.end)] if nbytes else []
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Return begin and end of a free range: the first one that fits, or a new one, if any."""
        with self._lock:
            self._collect()
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= nbytes:
                    self._free[index : index + 1] = (
                        [(begin + nbytes, end)] if end - begin > nbytes else []
                    )
                    return begin, begin + nbytes
            if self._is_fixed:
                return None
            begin = self.end
            if self._free and self._free[-1][1] == begin:
                begin = self._free.pop()[0]
            self.end = begin + nbytes
            return begin, self.end

    def _sizes(self) -> list[int]:
        with self._lock:
            self._collect()
            return [end - begin for begin, end in self._free]

    @property
    def taken_bytes(self) -> int:
        """Bytes of the ranges that are taken."""
        return self.end - sum(self._sizes())

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest free range before the end."""
        return max(self._sizes(), default=0)

    def give_back(self, area: tuple[int, int]) -> None:
        """Free a range."""
        self._returned.append(area)

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(self._free):
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            elif end > begin:
                joined.append((begin, end))
        self._free = joined


@dataclass(slots=True, eq=False)
class _Ticket:
    """Transfer, counted once it has been waited for; a read knows the write that it returns."""

    transfer: _core.Transfer
    nbytes: int
    offset: int
    """First byte in the file."""
    phase: int
    source: _Ticket | None
    is_counted: bool = False

    @property
    def is_write(self) -> bool:
        """True if bytes went to the file."""
        return self.source is None

    def is_damaged(self) -> bool:
        """Return whether a read that is done has brought other bytes than were written."""
        if self.source is None or self.source.nbytes != self.nbytes:
            return False
        self.source.transfer.wait()
        return self.source.transfer.checksum != self.transfer.checksum


class DiskTier(Tier):
    """Second tier in a file, which is gone when the process ends.

    A file in a folder that was named, with homes of parameters in it, stays if the process is
    killed: `rotor.tier.recover` reads the last finished step of the optimizer.

    One thread writes and reads past the page cache, straight from and to the memory of tensors, so
    that the bytes leave memory and nothing is copied.

    Parameters
    ----------
    directory
        Folder on the disk; by default ``$TMPDIR``, else ``/var/tmp``.
    buffered
        True to go through the page cache, on file systems that cannot do otherwise. Pages are
        dropped once they are on the disk; until then they take memory, which control groups count.
        On a file system in memory, such as tmpfs, nothing is gained at all.

    Raises
    ------
    OSError
        The folder cannot hold a file.
    ValueError
        The file system moves nothing past the page cache.
    """

    wears_out = True

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, buffered: bool = False
    ) -> None:
        # A process may change its working directory while a file is in use.
        self.directory = (
            Path(directory) if directory is not None else _default_directory()
        ).absolute()
        self.is_named = directory is not None
        self.buffered = buffered
        self._file = self._opened()
        self.alignment_bytes = self._file.sector_bytes
        self.traffic: Traffic = Traffic()
        self._space = Space()
        self._process = os.getpid()
        self._reserved = 0
        drained_tiers.add(self)

    def _opened(self, name: str | None = None) -> _core.DiskFile:
        """Return a new file."""
        try:
            return _core.DiskFile(self.directory, self.buffered, name)
        except OSError as error:
            if error.errno is not None:
                raise self._failed(
                    error.errno,
                    "no file for offloaded values can be made in this folder; "
                    "offload='disk:FOLDER' or DiskTier(FOLDER) names another one",
                    OSError,
                ) from None
            raise ValueError(
                f"the file system of {self.directory} has no direct input and output (O_DIRECT): "
                "offloaded values would stay in the page cache, which is memory. Name a folder on "
                "a disk, offload='disk:FOLDER'; DiskTier(FOLDER, buffered=True) goes through the "
                "page cache, and control groups count its pages until they are written"
            ) from None

    def name_file(self, name: str) -> None:
        """Take a file with a name, in which homes have two places; it stays after a kill.

        Raise ValueError if anything is in the tier.
        """
        if self._space.taken_bytes:
            raise ValueError(
                f"{self!r} is used by another model, and cannot hold parameters for recovery: make "
                "a tier for this model, of another folder"
            )
        self._file.close()
        self._file = self._opened(name)
        self._space, self._reserved = Space(), 0
        self.has_two_places = True

    def place(self, area: Any, offset: int) -> tuple[int, int]:
        """Return where the last write to an offset is in the file, and its checksum."""
        ticket = area.written[offset]
        return ticket.offset, ticket.transfer.checksum

    def __reduce__(self) -> Any:
        return _made, (str(self.directory) if self.is_named else None, self.buffered)

    def __repr__(self) -> str:
        return f"DiskTier({str(self.directory)!r}{', buffered=True' if self.buffered else ''})"

    def _failed(
        self, number: int | None, text: str, kind: type[OSError] = TransferError
    ) -> OSError:
        number = number or errno.EIO
        return kind(number, f"{os.strerror(number)}: {text}", str(self.directory))

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the file takes on the disk, for all areas that were used at one time."""
        return self._reserved

    @property
    def taken_bytes(self) -> int:
        """Bytes of the file in which something is."""
        return self._space.taken_bytes

    def allocate(self, nbytes: int) -> Any:
        """Return a range of the file, whose blocks on the disk are reserved."""
        place = self._space.take(nbytes)
        assert place is not None
        area = _Area(*place)
        if area.end > self._reserved:
            try:
                self._file.reserve(area.end)
            except OSError as error:
                self.release(area)
                raise self._failed(
                    error.errno,
                    f"offloaded values need {exact_bytes(area.end)} on the disk, which this folder "
                    "does not have; give a folder with more room, or a lower offload_limit",
                    OSError,
                ) from None
            self._reserved = max(self._reserved, area.end)
        return area

    def write(self, area: Any, offset: int, source: torch.Tensor) -> Any:
        """Begin to write a tensor's bytes."""
        ticket = self._begin(area, offset, source, None)
        area.written[offset] = ticket
        return ticket

    def read(self, area: Any, offset: int, target: torch.Tensor) -> Any:
        """Begin to read bytes into a tensor."""
        source = area.written.get(offset)
        phase = target.data_ptr() % self.alignment_bytes
        if source is None or source.phase != phase:
            raise ValueError(
                f"a read at offset {offset} goes to an address of phase {phase}, expected "
                f"{source and source.phase}, the phase of the write"
            )
        return self._begin(area, offset, target, source)

    def _begin(
        self, area: Any, offset: int, memory: torch.Tensor, source: _Ticket | None
    ) -> _Ticket:
        nbytes, address = memory.nbytes, memory.data_ptr()
        if offset < 0 or area.begin + offset + self.room(nbytes) > area.end:
            raise ValueError(
                f"{nbytes} bytes at offset {offset} need {self.room(nbytes)} of the area's "
                f"{area.end - area.begin}"
            )
        begin = area.begin + offset
        transfer = self._file.begin(source is None, address, nbytes, begin, memory)
        return _Ticket(transfer, nbytes, begin, address % self.alignment_bytes, source)

    def wait(self, ticket: Any) -> None:
        """Wait for a transfer; raise OSError if it failed, or brought other bytes."""
        is_write = ticket.is_write
        try:
            ticket.transfer.wait()
            is_damaged = ticket.is_damaged()
        except OSError as error:
            act = "writing" if is_write else "reading"
            raise self._failed(
                error.errno,
                f"{act} {ticket.nbytes} bytes of an offloaded value failed, and with it the "
                "training step; nothing of the model has changed but what the step had done before",
            ) from None
        if is_damaged:
            cure = (
                "the disk has to be checked, and training to go on from what was saved before"
                if os.getpid() == self._process
                else "the process that this one was forked from has written there since: read "
                "before it goes on, or give this one clones"
            )
            raise self._failed(
                errno.EIO,
                f"{ticket.nbytes} bytes of an offloaded value came back from the second tier with "
                f"other bits than were written, at byte {ticket.offset} of its file; {cure}",
            )
        if not ticket.is_counted:
            ticket.is_counted = True
            self.traffic.add(ticket.nbytes, ticket.transfer.busy_ns, is_write=is_write)

    def release(self, area: Any) -> None:
        """Free the range of a step for later ones."""
        self._space.give_back((area.begin, area.end))

    def drain(self) -> None:
        """Wait until no transfer moves."""
        self._file.drain()

    def close(self) -> None:
        """Close the file once its transfers have ended; the disk's space is free then."""
        self._file.close()


def _default_directory() -> Path:
    named = os.environ.get("TMPDIR")
    if named:
        return Path(named)
    # /tmp often lies in memory.
    usual = Path("/var/tmp")
    return usual if usual.is_dir() else Path(tempfile.gettempdir())


def _made(directory: str | None, buffered: bool) -> DiskTier:
    return DiskTier(directory, buffered=buffered)


drained_tiers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Tiers whose transfers a fork waits for: its child shares the memory of this process."""


def _drain() -> None:
    for tier in list(drained_tiers):
        tier.drain()


os.register_at_fork(before=_drain)
