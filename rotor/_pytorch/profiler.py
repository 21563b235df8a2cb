"""PyTorch's profiler; its public interface leaves out the events of the CPU's allocator."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rotor._pytorch import core, devices, ends

Column = npt.NDArray[np.int64]


def profiler_in_use() -> bool:
    """Return whether a profiler records, or is about to, in this process: profilers do not nest."""
    profiler = torch.autograd.profiler
    _session.end_left()
    if _session.is_taken or core.profiler_enabled_here() or profiler._is_profiler_enabled:
        return True
    # A profiler with a schedule is prepared before it records, and only the object shows it.
    return "ProfilerStep" in profiler.KinetoStepTracker._step_dict and any(
        issubclass(type(candidate), profiler.profile)
        and getattr(candidate, "entered", False)
        and candidate.kineto_results is None
        for candidate in gc.get_objects()
    )


@functools.cache
def _let_forks_end() -> None:
    """Have processes that are forked from now on end: Kineto would join a thread they lack."""
    os.register_at_fork(after_in_child=_end_after_python)


def _end_after_python() -> None:
    """Have this process end without the destructors of C++, once Python has ended."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        # The last one of these is called first; streams of C are written out.
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fcloseall, None, None)


class Mark(NamedTuple):
    """Name between allocations, its time, and the number of allocations and releases before it."""

    name: str
    ns: int
    position: int


@dataclass(frozen=True, eq=False)
class Events:
    """Blocks that were allocated and freed, in order of time, and the marks between them."""

    address: Column
    """Addresses of the blocks on the CPU, int64 [k]; 0 on other devices."""
    nbytes: Column
    """Bytes of a block, negative for a release, int64 [k]."""
    ns: Column
    """Times in nanoseconds, int64 [k]."""
    marks: tuple[Mark, ...] = ()
    total_bytes: Column | None = None
    """Totals of all threads from an unknown level, int64 [k]; ``None`` if only one was watched."""

    @classmethod
    def by_time(cls, blocks: Sequence[tuple[int, ...]], marks: Iterable[tuple[int, str]]) -> Events:
        """Return events in order of time, of rows of time, address, bytes and perhaps total.

        Each mark has a time and a name, and comes before blocks of its time.
        """
        width = len(blocks[0]) if blocks else 3
        rows = np.array(blocks, dtype=np.int64).reshape(len(blocks), width)
        columns = rows[np.argsort(rows[:, 0], kind="stable")].T
        ns, address, nbytes, *total = map(np.ascontiguousarray, columns)
        timed = sorted(marks, key=itemgetter(0))
        positions = np.searchsorted(ns, [at for at, _ in timed]).tolist()
        found = [Mark(name, at, k) for (at, name), k in zip(timed, positions, strict=True)]
        return cls(address, nbytes, ns, tuple(found), total[0] if total else None)


_SILENT = "99"
_ERRORS_ONLY = 2


def _cpp_flags() -> tuple[ctypes.c_int | None, ctypes.c_bool | None]:
    """Return two flags of PyTorch's C++, if the library exposes them.

    The first is the level below which it logs nothing, the second makes the CPU's allocator count
    and report blocks of threads without a profiler.
    """
    suffix = "dylib" if sys.platform == "darwin" else "so"
    path = Path(torch.__file__).parent / "lib" / f"libc10.{suffix}"
    try:
        library = ctypes.CDLL(str(path))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None, None
    try:
        return level, ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except ValueError:
        return level, None


