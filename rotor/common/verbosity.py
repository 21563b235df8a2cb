"""Levels of ``logging.getLogger("rotor")`` while a model with ``verbosity=`` is at work."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["heard", "logging_at"]

logger = logging.getLogger("rotor")
_lock = threading.Lock()
_levels: list[int] = []
_before = logging.NOTSET
_handler: logging.Handler | None = None


@contextmanager
def logging_at(verbosity: int) -> Iterator[None]:
    """Log actions (1), also details (2 and more), in the context; 0: only warnings.

    If no handler is installed, messages go to the standard error stream meanwhile.
    """
    if verbosity <= 0:
        yield
        return
    level = logging.INFO if verbosity == 1 else logging.DEBUG
    _begin(level)
    try:
        yield
    finally:
        _end(level)


def _begin(level: int) -> None:
    global _before, _handler
    with _lock:
        if not _levels:
            _before = logger.level
            if not logger.hasHandlers():
                _handler = logging.StreamHandler()
                logger.addHandler(_handler)
        _levels.append(level)
        _set_level()


def _end(level: int) -> None:
    global _handler
    with _lock:
        _levels.remove(level)
        _set_level()
        if not _levels and _handler is not None:
            logger.removeHandler(_handler)
            _handler = None


def _set_level() -> None:
    given = [] if _before == logging.NOTSET and _levels else [_before]
    logger.setLevel(min([*_levels, *given]))


def heard(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that logs at the verbosity of its object."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.verbosity <= 0:
            return method(self, *args, **kwargs)
        with logging_at(self.verbosity):
            return method(self, *args, **kwargs)

    return call
