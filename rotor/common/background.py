"""Work in a background thread that ends with its owner; independent of PyTorch.

A piece of work gets a function that returns True once it should stop, and asks it now and then.
Work that is stopped, or that another process began before a fork, has no result.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

PLANNING = ("background", "before")
"""Accepted values of ``planning=``."""


def checked_planning(value: Any) -> str:
    """Return a value of ``planning=`` as it is; raise ValueError for any other."""
    if value not in PLANNING:
        raise ValueError(f"planning={value!r}, expected one of {', '.join(PLANNING)}")
    return str(value)


class Stopped(Exception):
    """Signal that ends work which is no longer wanted."""


Work = Callable[[Callable[[], bool]], Any]
"""Function of another one that returns True once the work should stop; it then raises Stopped."""


class _State:
    """State that a thread shares with its job, without referencing the job."""

    def __init__(self) -> None:
        self.stops = False
        self.result: Any = None
        self.error: BaseException | None = None


class ThreadJob:
    """Job in a thread of its own; the thread ends soon after the job is dropped."""

    def __init__(self, work: Work) -> None:
        self._state = _State()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_run, args=(work, self._state), name="rotor-planning", daemon=True
        )
        weakref.finalize(self, setattr, self._state, "stops", True).atexit = False
        _running[self._thread] = self._state
        self._thread.start()

    def _is_inherited(self) -> bool:
        return os.getpid() != self._process

    def is_done(self) -> bool:
        """Return whether the work has ended, in whatever way."""
        return self._is_inherited() or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most some seconds; return whether the work has ended."""
        if not self._is_inherited():
            self._thread.join(timeout)
        return self.is_done()

    def stop(self) -> None:
        """Have the work end soon, without a result."""
        self._state.stops = True

    def result(self) -> Any:
        """Return the result of work that has ended; ``None`` without one; raise its error."""
        if self._is_inherited() or isinstance(self._state.error, Stopped):
            return None
        if self._state.error is not None:
            raise self._state.error
        return self._state.result


Executor = Callable[[Work], ThreadJob]
"""Function that begins a piece of work, which is stopped when the job is no longer referenced."""


def _run(work: Work, state: _State) -> None:
    try:
        state.result = work(lambda: state.stops)
    except BaseException as error:
        # Frames of the traceback would keep what the work refers to.
        state.error = error.with_traceback(None)
    finally:
        _running.pop(threading.current_thread(), None)


_running: dict[threading.Thread, _State] = {}
"""Threads that have not ended, those of dropped jobs too."""

os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _stop_all() -> None:
    """Stop all threads before the interpreter goes: one that is left would abort the process."""
    running = list(_running.items())
    for _, state in running:
        state.stops = True
    for thread, _ in running:
        thread.join()
