"""Ends of backwards and of objects: what runs then, in which thread, and what it may raise."""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core

logger = logging.getLogger("rotor")


class BackwardEnd:
    """Callback of the engine on success of a backward, dropped when the backward returns.

    Changes of the thread's state by a final callback of the engine, such as an ended profiler, are
    undone when the callback returns. The engine drops its callbacks after that, on failure too. A
    backward around it would undo them as well: it is waited for. Where `at_once` returns True,
    `done` is called by the callback itself.
    """

    def __init__(self, done: Callable[[], object], failed: Any, at_once: Any) -> None:
        self._next, self._done, self._at_once = failed, done, at_once

    def __call__(self) -> None:
        self._next = self._done
        if self._at_once():
            self._next = None
            self._done()

    def __del__(self) -> None:
        if self._next is not None and core.in_backward():
            at_end_of_backward(self._next, self._next)
        elif self._next is not None:
            self._kept = from_destructor(self._next)


def at_end_of_backward(
    done: Callable[[], object], failed: Callable[[], object] | None = None, *, at_once: bool = False
) -> None:
    """Have `done` called when the running backward has finished, `failed` if it raises.

    Either is called outside all backwards where a profiler is on in this thread, so that it may end
    it; otherwise, and `at_once`, `done` is called as the backward's last act. An exception of
    either, but a signal's, is reported as unraisable. Raises RuntimeError if no backward runs.
    """
    end = BackwardEnd(done, failed, lambda: at_once or not core.profiler_enabled_here())
    torch.autograd.Variable._execution_engine.queue_callback(end)


def check_after_backward(check: Callable[[], object]) -> None:
    """Have `check` called at the end of the running backward, which raises its errors."""
    torch.autograd.Variable._execution_engine.queue_callback(check)  # type: ignore[arg-type]


def is_main_thread() -> bool:
    """Return whether this is the thread in which Python began."""
    return threading.get_ident() == threading.main_thread().ident


def call_soon(function: Callable[[], object]) -> None:
    """Have the main thread call a function as soon as it runs Python code again.

    An exception is reported as unraisable.
    """
    if not _core.call_in_main_thread(function):
        logger.warning("the main thread has too many calls to make: a step is not measured")


def at_return_of_backward(
    last: Callable[[], object], done: Callable[[], object], failed: Callable[[], object]
) -> None:
    """Have `last` called as the running backward's last act, and `done` once it has returned.

    On an accelerator a backward ends in the thread of backwards, where a trace of another thread
    cannot end: `last` is called in whatever thread the backward ends, `done` in the main thread, or
    `failed` if the backward raises. Raises RuntimeError if no backward is running.
    """

    def run(function: Callable[[], object]) -> None:
        if is_main_thread():
            function()
        else:
            call_soon(function)

    def has_ended_elsewhere() -> bool:
        last()
        return not is_main_thread()

    end = BackwardEnd(partial(run, done), partial(run, failed), has_ended_elsewhere)
    torch.autograd.Variable._execution_engine.queue_callback(end)


def from_destructor(function: Callable[[], object]) -> object:
    """Call a function; return what the destructor's object has to keep.

    Python drops exceptions of destructors: a signal whose handler has raised one comes again.
    """
    try:
        function()
    except BaseException as error:
        number = _signal_behind(error)
        if number is None:
            raise
        # No code of Python runs between this one's end and that of the destructor.
        again = staticmethod(partial(_thread.interrupt_main, number))
        return type("Again", (), {"__del__": again})()
    return None


def _signal_behind(error: BaseException) -> signal.Signals | None:
    """Return the signal whose handler has raised an exception, if one has."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    handlers = ((number, signal.getsignal(number)) for number in signal.valid_signals())
    return next((n for n, handler in handlers if getattr(handler, "__code__", 0) in codes), None)
