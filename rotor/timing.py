"""Times of calls on a device, repeated until their median is stable.

On the CPU the clock is the CPU time of the calling thread: on a machine that does other work the
wall clock says little. On an accelerator it is a pair of events in the current stream.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import devices

__all__ = [
    "Clock",
    "Timer",
    "is_single",
    "make_timer",
    "measure_ns",
    "single_runs",
    "stable_median",
]

_NS_PER_MS = 1_000_000
_NS_PER_SECOND = 1_000_000_000
_LONGEST_SECONDS = 1e9
_single: ContextVar[bool] = ContextVar("single", default=False)


class Clock:
    """Clock that takes the time between `start` and `stop`, any number of times.

    Parameters
    ----------
    device
        The CPU or the accelerator.

    Raises
    ------
    ValueError
        The device is of another type.

    Notes
    -----
    CPU: CPU time of the calling thread. Accelerator: time between two events in the device's
    current stream; `stop` waits for the second one. The stream is kept busy before the first event,
    where PyTorch can, so that launches are no part of the time.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        if self._device.type == "meta":
            raise ValueError("times are taken on the CPU and on accelerators, got 'meta'")
        self._is_cpu = self._device.type == "cpu"
        self._events: list[Any] = []
        self._start_ns = -1

    def start(self) -> None:
        """Begin a measurement; an unfinished one is dropped."""
        if self._is_cpu:
            self._start_ns = _core.thread_cpu_ns()
            return
        if not self._events:
            self._events = [torch.Event(self._device, enable_timing=True) for _ in range(2)]
        devices.occupy(self._device)
        self._events[0].record(torch.accelerator.current_stream(self._device))
        self._start_ns = 0

    def stop(self) -> int:
        """Return nanoseconds since `start`.

        Raises
        ------
        RuntimeError
            `start` was not called since the last `stop`.
        """
        stop_ns = _core.thread_cpu_ns() if self._is_cpu else 0
        start_ns = self._start_ns
        self._check_running()
        if self._is_cpu:
            return stop_ns - start_ns
        self._end()
        self._events[1].synchronize()
        return _between_ns(*self._events)

    def stop_later(self) -> Callable[[], int]:
        """Stop on an accelerator without waiting; return a function that asks for the time.

        It returns nanoseconds, or -1 as long as the device has not come to the end. The clock
        can be started again at once.
        """
        self._check_running()
        self._end()
        began, ended = self._events
        self._events = []

        def found() -> int:
            return _between_ns(began, ended) if ended.query() else -1

        return found

    def _check_running(self) -> None:
        start_ns, self._start_ns = self._start_ns, -1
        if start_ns < 0:
            raise RuntimeError("the clock is not running: call start() first")

    def _end(self) -> None:
        self._events[1].record(torch.accelerator.current_stream(self._device))


class Timer:
    """Published form of `Clock`: milliseconds.

    Parameters
    ----------
    device
        As of `Clock`.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._clock = Clock(device)
        self.reset()

    def reset(self) -> None:
        """Forget the time."""
        self._ms = math.nan

    def start(self) -> None:
        """Begin a measurement; an unfinished one is dropped."""
        self._clock.start()

    def end(self) -> None:
        """End it; RuntimeError: none was begun."""
        self._ms = self._clock.stop() / _NS_PER_MS

    def elapsed(self) -> float:
        """Return the milliseconds of the latest measurement, NaN before one."""
        return self._ms

    def elapsedAndReset(self) -> float:
        """End a measurement and begin the next one; return the milliseconds of the first."""
        self.end()
        found = self._ms
        self.reset()
        self.start()
        return found

    def measure(self, func: Callable[[], object], iterations: int = 1) -> float:
        """Return the mean milliseconds of a number of calls."""
        self.start()
        for _ in range(iterations):
            func()
        self.end()
        return self._ms / iterations

    def measure_median(self, func: Callable[[], object], samples: int = 3, **kwargs: Any) -> float:
        """Return the median of so many times, each as of `measure` with these keywords."""
        return statistics.median(self.measure(func, **kwargs) for _ in range(samples))


def make_timer(device: torch.device | str) -> Timer:
    """Return the published timer of a device."""
    return Timer(device)


def _between_ns(began: Any, ended: Any) -> int:
    elapsed_ms: float = began.elapsed_time(ended)
    return round(elapsed_ms * _NS_PER_MS)


@contextmanager
def single_runs() -> Iterator[None]:
    """Measure by one run without a warm-up inside: for sizes, when times hardly matter."""
    token = _single.set(True)
    try:
        yield
    finally:
        _single.reset(token)


def is_single() -> bool:
    """Return whether one run gives a time now, which then is too rough to be kept."""
    return _single.get()


def stable_median(samples: Sequence[int], rel_tolerance: float) -> tuple[int, bool]:
    """Return the median of samples, and whether it is known to a relative tolerance.

    Parameters
    ----------
    samples
        Times in ns, at least one.
    rel_tolerance
        The error allowed, relative to the median.

    Returns
    -------
    tuple of int and bool
        The median, rounded to the nearest ns; and whether its standard error is at most
        ``rel_tolerance`` times the median, which needs three samples at least.

    Raises
    ------
    ValueError
        No samples are given.

    Notes
    -----
    The standard error is read from the sorted samples, without an assumption about their
    distribution: the number of samples below the true median is binomial with standard deviation
    sqrt(n) / 2, so that the samples at that distance from the middle, to the nearest rank, lie
    about one standard error from it; half of their distance is taken. From five samples on
    a single slow one, as a busy machine makes them, does not count.
    """
    return _core.stable_median(samples, rel_tolerance)


def measure_ns(
    call: Callable[[], object],
    device: torch.device | str,
    *,
    min_repeats: int = 5,
    max_repeats: int = 25,
    rel_tolerance: float = 0.03,
    max_seconds: float = 2.0,
) -> int:
    """Return the median time of a call, in nanoseconds.

    Parameters
    ----------
    call
        Called once to warm up, which is not counted, and then until the median is stable.
    device
        The device that it runs on; see `Clock` for the kind of time.
    min_repeats, max_repeats
        Bounds of the number of counted calls.
    rel_tolerance
        Standard error allowed, relative to the median (`stable_median`).
    max_seconds
        No further call is begun when this much (wall) time has passed, the warm-up included and
        `min_repeats` or not; one call is always counted.

    Returns
    -------
    int
        The median over the counted calls.

    Raises
    ------
    ValueError
        ``1 <= min_repeats <= max_repeats`` does not hold, or the device has no clock.
    """
    if not 1 <= min_repeats <= max_repeats:
        raise ValueError(
            f"expected 1 <= min_repeats <= max_repeats, got {min_repeats} and {max_repeats}"
        )
    clock = Clock(device)
    if is_single():
        clock.start()
        call()
        return clock.stop()
    start_ns = _core.clock_ns()
    call()
    samples: list[int] = []
    while True:
        clock.start()
        call()
        samples.append(clock.stop())
        middle, is_stable = stable_median(samples, rel_tolerance)
        spent_ns = _core.clock_ns() - start_ns
        if _core.repeats_are_enough(
            len(samples),
            is_stable,
            spent_ns,
            min_repeats,
            max_repeats,
            math.ceil(min(max_seconds, _LONGEST_SECONDS) * _NS_PER_SECOND),
            min_comes_first=False,
        ):
            return middle
