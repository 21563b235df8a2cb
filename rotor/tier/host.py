"""Memory of the host as the second tier of an accelerator.

The order of copies and computing is kept by events, on the device alone. C is the stream on which a
step computes, D and H are streams of copies to the host and back:

- a write begins when C has made the value, and the step keeps the value until C has waited for the
  copy: its memory may then be used again, in the order of C;
- a fetch is into memory that C has allocated, and begins when C has reached that allocation, since
  the block may still be in use by what C ran before; the first use waits for the copy on C;
- bytes of the host are overwritten after the copies that read them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rotor.tier.interface import Tier, Traffic

LINE_BYTES = 256
"""Offsets in the memory of the host are multiples of it."""

_MOST_UNCOUNTED = 512
"""Number of copies and waits whose times are read together, to ask for few events at a time."""


class _Copy(NamedTuple):
    """Copy of a range of the host's memory, and the event after it."""

    begin: int
    end: int
    event: torch.Event


@dataclass
class Area:
    """Pinned memory, with the events after the copies to and from it."""

    slab: torch.Tensor
    written: dict[int, torch.Event] = field(default_factory=dict)
    reads: dict[int, _Copy] = field(default_factory=dict)
    latest: list[torch.Event] = field(default_factory=list)
    """Those of earlier steps, before the first write."""
    last: dict[Any, torch.Event] = field(default_factory=dict)
    """The last one on each stream."""

    def last_copies(self) -> list[torch.Event]:
        """Return the events after which nothing is copied to or from this memory."""
        return [*self.latest, *self.last.values()]


