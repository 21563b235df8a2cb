"""Memory of the host up to a limit, and a disk beneath it, as the second tier of an accelerator.

What the host has no room for goes to a file. Its bytes pass through a few buffers in pinned memory,
moved by one thread in the order in which transfers were begun: from a device to a buffer once the
computation has made them, and on to the disk; or from the disk to a buffer, and on to the device
once the computation has reached the allocation of the target. The host's own memory is copied to
and from the buffers as it is.
"""

from __future__ import annotations

import copy
import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from rotor._core import PIECE_BYTES
from rotor.tier.disk import DiskTier, Space, drained_tiers
from rotor.tier.host import LINE_BYTES, Area, HostTier, pinned
from rotor.tier.interface import Tier
from rotor.units import exact_bytes, format_bytes, parse_bytes

STAGING_BYTES = 4 * PIECE_BYTES
"""Pinned memory of the buffers between devices and the disk."""

_PAGE = 4096
_SLAB_BYTES = 1 << 28
"""Pinned memory that is taken at once, or a part of the limit if that is more."""
_SHARE = 32


@dataclass
class _Transfer:
    """Transfer of a piece, complete or failed once it is done."""

    area: Any
    offset: int
    memory: torch.Tensor | None
    """``None`` once it is done: whoever waits for it may free the memory then."""
    is_write: bool
    came: torch.Event | None
    """Moment of the computation after which it may begin; ``None`` for the host's own memory."""
    done: threading.Event = field(default_factory=threading.Event)
    stage: Area | None = None
    ticket: Any = None
    """Transfer between its buffer and the disk."""
    copied: torch.Event | None = None
    error: BaseException | None = None


