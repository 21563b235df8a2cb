"""Memory of a device: free bytes, rounded sizes of tensors, and exact meters of allocations.

A meter counts the bytes that PyTorch's allocator has handed out: on an accelerator by the
allocator's own counters, on the CPU by the events that it reports to a profiler. Memory that a
kernel takes from elsewhere is invisible to both, and resident set size is no measure of either.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

import psutil
import torch

from rotor import _core
from rotor._pytorch import core, devices, ends
from rotor._pytorch import profiler as _profiler
from rotor.common import accounting
from rotor.common.collector import CollectorPause
from rotor.common.timeline import Timeline
from rotor.meter.segments import END, FREED, MARK, START, Levels, Segment, counted_levels, levels_of

__all__ = [
    "Meter",
    "MeterBusyError",
    "Segment",
    "driver_bytes",
    "free_bytes",
    "highest_peak",
    "meter",
    "rounded_bytes",
    "storage_bytes",
]


_PATIENCE = 5.0
"""Seconds that a measurement waits for the metered step of another thread."""


class MeterBusyError(RuntimeError):
    """Failure to start a meter: a profiler, another meter, or a backward is running."""


class OtherThreadError(MeterBusyError):
    """Failure to start a meter, as one of another thread is running: a later attempt succeeds."""


class UncountedError(MeterBusyError):
    """Failure to start a meter that no later attempt mends: the allocator counts no bytes."""


def free_bytes(device: torch.device | str) -> int:
    """Return the bytes that this process may still allocate on a device.

    Parameters
    ----------
    device
        The CPU or an accelerator.

    Returns
    -------
    int
        CPU: the smallest of the machine's available memory, the rest within the control groups
        (page cache that the kernel would give back counts as free) and the rest within the limits
        on address space and data. Accelerator: the driver's free bytes and the unallocated bytes
        of the caching allocator, within the process's memory fraction.

    Raises
    ------
    ValueError
        The device is of another type.
    """
    device = devices.known(device)
    if device.type == "cpu":
        free = _core.probe_memory()["free_bytes"]
        return free if free >= 0 else int(psutil.virtual_memory().available)
    free, total = driver_bytes(device)
    allocated = devices.allocated_bytes(device)
    free += devices.reserved_bytes(device) - allocated
    allowed = int(total * devices.memory_fraction(device)) - allocated
    return max(min(free, allowed), 0)


def driver_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of an accelerator that no process has taken, and all of them."""
    free, total = -1, -1
    if device.type == "cuda":
        found = _core.cuda_memory(device.index, None, "")
        free, total = found["free_bytes"], found["total_bytes"]
    if free < 0:  # The driver's library was not found, or there is no context yet.
        free, total = devices.free_and_total_bytes(device)
    return free, total


def rounded_bytes(nbytes: int, device: torch.device | str) -> int:
    """Return the bytes that a device's allocator counts for a block of `nbytes`.

    Parameters
    ----------
    nbytes
        Size of a storage, bytes.
    device
        The CPU or an accelerator.

    Returns
    -------
    int
        CPU: `nbytes`. Accelerator: the next multiple of 512, in which caching allocators give out
        memory; blocks above 1 MiB may come out up to 1 MiB larger when a cached one is reused.
    """
    return accounting.rounded_bytes(nbytes, devices.known(device).type)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of these tensors' storages as their allocators count them, each once."""
    sizes = {}
    for part in (part for tensor in tensors for part in core.strided_parts(tensor)):
        storage = part.untyped_storage()
        sizes[(part.device, storage.data_ptr())] = storage.nbytes()
    return sum(rounded_bytes(size, device) for (device, _), size in sizes.items())


class _Meters(list["Meter"]):
    """Meters that start in a context; only the context holds them, however it is left."""


_started: ContextVar[tuple[weakref.ref[_Meters], ...]] = ContextVar("started", default=())


@contextmanager
def highest_peak() -> Iterator[Callable[[], int]]:
    """Give a function that returns the highest peak of the meters that start in the context."""
    meters = _Meters()
    token = _started.set((*_started.get(), weakref.ref(meters)))
    try:
        yield lambda: max([meter._peak_bytes for meter in meters], default=0)
    finally:
        _started.reset(token)