class _Session:
    """The one session of PyTorch's profiler that traces of this process may have at a time.

    PyTorch crashes where a second one runs beside it, where another thread ends it, and where it is
    on when its thread or the interpreter ends.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._thread = 0
        self._trace: Callable[[], AllocationTrace | None] = _nothing
        self._flags: list[tuple[Any, Any]] = []

    @property
    def is_here(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def is_taken(self) -> bool:
        return self._thread != 0

    @property
    def is_elsewhere(self) -> bool:
        return self._thread not in (0, threading.get_ident())

    @property
    def is_wanted_elsewhere(self) -> bool:
        """True if it is another thread's turn."""
        return self._waiting[:1] not in ([], [threading.get_ident()])

    def take(self, trace: AllocationTrace) -> bool:
        """Give it to a trace of this thread; return False if it is taken."""
        with self._changed:
            if self._thread or self.is_wanted_elsewhere:
                return False
            if not ends.is_main_thread():
                _ends.thread_end = _ThreadEnd()
            self._trace, self._thread = weakref.ref(trace), threading.get_ident()
            _callers._prepare_profiler = _prepare_callers
            return True

    def set(self, flag: Any, value: Any) -> None:
        """Set a flag of PyTorch's C++ until the end."""
        if flag is not None:
            self._flags.append((flag, flag.value))
            flag.value = value

    def end(self) -> Any:
        """End it in its own thread; return what was recorded."""
        try:
            if core.profiler_enabled_here():
                return torch._C._autograd._disable_profiler()
        finally:
            while self._flags:
                flag, value = self._flags.pop()
                flag.value = value
            _callers._prepare_profiler = _prepare
            torch._C._autograd._enable_record_function(True)
            with self._changed:
                self._thread, self._trace = 0, _nothing
                self._changed.notify_all()

    @contextmanager
    def in_turn(self, seconds: float) -> Iterator[None]:
        """Wait for other threads that have it, and let none take it within."""
        me = threading.get_ident()
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(
                lambda: not self.is_elsewhere and self._waiting[0] == me, seconds
            )
        try:
            yield
        finally:
            with self._changed:
                self._waiting.remove(me)
                self._changed.notify_all()

    def belongs_to(self, trace: AllocationTrace) -> bool:
        return self._trace() is trace

    def give_way(self) -> None:
        """End it for a profiler of the caller's, and tell its trace."""
        trace = self._trace()
        if trace is not None:
            trace.gave_way = True
        self.drop()

    def drop(self) -> None:
        """End it without a result, in its own thread as soon as that can."""
        self._trace = _nothing
        if self.is_here:
            self.end_left()
        elif self._thread == threading.main_thread().ident:
            ends.call_soon(self.end_left)

    def end_left(self) -> None:
        """End it where this thread has left it on; a backward would turn it on again."""
        is_left = self._trace() is None or not core.profiler_enabled_here()
        if self.is_here and is_left and not core.in_backward():
            self.end()


_callers: Any = torch.autograd.profiler
_prepare = _callers._prepare_profiler


def _prepare_callers(*args: Any, **kwargs: Any) -> None:
    """Prepare a profiler of the caller's, to which this thread's session gives way."""
    if _session.is_here and not core.in_backward():
        _session.give_way()
    _prepare(*args, **kwargs)


def _nothing() -> None:
    return None


def _end_here() -> None:
    if _session.is_here:
        _session.drop()


class _ThreadEnd:
    """Object of a thread, which ends the thread's session when the thread ends."""

    def __del__(self) -> None:
        _end_here()


_ends = threading.local()
_session = _Session()
# A child of this process has no session, and may start one.
os.register_at_fork(after_in_child=_session.__init__)  # type: ignore[misc]
atexit.register(_end_here)


def is_taken_elsewhere() -> bool:
    """Return whether a trace of another thread is on, or about to begin."""
    return _session.is_elsewhere or _session.is_wanted_elsewhere


def in_turn(seconds: float) -> AbstractContextManager[None]:
    """Wait for traces of other threads, so long at most, and let none begin another within."""
    return _session.in_turn(seconds)


