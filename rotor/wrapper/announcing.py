"""One line about the first plan of a model and about long planning, at the model's verbosity."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rotor._pytorch import core
from rotor.engines.graph.planned import PlanningRecord
from rotor.units import format_bytes, format_seconds

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
    global _before, _handler
    if verbosity <= 0:
        yield
        return
    level = logging.INFO if verbosity == 1 else logging.DEBUG
    with _lock:
        if not _levels:
            _before = logger.level
            if not logger.hasHandlers() and not getattr(sys.stderr, "closed", False):
                _handler = logging.StreamHandler()
                logger.addHandler(_handler)
        _levels.append(level)
        _set_level()
    try:
        yield
    finally:
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


_LONG_SECONDS = 1.0
_NOTICED = 0.01
"""Share of a step by which a better plan has to save recomputation to be told of."""


class Announcer:
    """Line on the standard error stream, or in the log, when a model's first plan is run.

    It is silent under any verbosity of the model but 0, where the level of
    ``logging.getLogger("rotor")`` is above INFO, and on all ranks but the first.
    """

    def __init__(self, verbosity: int) -> None:
        self._is_on = verbosity == 0
        self._is_first = True
        self._seconds = 0.0
        self._told: Any = None

    @contextmanager
    def timed(self, begun: float = 0.0) -> Iterator[None]:
        """Count the time of capturing, measuring and planning, from now or from a moment on."""
        begun = begun or time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begun

    def log_plan(self, plan: Any) -> None:
        """Log a plan that is about to run, if time was spent on it, or if it has become better.

        Warnings, not this line, report a plan that cannot keep its limit.
        """
        if not self._seconds:
            record = getattr(plan, "planning", None)
            if record is not None and record.improved > record.told:
                self._see_improved(plan, record)
            return
        is_planned = plan.unlimited_bytes is not None
        if is_planned and plan.predicted_bytes > plan.limit_bytes:
            return
        seconds, self._seconds = self._seconds, 0.0
        if not self._is_on or not is_planned:
            return
        if not self._is_first and seconds < max(_LONG_SECONDS, plan.makespan):
            return
        what = "planned"
        if not self._is_first:
            same = self._told is None or self._told == plan.key
            why = "" if same else f" ({plan.key.difference(self._told)})"
            what = (
                "planned again" if self._told == plan.key else f"planned another kind of step{why}"
            )
        self._is_first, self._told = False, plan.key
        record = getattr(plan, "planning", None)
        if record is not None:
            record.told, record.told_recomputation = record.improved, plan.recomputation
        _say(f"{what} in {format_seconds(seconds)}: {_figures(plan)}")

    def _see_improved(self, plan: Any, record: PlanningRecord) -> None:
        record.told, before = record.improved, record.told_recomputation
        if not self._is_on or before is None or before - plan.recomputation < _NOTICED:
            return
        record.told_recomputation = plan.recomputation
        state = "" if record.is_final else " now, planning goes on"
        _say(f"found a better plan: step {before:+.1%} -> {plan.recomputation:+.1%}{state}")


def _say(text: str) -> None:
    if logger.level > logging.INFO or core.rank() > 0:
        return
    with logging_at(1):
        logger.info("rotor: %s", text)


def _figures(plan: Any) -> str:
    peak, most = plan.predicted_bytes, plan.unlimited_bytes
    gain = f"peak {format_bytes(peak)} within {format_bytes(plan.limit_bytes)}"
    program, record = getattr(plan, "program", None), getattr(plan, "planning", None)
    if program is not None and program.offloaded_bytes:
        gain += f", {format_bytes(program.offloaded_bytes)} of {format_bytes(most)} offloaded"
        slower = program.slowdown - 1
        return f"{gain}, step {slower:+.1%} with waits; print(model.report()) for more"
    if plan.recomputation > 0:
        what = "its parts" if plan.engine == "parts" else "step"
        gain += f", {format_bytes(most)} without recomputation, {what} {plan.recomputation:+.1%}"
        if record is not None and not record.is_final:
            work = "measuring and planning go" if record.is_rough else "planning goes"
            gain += f" now, {work} on between steps"
    else:
        gain += ", nothing is recomputed"
    return f"{gain}; print(model.report()) for more"