class Meter(ABC):
    """Exact meter of the bytes allocated on a device; made by `meter`.

    It runs from `start` to `stop`, or through a ``with`` block, once. Levels are in bytes above the
    level at the start.

    Notes
    -----
    A device has one running meter at most. On the CPU a meter is a session of
    PyTorch's profiler: it sees the thread that started it and the backwards run from there, it must
    be stopped by that thread, and another profiler cannot run meanwhile. In a process group it
    also sees memory that other threads, such as the threads of collectives, free. A meter stopped
    inside a backward has its figures when the backward has returned; `step_meter` shows how
    to stop one as soon as the backward ends. The release of a block from before the start is seen
    only for the tensors given as `existing`. On an accelerator a meter is such a session too in a
    ``with`` block and in the main thread. Elsewhere, and beside another profiler, it reads the
    device's counters, and resets its peak statistics
    (``torch.accelerator.max_memory_allocated``) at its start and at each mark. Within a ``with``
    block Python's collector of cycles waits: what it frees would be taken for the block's.
    """

    _trace: _profiler.AllocationTrace | None = None

    def __init__(self, device: torch.device, timeline: bool) -> None:
        self._device = device
        # The counters of a device are one for all threads.
        self.place = (device, threading.get_ident() if device.type == "cpu" else 0)
        self._wants_timeline = timeline
        self._state = "new"
        self._segments: list[Segment] = []
        self._peak_bytes = 0
        self._end_bytes = 0
        self._timeline: Timeline | None = None

    @property
    def is_here(self) -> bool:
        """True if the running step may be metered in this thread."""
        return True

    @property
    def gave_way(self) -> bool:
        """True if a profiler of the caller's has ended it."""
        return self._trace is not None and self._trace.gave_way

    @property
    def device(self) -> torch.device:
        """Metered device."""
        return self._device

    @property
    def segments(self) -> list[Segment]:
        """Segments in the order of their marks; a name may occur several times."""
        self._need_figures()
        return list(self._segments)

    @property
    def peak_bytes(self) -> int:
        """Maximum from start to stop, above the level at the start."""
        self._need_figures()
        return self._peak_bytes

    @property
    def end_bytes(self) -> int:
        """Level at the stop, above the level at the start; negative if memory was freed."""
        self._need_figures()
        return self._end_bytes

    @property
    def timeline(self) -> Timeline | None:
        """Live bytes over time; ``None`` unless asked for, and where counters alone are read."""
        self._need_figures()
        return self._timeline

    def start(self) -> Self:
        """Start measuring.

        Raises
        ------
        MeterBusyError
            A profiler or another meter is running, or (CPU) this is inside a backward.
        RuntimeError
            The meter was started before.
        """
        if self._state != "new":
            raise RuntimeError("a meter runs once: make a new one with rotor.memory.meter()")
        _occupy(self)
        try:
            self._begin()
        except BaseException:
            _vacate(self)
            raise
        self._state = "running"
        for reference in _started.get():
            meters = reference()
            if meters is not None:
                meters.append(self)
        return self

    def mark(self, name: str) -> None:
        """Begin a segment, which lasts until the next mark or the end.

        Raises
        ------
        RuntimeError
            The meter does not run.
        """
        if self._state != "running":
            raise RuntimeError("a mark needs a running meter: call start() first")
        self._mark(name)

    def drop(self) -> None:
        """Stop without figures, in whatever thread."""
        self.stop()

    def stop(self) -> None:
        """Stop measuring; do nothing if the meter does not run.

        Raises
        ------
        RuntimeError
            A meter of the CPU is stopped by a thread that did not start it.
        """
        if self._state == "running":
            self._stop()

    def __enter__(self) -> Self:
        with _profiler.in_turn(_PATIENCE):
            return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_state", None) == "running" and not _is_finalizing():
            self.drop()

    def _need_figures(self) -> None:
        if self._state != "done":
            reason = {
                "new": "was not started",
                "running": "is still running",
                "stopping": "was stopped inside a backward that has not returned",
                "lost": "was dropped, as its step went on in another thread",
            }[self._state]
            raise RuntimeError(f"the meter has no figures: it {reason}")

    def at_end_of_backward(self, done: Callable[[], object], failed: Callable[[], object]) -> None:
        """Have `done` called when the running backward has finished, `failed` if it raises.

        The meter may be stopped there, and has its figures then.

        Raises
        ------
        RuntimeError
            No backward is running.
        """
        ends.at_end_of_backward(done, failed)

    def _take(self, levels: Levels) -> None:
        """Take the figures from the levels along the events; the peak may be known to be higher."""
        self._segments = levels.segments()
        self._peak_bytes = max(self._peak_bytes, levels.peak_bytes)
        self._end_bytes = levels.end_bytes
        if self._wants_timeline:
            self._timeline = levels.timeline()
        self._state = "done"

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _mark(self, name: str) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...