class AllocationTrace:
    """Recorder of an allocator's events in this thread and in the backwards it runs.

    The public ``prof.events()`` leaves them out. Only events and marks are recorded, no operations.
    PyTorch does not see the release of memory from before the start. While a trace records, C++
    warnings are off: PyTorch warns about every thousandth such free. With `totals`, allocations
    carry the total of all threads, where PyTorch can tell it.
    """

    gave_way = False
    """True once it was dropped for a profiler of the caller's."""

    def __init__(self, *, totals: bool = False, device_type: str = "cpu") -> None:
        self._device_type = device_type
        self._level, counting = _cpp_flags()
        self._counting = counting if totals else None

    def start(self) -> bool:
        """Begin, and return True; return False if a profiler or another trace is in use."""
        if profiler_in_use() or not _session.take(self):
            return False
        try:
            self._start()
        except BaseException:
            _session.drop()
            raise
        return True

    def _start(self) -> None:
        profiler, autograd = torch._C._profiler, torch._C._autograd
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.KINETO,
            False,
            True,
            False,
            False,
            False,
            profiler._ExperimentalConfig(),
            "",
        )
        activities = {profiler.ProfilerActivity.CPU}
        _let_forks_end()
        # Kineto reads this at its first use, and otherwise reports every start and stop.
        quiet = "KINETO_LOG_LEVEL" not in os.environ
        if quiet:
            os.environ["KINETO_LOG_LEVEL"] = _SILENT
        try:
            autograd._prepare_profiler(config, activities)
        finally:
            if quiet:
                del os.environ["KINETO_LOG_LEVEL"]
        scopes = {profiler.RecordScope.USER_SCOPE}
        autograd._enable_profiler(config, activities, scopes)  # type: ignore[call-arg]
        # A collective would record itself, and its end may come from a thread of the backend when
        # the session is over: PyTorch crashes there. Only marks are recorded.
        autograd._enable_record_function(False)
        _session.set(self._level, max(_ERRORS_ONLY, getattr(self._level, "value", 0)))
        _session.set(self._counting, True)

    def mark(self, name: str) -> None:
        """Put a name between earlier and later events."""
        autograd = torch._C._autograd
        if self.is_on and core.profiler_enabled_here():
            autograd._enable_record_function(True)
            try:
                autograd._record_function_with_args_exit(
                    autograd._record_function_with_args_enter(name)
                )
            finally:
                autograd._enable_record_function(False)

    def stop(self) -> Events:
        """End, in the thread that began; return what was recorded."""
        result = _session.end()
        return self._on_cpu(result) if self._device_type == "cpu" else self._on_device(result)

    @property
    def is_on(self) -> bool:
        """True until it is stopped, dropped, or gives way to a profiler of the caller's."""
        return _session.belongs_to(self)

    @property
    def is_here(self) -> bool:
        """True while it records this thread, whose number may have been another's before."""
        return _session.is_here and self.is_on

    def drop(self) -> None:
        """End without a result; in another thread, have its own thread do so as soon as it can."""
        if self.is_on:
            _session.drop()

    def _on_cpu(self, result: Any) -> Events:
        # Asking each event for its device takes a third of the time.
        is_alone = devices.accelerator_in_use().type == "cpu"
        allocation = torch._C._profiler._ExtraFields_Allocation
        read = _BLOCK if self._counting is None else _BLOCK_AND_TOTAL
        blocks: list[tuple[int, ...]] = []
        marks: list[tuple[int, str]] = []
        pending = [result.experimental_event_tree()]
        while pending:
            for event in pending.pop():
                fields = event.extra_fields
                if type(fields) is not allocation:
                    marks.append((event.start_time_ns, event.name))
                    pending.append(event.children)
                elif is_alone or fields.device.type == "cpu":
                    blocks.append((event.start_time_ns, *read(fields)))
        return Events.by_time(blocks, marks)

    def _on_device(self, result: Any) -> Events:
        """Return marks and an accelerator's events, which are in no tree and without addresses."""
        # PyTorch 2.11 does not say here what a backend has renamed "privateuse1" to.
        is_renamed = self._device_type == torch._C._get_privateuse1_backend_name()
        kinds = {self._device_type, *(["privateuse1"] if is_renamed else [])}
        events = result.events()
        return Events.by_time(
            [
                (event.start_ns(), 0, event.nbytes())
                for event in events
                if event.name() == "[memory]"
                and str(event.device_type()).rpartition(".")[2].lower() in kinds
            ],
            [(event.start_ns(), event.name()) for event in events if event.name() != "[memory]"],
        )


_BLOCK = attrgetter("ptr", "alloc_size")
_BLOCK_AND_TOTAL = attrgetter("ptr", "alloc_size", "total_allocated")

core.check(
    """
    _C._autograd._disable_profiler _C._autograd._enable_profiler _C._autograd._prepare_profiler
    _C._autograd._enable_record_function
    _C._autograd._record_function_with_args_enter _C._autograd._record_function_with_args_exit
    _C._get_privateuse1_backend_name _C._profiler.ProfilerActivity.CPU
    _C._profiler.ProfilerConfig _C._profiler.ProfilerState.KINETO
    _C._profiler.RecordScope.USER_SCOPE _C._profiler._ExperimentalConfig
    _C._profiler._ExtraFields_Allocation.alloc_size _C._profiler._ExtraFields_Allocation.ptr
    _C._profiler._ExtraFields_Allocation.total_allocated
    _C._profiler._ProfilerEvent.start_time_ns autograd.profiler.KinetoStepTracker._step_dict
    autograd.profiler._is_profiler_enabled
    autograd.profiler._prepare_profiler
    """
)
