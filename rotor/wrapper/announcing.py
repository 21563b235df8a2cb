"""One line about the first plan of a model, and about each plan that took long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rotor._pytorch import core
from rotor.common.verbosity import logging_at
from rotor.engines.graph.record import PlanningRecord
from rotor.units import format_bytes, format_seconds

__all__ = ["Announcer"]

logger = logging.getLogger("rotor")
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