_running: dict[tuple[torch.device, int], weakref.ref[Meter]] = {}
_running_lock = threading.Lock()


def _is_occupied(place: tuple[torch.device, int]) -> bool:
    reference = _running.get(place)
    found = None if reference is None else reference()
    return found is not None and found.is_here


def _occupy(candidate: Meter) -> None:
    if _is_occupied(candidate.place):
        # Perhaps only the frames of an exception still refer to the other meter.
        gc.collect()
    with _running_lock:
        if _is_occupied(candidate.place):
            raise MeterBusyError(f"another meter is running on {candidate.device}")
        _running[candidate.place] = weakref.ref(candidate)


def _vacate(candidate: Meter) -> None:
    with _running_lock:
        reference = _running.get(candidate.place)
        if reference is not None and reference() in (candidate, None):
            del _running[candidate.place]


class _CpuMeter(Meter):
    _trace: _profiler.AllocationTrace

    def __init__(
        self, device: torch.device, existing: Sequence[torch.Tensor], timeline: bool
    ) -> None:
        super().__init__(device, timeline)
        self._existing = existing
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        # Threads of collectives free blocks of the metered thread.
        threads = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._trace = _profiler.AllocationTrace(totals=threads)
        self._resident: Collection[int] = ()

    def _begin(self) -> None:
        existing, self._existing = self._existing, ()
        if core.in_backward():
            raise MeterBusyError("a meter of the CPU cannot be started inside a backward")
        if not self._trace.start():
            if _profiler.is_taken_elsewhere():
                raise OtherThreadError("the memory of another thread's step is being metered")
            raise MeterBusyError("a profiler is in use, and PyTorch's profilers do not nest")
        parts = [part for tensor in existing for part in core.strided_parts(tensor)]
        storages = {s.data_ptr(): s for s in (part.untyped_storage() for part in parts)}
        self._resident = set(storages)
        self._trace.mark(START)
        for storage in storages.values():
            name = f"{FREED}{storage.nbytes()}"
            self._watched.append(weakref.ref(storage, partial(_mark_freed, self._trace, name)))

    def _mark(self, name: str) -> None:
        self._trace.mark(MARK + name)

    @property
    def is_here(self) -> bool:
        return self._trace.is_here

    def drop(self) -> None:
        if self.is_here and core.in_backward():
            self.stop()
        elif self._state == "running":
            self._state = "lost"
            self._watched.clear()
            _vacate(self)
            self._trace.drop()

    def _stop(self) -> None:
        if not self.is_here:
            raise RuntimeError("a meter of the CPU must be stopped by the thread that started it")
        self._trace.mark(END)
        self._watched.clear()
        if core.in_backward():
            self._state = "stopping"
            ends.at_end_of_backward(self._finish, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        # Thousands of short-lived objects are made here, which need no run of the collector.
        try:
            with CollectorPause():
                events = self._trace.stop()
        except BaseException:
            self.drop()
            raise
        _vacate(self)
        self._take(levels_of(events, self._resident))


def _mark_freed(trace: _profiler.AllocationTrace, name: str, _: object) -> None:
    trace.mark(name)


class _DeviceMeter(Meter):
    """Meter of an accelerator: by its allocator's events, else by its counters.

    Counters give a peak only after a reset, which would reset the user's peak too. Recordings of
    events do not nest, and must end in the thread in which they began. A backward ends in another
    thread: the main thread ends the recording after it.
    """

    _by_counters = False

    def __init__(self, device: torch.device, timeline: bool) -> None:
        super().__init__(device, timeline)
        self._base = 0
        self._highest = 0
        self._start = 0
        self._name: str | None = None
        self._pause = CollectorPause()
        self._thread = 0
        self._levels: list[int] = []
        self._has_ended = False

    def __enter__(self) -> Self:
        self._pause.begin()
        try:
            return super().__enter__()
        except BaseException:
            self._pause.end()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._settle()
            super().__exit__(*error)
        finally:
            self._pause.end()

    def mark(self, name: str) -> None:
        if self._pause.is_on:
            self._settle()
        super().mark(name)

    def at_end_of_backward(self, done: Callable[[], object], failed: Callable[[], object]) -> None:
        if self._trace is None:
            # A profiler of the user's may be on in this thread, and must stay on.
            ends.at_end_of_backward(done, failed, at_once=True)
        elif core.profiler_enabled_here():
            ends.at_return_of_backward(self._note_end, done, failed)
        else:
            # A backward run by a thread that did not run the forward, as the next one may be.
            _DeviceMeter._by_counters = True
            failed()

    @property
    def is_here(self) -> bool:
        return self._trace is None or self._trace.is_on

    def _settle(self) -> None:
        if not core.in_backward():
            devices.settle_backwards(self.device)

    def _may_trace(self) -> bool:
        if core.in_backward() or _profiler.profiler_in_use():
            return False
        if self._pause.is_on:
            return True
        by_counters, _DeviceMeter._by_counters = _DeviceMeter._by_counters, False
        return ends.is_main_thread() and not by_counters

    def _begin(self) -> None:
        self._settle()
        is_traced = self._may_trace()
        try:
            if not is_traced:
                devices.reset_peak(self.device)
            self._base, self._highest = devices.counters(self.device)
        except RuntimeError as error:
            raise UncountedError(
                f"the allocator of {self.device} counts no bytes ({error}): use PyTorch's own "
                "caching allocator, not a pluggable one"
            ) from error
        if is_traced:
            self._thread = threading.get_ident()
            trace = _profiler.AllocationTrace(device_type=self.device.type)
            self._trace = trace if trace.start() else None

    def _mark(self, name: str) -> None:
        if self._trace is not None:
            self._levels.append(devices.allocated_bytes(self.device) - self._base)
            self._trace.mark(MARK + name)
            return
        self._close_segment()
        devices.reset_peak(self.device)
        self._name, self._start = name, self._end_bytes

    def _close_segment(self) -> None:
        current, peak = devices.counters(self.device)
        self._end_bytes = current - self._base
        self._peak_bytes = max(self._peak_bytes, peak - self._base)
        if self._name is not None:
            segment = Segment(self._name, self._start, peak - self._base, self._end_bytes)
            self._segments.append(segment)

    def _stop(self) -> None:
        if self._trace is None:
            self._close_segment()
            _vacate(self)
            self._state = "done"
        elif not self._trace.is_on:
            self._state = "lost"
            _vacate(self)
        elif threading.get_ident() != self._thread:
            self._state = "stopping"
            ends.call_soon(self._finish)
        elif core.in_backward():
            self._state = "stopping"
            ends.at_return_of_backward(self._note_end, self._finish, self._finish)
        else:
            self._finish()

    def _note_end(self) -> None:
        if self._trace is not None and not self._has_ended:
            self._has_ended = True
            current, highest = devices.counters(self.device)
            self._levels.append(current - self._base)
            if highest > self._highest and not self._pause.is_on:
                # The counter includes other threads, whose events are not seen.
                self._peak_bytes = highest - self._base
            self._trace.mark(END)

    def _finish(self) -> None:
        self._note_end()
        trace, self._trace = self._trace, None
        if trace is None:
            return
        events = trace.stop()
        _vacate(self)
        self._take(counted_levels(events, self._levels))


def meter(
    device: torch.device | str, *, existing: Iterable[torch.Tensor] = (), timeline: bool = False
) -> Meter:
    """Return a meter of the bytes allocated on a device.

    Parameters
    ----------
    device
        The CPU or an accelerator.
    existing
        Tensors whose storages may be freed while the meter runs, such as old gradients. On the
        CPU the meter sees only the release of these; on an accelerator it sees all.
    timeline
        Keep the live bytes over time too, at most ``timeline.MOST_POINTS`` moments, highs
        and lows first; on an accelerator, where events are read.

    Returns
    -------
    Meter
        A context manager, which meters inside.

    Raises
    ------
    ValueError
        PyTorch does not count the memory of such a device.

    Examples
    --------
    >>> with meter("cpu") as m:
    ...     m.mark("copy")
    ...     y = torch.zeros(1000).clone()
    >>> m.segments
    [Segment(name='copy', start_bytes=0, peak_bytes=8000, end_bytes=4000)]
    """
    device = devices.known(device)
    if device.type == "cpu":
        return _CpuMeter(device, list(existing), timeline)
    if not devices.has_counters(device):
        raise ValueError(
            f"PyTorch has no counters of the memory of {device.type} devices: a limit cannot be "
            "kept there, train without one or on another device"
        )
    return _DeviceMeter(device, timeline)
