"""Ends of traces in the main thread: of backwards that end in a thread of an accelerator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from rotor import _core

logger = logging.getLogger("rotor")


def is_current() -> bool:
    """Return whether this is the main thread."""
    return threading.get_ident() == threading.main_thread().ident


def call_soon(function: Callable[[], object]) -> None:
    """Have the main thread call a function as soon as it runs Python code again.

    An exception is reported as unraisable.
    """
    if not _core.call_in_main_thread(function):
        logger.warning("the main thread has too many calls to make: a step is not measured")


class _BackwardReturn:
    """Callback of the engine that acts in the main thread once a backward has returned."""

    def __init__(
        self,
        last: Callable[[], object],
        done: Callable[[], object],
        failed: Callable[[], object],
    ) -> None:
        self._last, self._done = last, done
        self._next: Callable[[], object] | None = failed

    def __call__(self) -> None:
        self._last()
        self._next = self._done
        if not is_current():
            self._call()

    def _call(self) -> None:
        following, self._next = self._next, None
        if following is not None:
            call_soon(following)

    def __del__(self) -> None:
        if not is_current():
            self._call()
            return
        following, self._next = self._next, None
        if following is not None:
            following()


def at_return_of_backward(
    last: Callable[[], object], done: Callable[[], object], failed: Callable[[], object]
) -> None:
    """Have `last` called as the running backward's last act, and `done` once it has returned.

    On an accelerator a backward ends in the thread of backwards, where a trace of another thread
    cannot end: `last` is called in whatever thread the backward ends, `done` in the main thread, or
    `failed` if the backward raises. Raises RuntimeError if no backward is running.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_BackwardReturn(last, done, failed))
