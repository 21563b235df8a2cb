"""Calls of destructors, from which Python lets no exception out."""

from __future__ import annotations

import _thread
import functools
import signal
import traceback
from collections.abc import Callable


def call(function: Callable[[], object]) -> object:
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
        again = staticmethod(functools.partial(_thread.interrupt_main, number))
        return type("Again", (), {"__del__": again})()
    return None


def _signal_behind(error: BaseException) -> signal.Signals | None:
    """Return the signal whose handler has raised an exception, if one has."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    handlers = ((number, signal.getsignal(number)) for number in signal.valid_signals())
    return next((n for n, handler in handlers if getattr(handler, "__code__", 0) in codes), None)
