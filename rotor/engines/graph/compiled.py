"""Compiled graph engine: planned graphs that Inductor compiles (``backend="inductor"``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rotor.engines.contract import Context
from rotor.engines.graph.code.inductor import Attempt
from rotor.engines.graph.engine import GraphEngine
from rotor.engines.graph.planned import GraphPlan
from rotor.engines.learning import confirmed
from rotor.errors import InfeasibleError
from rotor.meter.step_meter import StepBytes
from rotor.report.text import attempt_table
from rotor.units import exact_bytes, format_bytes

logger = logging.getLogger("rotor")

_WORTH_COMPILING = 0.95


class CompiledEngine(GraphEngine):
    """Captured steps whose programs Inductor compiles.

    Inductor decides what to fuse, so that a program's bytes are known only after a run. The
    first steps are metered; if one needed more than the limit, the step is planned again with
    distant kernels kept apart, then for fewer bytes; if none of these fits, our own code
    (``backend="fx"``) runs, and a warning says so.
    """

    backend: ClassVar[str] = "inductor"
    improves: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.attempts: dict[Any, list[Attempt]] = {}

    def learn(self, plan: GraphPlan, step: StepBytes) -> None:
        """Compare a metered step with the limit; plan for less, or give up Inductor's code."""
        inductor = plan.step.inductor
        assert inductor is not None
        if not (plan.awaits_meter and self.context.is_current(plan)):
            super().learn(plan, step)
            return
        if plan.device.type != "cpu":
            # Triton tunes kernels at their first call, with memory of its own.
            known = confirmed(plan, step, is_doubtful=step.peak_bytes > plan.limit_bytes)
            if known is None:
                return
            step = known
        plan.measured_bytes = step.peak_bytes
        inductor.learn(plan.limit_bytes - plan.reserve_bytes, plan.predicted_bytes, step.peak_bytes)
        logger.info(
            "Inductor: measured peak %s, predicted %s, limit %s",
            format_bytes(step.peak_bytes),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
        )
        new_loss = self.learn_loss(plan, step)
        if step.peak_bytes > plan.limit_bytes:
            target = inductor.next_target(plan.limit_bytes)
            if target is None:
                self._give_up(plan)
                return
            plan.reserve_bytes = plan.limit_bytes - target
            plan.outdated = True
        elif new_loss and plan.recomputed and plan.reserve_bytes == 0:
            # The loss needs less than assumed: a faster program may fit.
            plan.outdated = self.repriced(plan) < _WORTH_COMPILING * plan.limit_bytes

    def replan(self, old: GraphPlan, make: Callable[[int], Any]) -> Any:
        """Return a plan by the lessons of metered steps; the old one, given up, if none fits."""
        try:
            return make(old.reserve_bytes)
        except InfeasibleError:
            self._give_up(old)
            return old

    @property
    def remarks(self) -> Sequence[Any]:
        """Table of the compiled programs, and the present executor."""
        plan, key = self.context.latest, self.context.latest_key
        if plan.engine == "graph" and plan.step.inductor is not None:
            attempts = attempt_table(plan.step.inductor.attempts, "Inductor")
            return [attempts, *super().remarks]
        tried = [] if key is None else self.attempts.get(key.measured, [])
        attempts = attempt_table(tried, "FX" if plan.engine == "graph" else "blocks")
        return [attempts, *super().remarks]

    def _give_up(self, plan: GraphPlan) -> None:
        assert plan.step.inductor is not None
        attempts = list(plan.step.inductor.attempts)
        self.attempts[plan.key.measured] = attempts
        plan.is_over = True
        found = ", ".join(
            f"{exact_bytes(a.measured_bytes)}, {exact_bytes(a.predicted_bytes)} planned"
            for a in attempts
        )
        self.context.warn(
            f"inductor {plan.key!r}",
            f"the limit of {exact_bytes(plan.limit_bytes)} was not kept by the code that "
            f"Inductor compiled: it needed {found}. The next steps run our own code, "
            'backend="fx", which needs what is planned; a higher limit or a smaller batch would '
            "let Inductor run",
        )