def pinned(nbytes: int) -> torch.Tensor:
    """Return new pinned memory; raise OSError if there is none."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OSError(
            12, f"no pinned memory of {nbytes} bytes for offloaded values: {error}"
        ) from error


class _Timed(NamedTuple):
    """Events between which a copy moved, or the computation waited for it."""

    began: torch.Event
    ended: torch.Event
    nbytes: int
    is_write: bool | None
    """``None`` for a wait."""


class _Ticket(NamedTuple):
    event: torch.Event
    device: torch.device
    held: torch.Tensor


class HostTier(Tier):
    """Second tier in pinned memory of the host, for accelerators.

    A slab of pinned memory is made when a plan is, and used by all of its steps; a second one if a
    forward begins before the backward of an earlier step. PyTorch rounds pinned memory up to a
    power of two. Copies run on two streams of their own, beside the computation.
    """

    duplex = True
    has_memory = True

    def __init__(self) -> None:
        self._free: list[Area] = []
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}
        self._lock = threading.RLock()
        self._timed: list[_Timed] = []
        self._traffic = Traffic()

    def __reduce__(self) -> Any:
        return HostTier, ()

    def __repr__(self) -> str:
        return "HostTier()"

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """Copies, and waits of the device, that are known to have ended."""
        self._count()
        return self._traffic

    def _count(self) -> None:
        """Add the copies and waits that have ended to the traffic."""
        with self._lock:
            timed, self._timed = self._timed, []
            for one in timed:
                # A wait ends with its copy, which may end before the computation begins to wait.
                if not (one.began.query() and one.ended.query()):
                    self._timed.append(one)
                    continue
                ns = max(0, round(1e6 * one.began.elapsed_time(one.ended)))
                if one.is_write is None:
                    self._traffic.waited_ns += ns
                else:
                    self._traffic.add(one.nbytes, ns, is_write=one.is_write)

    def reaches(self, device: torch.device) -> bool:
        """Return whether a device is an accelerator."""
        return device.type != "cpu"

    def allocate(self, nbytes: int) -> Any:
        """Return pinned memory: of an earlier step if it is large enough."""
        with self._lock:
            fitting = [area for area in self._free if len(area.slab) >= nbytes]
            if fitting:
                found = min(fitting, key=lambda area: len(area.slab))
                self._free = [area for area in self._free if area is not found]
                return found
            # Slabs of smaller plans are not needed again.
            smaller, self._free = self._free, []
        _finish(smaller)
        return Area(pinned(nbytes))

    def now(self, device: torch.device) -> torch.Event:
        """Return the present moment of the computation on a device."""
        return torch.accelerator.current_stream(device.index).record_event()

    def write(self, area: Any, offset: int, source: torch.Tensor) -> Any:
        """Begin to copy a tensor's bytes to the host, once they are made."""
        return self.write_after(self.now(source.device), area, offset, source)

    def write_after(self, came: torch.Event, area: Area, offset: int, source: torch.Tensor) -> Any:
        """Begin to copy a tensor's bytes to the host after a moment of the computation."""
        device = source.device
        to_host, _ = self._on(device)
        place = area.slab[offset : offset + len(source)]
        to_host.wait_event(came)
        for event in area.latest:
            to_host.wait_event(event)
        area.latest = []
        for copy in area.reads.values():
            if copy.begin < offset + len(source) and offset < copy.end:
                to_host.wait_event(copy.event)
        event = self._copy(place, source, to_host, is_write=True)
        area.written[offset] = area.last[device, True] = event
        return _Ticket(event, device, source)

    def read(self, area: Any, offset: int, target: torch.Tensor) -> Any:
        """Begin to copy bytes of the host into new memory of the device."""
        return self.read_after(self.now(target.device), area, offset, target)

    def read_after(self, came: torch.Event, area: Area, offset: int, target: torch.Tensor) -> Any:
        """Begin to copy bytes of the host into new memory after a moment of the computation."""
        device = target.device
        _, to_device = self._on(device)
        place = area.slab[offset : offset + len(target)]
        to_device.wait_event(came)
        if offset in area.written:
            to_device.wait_event(area.written[offset])
        event = area.last[device, False] = self._copy(target, place, to_device, is_write=False)
        area.reads[offset] = _Copy(offset, offset + len(target), event)
        return _Ticket(event, device, target)

    def wait(self, ticket: Any) -> None:
        """Have the computation wait for a copy."""
        computing = torch.accelerator.current_stream(ticket.device.index)
        came = _mark(computing)
        computing.wait_event(ticket.event)
        with self._lock:
            self._timed.append(_Timed(came, ticket.event, 0, None))

    def release(self, area: Any) -> None:
        """Keep the memory for a later step, whose copies come after the ones of this step."""
        area.latest = area.last_copies()
        area.written, area.reads, area.last = {}, {}, {}
        self.count_some()
        self._free = [*self._free, area]

    def count_some(self) -> None:
        """Add copies and waits that have ended to the traffic, where there are many."""
        if len(self._timed) > _MOST_UNCOUNTED:
            self._count()

    def memory(self, area: Any) -> torch.Tensor:
        """Return the pinned memory of an area, once its copies have ended."""
        for event in area.last_copies():
            event.synchronize()
        found: torch.Tensor = area.slab
        return found

    def room(self, nbytes: int) -> int:
        """Return the bytes of a slab that a buffer takes, whole lines of the memory."""
        return -(-nbytes // LINE_BYTES) * LINE_BYTES

    def close(self) -> None:
        """Free the memory of steps that have ended."""
        with self._lock:
            areas, self._free = self._free, []
        _finish(areas)

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream, *, is_write: bool
    ) -> torch.Event:
        """Copy on a stream; return the event after it."""
        with stream:
            began = _mark(stream)
            target.copy_(source, non_blocking=True)
            ended = _mark(stream)
        with self._lock:
            self._timed.append(_Timed(began, ended, len(source), is_write))
        return ended

    def _on(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """Return the streams that copy from and to a device."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device), torch.Stream(device)
        return self._streams[device]


def _mark(stream: torch.Stream) -> torch.Event:
    """Return an event that a stream records now, with the time."""
    event = torch.Event(stream.device, enable_timing=True)
    stream.record_event(event)
    return event


def _finish(areas: list[Area]) -> None:
    """Wait until nothing is copied to or from areas whose memory goes."""
    for area in areas:
        for event in area.latest:
            event.synchronize()
