"""Ends of traces in the main thread: of backwards that end in a thread of an accelerator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

import torch

from rotor import _core
from rotor._pytorch import core

logger = logging.getLogger("rotor")


def is_current() -> bool:
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
        if is_current():
            function()
        else:
            call_soon(function)

    def has_ended_elsewhere() -> bool:
        last()
        return not is_current()

    end = core.BackwardEnd(partial(run, done), partial(run, failed), has_ended_elsewhere)
    torch.autograd.Variable._execution_engine.queue_callback(end)