class StagedTier(Tier):
    """Disk as a tier of accelerators and of the host, by way of buffers in pinned memory."""

    wears_out = True

    def __init__(self, disk: DiskTier) -> None:
        self.disk = disk
        self._host = HostTier()
        self._stages: list[Area] = []
        self._mover = ThreadPoolExecutor(1, "rotor-tier")
        self._lock = threading.Lock()
        self._queued = self._begins = 0
        self._begun: deque[_Transfer] = deque()
        self._process = os.getpid()
        drained_tiers.add(self)

    def __repr__(self) -> str:
        return f"StagedTier({self.disk!r})"

    def reaches(self, device: torch.device) -> bool:
        """Return True: it reads and writes the memory of any device."""
        return True

    def room(self, nbytes: int) -> int:
        """Return the bytes of an area that a buffer takes: whole sectors, whole lines."""
        unit = max(LINE_BYTES, self.disk.alignment_bytes)
        return -(-nbytes // unit) * unit

    def allocate(self, nbytes: int) -> Any:
        """Return a range of the file, whose blocks on the disk are reserved."""
        return self.disk.allocate(nbytes + self.disk.room(1))

    def write(self, area: Any, offset: int, source: torch.Tensor) -> Any:
        """Begin to write a tensor's bytes, once they are made."""
        return self._begin(area, offset, source, is_write=True)

    def read(self, area: Any, offset: int, target: torch.Tensor) -> Any:
        """Begin to read bytes into new memory."""
        return self._begin(area, offset, target, is_write=False)

    def wait(self, ticket: Any) -> None:
        """Wait for a transfer; raise OSError if it failed, or brought other bytes."""
        for transfer in ticket:
            transfer.done.wait()
            if transfer.error is not None:
                raise copy.copy(transfer.error)
            if transfer.copied is not None:
                computing = torch.accelerator.current_stream(transfer.copied.device.index)
                computing.wait_event(transfer.copied)

    def release(self, area: Any) -> None:
        """Free the range for later areas."""
        self.disk.release(area)

    def drain(self) -> None:
        """Wait until nothing moves."""
        if self._stages:
            with suppress(RuntimeError):  # The interpreter ends, and with it the thread has.
                self._mover.submit(lambda: None).result()
            for stage in self._stages:
                self._host.memory(stage)

    def close(self) -> None:
        """Close the file once its transfers have ended."""
        self.drain()
        self.disk.close()

    def _begin(
        self, area: Any, offset: int, memory: torch.Tensor, *, is_write: bool
    ) -> list[_Transfer]:
        pieces = [memory] if len(memory) <= PIECE_BYTES else memory.split(PIECE_BYTES)
        came = None if memory.device.type == "cpu" else self._host.now(memory.device)
        made = [
            _Transfer(area, offset + k * PIECE_BYTES, piece, is_write, came)
            for k, piece in enumerate(pieces)
        ]
        with self._lock:
            if not self._stages:
                self._stages = [*_stages()]
            self._queued += len(made)
        for transfer in made:
            with suppress(RuntimeError):  # No thread begins once the interpreter ends.
                if os.getpid() == self._process:
                    self._mover.submit(self._move, transfer)
                    continue
            self._move(transfer)
        return made

    def _move(self, transfer: _Transfer) -> None:
        """Begin a transfer with the disk; end earlier ones where no other follows at once."""
        with self._lock:
            self._queued -= 1
        # What waits here for the computation is not to keep fetches from it.
        while transfer.is_write and not all(one.is_write for one in self._begun):
            self._finish(self._begun.popleft())
        with torch.inference_mode():
            self._start(transfer)
        self._begun.append(transfer)
        while self._begun and (len(self._begun) == len(self._stages) or not self._queued):
            self._finish(self._begun.popleft())

    def _start(self, transfer: _Transfer) -> None:
        transfer.stage = stage = self._stages[self._begins % len(self._stages)]
        self._begins += 1
        area, offset, memory = transfer.area, transfer.offset, transfer.memory
        assert memory is not None
        try:
            self._host.count_some()
            staged = self._host.memory(stage)[: len(memory)]
            if not transfer.is_write:
                transfer.ticket = self.disk.read(area, offset, staged)
                return
            if transfer.came is None:
                staged.copy_(memory)
            else:
                transfer.copied = self._host.write_after(transfer.came, stage, 0, memory).event
                transfer.copied.synchronize()
            transfer.ticket = self.disk.write(area, offset, staged)
        except BaseException as error:
            transfer.error = error.with_traceback(None)

    def _finish(self, transfer: _Transfer) -> None:
        try:
            if transfer.error is None:
                self.disk.wait(transfer.ticket)
                if not transfer.is_write:
                    self._bring(transfer)
        except BaseException as error:
            transfer.error = error.with_traceback(None)
        finally:
            transfer.memory = None
            transfer.done.set()

    def _bring(self, transfer: _Transfer) -> None:
        """Copy the bytes of a buffer to their target."""
        memory, stage = transfer.memory, transfer.stage
        assert memory is not None
        assert stage is not None
        with torch.inference_mode():
            if transfer.came is None:
                memory.copy_(stage.slab[: len(memory)])
            else:
                transfer.copied = self._host.read_after(transfer.came, stage, 0, memory).event


def _stages() -> Iterator[Area]:
    """Yield the buffers, as many as begin at a page."""
    with torch.inference_mode(False):
        memory = pinned(STAGING_BYTES)
    begin = -memory.data_ptr() % _PAGE
    while begin + PIECE_BYTES <= STAGING_BYTES:
        yield Area(memory[begin : begin + PIECE_BYTES])
        begin += PIECE_BYTES


@dataclass
class _Slab:
    memory: torch.Tensor
    space: Space
    latest: deque[torch.Event] = field(default_factory=deque)
    """Last copies of areas that were given back."""


@dataclass
class _Part(Area):
    """Area within a slab."""

    slab_of: _Slab = field(kw_only=True)
    place: tuple[int, int] = field(kw_only=True)


class LayeredTier(HostTier):
    """Second tier in pinned memory of the host up to a limit, with a disk beneath.

    Parameters and gradients, states of an optimizer and values of steps get room in the host as
    they come, and in a file once there is none; plans move no more values than the host has room
    for. An area is wholly in one of both. Pinned memory is taken in slabs whose sizes are powers of
    two, to which PyTorch rounds up, and kept.

    Parameters
    ----------
    limit
        Most bytes of pinned memory, or text such as "64GiB"; 2 MiB of them are for transfers.
    disk
        Disk beneath; by default `DiskTier()`.

    Attributes
    ----------
    limit_bytes
        Most bytes of pinned memory.
    pinned_bytes
        Pinned memory so far, with that for transfers.
    taken_bytes
        Bytes of it in use.
    beneath
        Tier of the disk.

    Raises
    ------
    ValueError
        The limit is no number of bytes, or too small for transfers.
    OSError
        The folder cannot hold a file.
    """

    beneath: StagedTier

    def __init__(self, limit: int | str, disk: DiskTier | None = None) -> None:
        super().__init__()
        self.limit_bytes = parse_bytes(limit, name="host_limit")
        if self.limit_bytes < STAGING_BYTES:
            raise ValueError(
                f"host_limit is {exact_bytes(self.limit_bytes)}, and transfers between the disk "
                f"and a device alone take {exact_bytes(STAGING_BYTES)} of the host: give more"
            )
        self.beneath = StagedTier(DiskTier() if disk is None else disk)
        self.pinned_bytes = STAGING_BYTES
        self._slabs: list[_Slab] = []

    def __reduce__(self) -> Any:
        return LayeredTier, (self.limit_bytes, self.beneath.disk)

    def __repr__(self) -> str:
        return f"LayeredTier({self.limit_bytes}, {self.beneath.disk!r})"

    def __str__(self) -> str:
        disk = self.beneath.disk
        return (
            f"of the host's {format_bytes(self.limit_bytes)}, {format_bytes(self.pinned_bytes)} "
            f"are pinned, with {format_bytes(self.taken_bytes)} in use; beneath are "
            f"{format_bytes(disk.taken_bytes)} in a file in {disk.directory}"
        )

    @property
    def taken_bytes(self) -> int:
        """Bytes of pinned memory in use."""
        return STAGING_BYTES + sum(slab.space.taken_bytes for slab in self._slabs)

    def free_bytes(self) -> int:
        """Return the bytes of the host that are left, in pieces of any size."""
        return max(self.limit_bytes - self.taken_bytes, 0)

    def spare_bytes(self) -> int:
        """Return the bytes of the largest area for which the host has room."""
        with self._lock:
            found = (slab.space.largest_bytes for slab in self._slabs)
            return max(_power_within(self.limit_bytes - self.pinned_bytes), *found, 0)

    def room(self, nbytes: int) -> int:
        """Return the bytes of an area that a buffer takes, in the host or beneath."""
        return self.beneath.room(nbytes)

    def allocate(self, nbytes: int) -> Any:
        """Return pinned memory within the limit; raise OSError if none is left."""
        with self._lock:
            for slab in self._slabs:
                place = slab.space.take(nbytes)
                if place is not None:
                    break
            else:
                slab = self._new_slab(nbytes)
                place = slab.space.take(nbytes)
                assert place is not None
            # What was given back before the place was taken is among these.
            events = [slab.latest.popleft() for _ in range(len(slab.latest))]
            events = [event for event in events if not event.query()]
            slab.latest.extend(events)
        memory = slab.memory[place[0] : place[1]]
        return _Part(memory, latest=events, slab_of=slab, place=place)

    def _new_slab(self, nbytes: int) -> _Slab:
        left = self.limit_bytes - self.pinned_bytes
        least = 1 << (nbytes - 1).bit_length() if nbytes else 1
        if least > left:
            raise OSError(
                errno.ENOMEM,
                f"{nbytes} bytes, in pinned memory of {least}, do not fit in what is left of "
                f"host_limit: {max(left, 0)} of {self.limit_bytes} bytes",
            )
        usual = max(_SLAB_BYTES, _power_within(self.limit_bytes // _SHARE))
        size = max(least, min(usual, _power_within(left)))
        with torch.inference_mode(False):
            made = _Slab(pinned(size), Space(size))
        self.pinned_bytes += size
        self._slabs.append(made)
        return made

    def write(self, area: Any, offset: int, source: torch.Tensor) -> Any:
        """Begin to copy a tensor's bytes to the host, once they are made."""
        if source.device.type != "cpu":
            return super().write(area, offset, source)
        self.memory(area)[offset : offset + len(source)].copy_(source)
        return None

    def read(self, area: Any, offset: int, target: torch.Tensor) -> Any:
        """Begin to copy bytes of the host into new memory."""
        if target.device.type != "cpu":
            return super().read(area, offset, target)
        target.copy_(self.memory(area)[offset : offset + len(target)])
        return None

    def wait(self, ticket: Any) -> None:
        """Have the computation wait for a copy; the host's own are complete."""
        if ticket is not None:
            super().wait(ticket)

    def release(self, area: Any) -> None:
        """Keep the memory for later areas, whose copies come after the ones of this one."""
        area.slab_of.latest.extend(area.last_copies())
        area.slab_of.space.give_back(area.place)
        self.count_some()

    def close(self) -> None:
        """Close the disk; free the memory in which nothing is."""
        self.beneath.close()
        with self._lock:
            empty = [slab for slab in self._slabs if not slab.space.taken_bytes]
            self._slabs = [slab for slab in self._slabs if slab.space.taken_bytes]
            for slab in empty:
                for event in slab.latest:
                    event.synchronize()
                self.pinned_bytes -= len(slab.memory)


def _power_within(nbytes: int) -> int:
    """Return the largest power of two that is not more; 0 where none is."""
    return 1 << (nbytes.bit_length() - 1) if nbytes > 0 else 0
