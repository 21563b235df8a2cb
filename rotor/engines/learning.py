"""Lessons of metered steps, and the reserve for a loss before the first of them.

Before the first step a loss is assumed to need 4 times the output. If no plan fits beside that
amount, the largest reserve that leaves room for one is taken: the first step is metered, and shows
the real need of the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rotor.common.accounting import METERED_STEPS
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.contract import Engine, Key
from rotor.errors import InfeasibleError
from rotor.meter import allocator
from rotor.meter.step_meter import StepBytes, cancel_running
from rotor.meter.watch import note_peak, warn_excess
from rotor.units import exact_bytes, format_bytes

logger = logging.getLogger("rotor")

_MOST_TRIES = 4

P = TypeVar("P")


def plan_with_guess(
    plan_with: Callable[[int], P], guess_bytes: int, limit_bytes: int, least_bytes: int = 0
) -> tuple[P, int]:
    """Return a plan beside the largest reserve for the loss that leaves room, and the reserve.

    `plan_with` makes a plan beside a reserve, which is at most `guess_bytes`. Raises
    InfeasibleError if no plan fits beside `least_bytes`; its ``minimum_bytes`` is the need of one
    beside them, and its text names that beside the guess too.
    """
    reserve = max(guess_bytes, least_bytes)
    usual_bytes = 0
    for _ in range(_MOST_TRIES):
        try:
            plan = plan_with(reserve)
        except InfeasibleError as error:
            usual_bytes = usual_bytes or error.minimum_bytes
            if reserve == least_bytes:
                if usual_bytes > error.minimum_bytes:
                    text = (
                        f"{error.args[0]}. Beside a loss that needs {format_bytes(guess_bytes)}, "
                        f"as is assumed before one was metered, it is {exact_bytes(usual_bytes)}"
                    )
                    error.args = (text, *error.args[1:])
                raise
            # At the loss the whole reserve counts: the peak falls by as much as the reserve.
            over = max(error.minimum_bytes - limit_bytes, 1)
            reserve = max(reserve - over, least_bytes)
            continue
        break
    else:
        reserve = least_bytes
        plan = plan_with(reserve)
    if reserve < guess_bytes:
        logger.info(
            "the loss is assumed to need %s, of which %s fit in the limit of %s beside a plan: the "
            "first step shows what it needs",
            format_bytes(guess_bytes),
            format_bytes(reserve),
            format_bytes(limit_bytes),
        )
    return plan, reserve


def confirmed(plan: Any, step: StepBytes, *, is_doubtful: bool) -> StepBytes | None:
    """Return a metered step whose figures count; ``None`` if another step has to confirm them.

    On the CPU, threads of gloo give buffers back late; on an accelerator, libraries of kernels take
    memory at their first calls. A step is doubtful if that would explain its figures; it waits in
    `Metered.earlier`. Of two steps the lower peak is right, and the larger loss.
    """
    earlier = plan.earlier
    if earlier is None:
        plan.earlier = step if is_doubtful else None
        return None if is_doubtful else step
    lower = step if step.peak_bytes <= earlier.peak_bytes else earlier
    return replace(lower, loss_bytes=max(step.loss_bytes, earlier.loss_bytes))


class MeteredEngine(Engine):
    """Engine whose plans predict a peak, which metered steps correct."""

    def prepare_measuring(self, arguments: Any, check: Callable[[], object] = int) -> None:
        """Raise, on all ranks or on none, if a step on these arguments cannot be measured now.

        `check` raises further errors.
        """
        problem: Exception | None = None
        try:
            self.context.check_devices(arguments)
            cancel_running()
            with allocator.meter(tree_tensors(arguments)[0].device):
                pass
            check()
        except Exception as error:
            problem = error
        self.context.peers.all_well(problem)

    def warn_varying(self, kind: str, names: Sequence[str]) -> None:
        """Warn of stages, or blocks, that gave other bits, if there are any."""
        if names:
            self.context.warn(
                "varying",
                f"{kind} {', '.join(names)} gave other bits in a second run from the same state: "
                "it is never recomputed, and what it makes is kept. It depends on state that "
                "cannot be set back, or one of its kernels is not deterministic "
                "(torch.use_deterministic_algorithms)",
            )

    def load(self, key: Key, source: Any, limit_bytes: int) -> Any:
        """Return a saved plan of such steps."""
        raise ValueError(
            f"the {self.name} engine has no plan to load: a plan is that of a chain or of a graph"
        )

    @property
    def graph(self) -> Any:
        """Cost model of the latest plan; ValueError: no plan, or no graph."""
        return self.graph_plan().graph

    @property
    def program(self) -> Any:
        """Program of the latest plan; ValueError: no plan, or no graph."""
        return self.graph_plan().program

    def graph_plan(self) -> Any:
        """Return the latest plan; raise ValueError without one, or without a graph."""
        plan = self.context.latest
        if plan is None:
            raise ValueError("no plan was made: call compute_sequence(), or train a step")
        if reason := self.without_graph(plan):
            raise ValueError(reason)
        return plan

    def without_graph(self, plan: Any) -> str:
        """Return why a plan has no graph; empty if it has one."""
        del plan
        return "the model runs without a graph"

    def learn_loss(self, plan: Any, step: StepBytes) -> bool:
        """Note the need of the caller's loss; return whether it is new to the plan.

        By default it is not: the loss is a part of the code that the plan lies in.
        """
        return False

    def repriced(self, plan: Any) -> int:
        """Return the predicted peak of a plan, now that the loss is known."""
        return int(plan.predicted_bytes)

    def replan(self, old: Any, make: Callable[[int], Any]) -> Any:
        """Return a plan that includes the lessons of metered steps; the old one if none fits."""
        try:
            plan = make(old.reserve_bytes)
        except InfeasibleError as error:
            if old.is_refuted:
                raise
            old.stay()
            old.outdated = False
            if old.device.type != "cpu" and old.meterings == 1:
                # On accelerators a first step includes one-time workspaces of libraries: another
                # one is metered.
                old.reserve_bytes, old.measured_bytes = 0, None
            else:
                self.warn_over(old, error.minimum_bytes)
            return old
        plan.meterings = old.meterings
        plan.differs = old.meterings >= METERED_STEPS
        plan.least_bytes_seen, plan.most_bytes_seen = old.least_bytes_seen, old.most_bytes_seen
        plan.warned_bytes = old.warned_bytes
        plan.has_given_back = old.has_given_back
        return plan

    def learn(self, plan: Any, step: StepBytes) -> None:
        """Compare a metered step with its plan, which is renewed if that helps."""
        if not plan.awaits_meter:
            self.learn_peak(plan, step.peak_bytes)
            if self.context.is_current(plan):
                self._give_back(plan, step)
            return
        plan.measured_bytes = step.peak_bytes
        plan.measured_timeline = step.timeline
        plan.meterings += 1
        note_peak(plan, step.peak_bytes)
        over = step.peak_bytes - plan.limit_bytes
        if plan.warned_bytes:
            warn_excess(plan, step.peak_bytes)
        logger.info(
            "measured peak %s, predicted %s, limit %s",
            format_bytes(step.peak_bytes),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
        )
        if not self.context.is_current(plan):
            return
        new_loss = self.learn_loss(plan, step)
        if plan.meterings >= METERED_STEPS:
            if over > 0:
                self.warn_over(plan, step.peak_bytes)
            return
        self._give_back(plan, step)
        if over > 0 or new_loss:
            explained = self.repriced(plan)
            plan.reserve_bytes = max(plan.reserve_bytes, step.peak_bytes - explained)
            plan.outdated = True
        if over > 0:
            self.warn_early(plan)

    def _give_back(self, plan: Any, step: StepBytes) -> None:
        """Reduce a reserve, once, of which a step on an accelerator needed less than half.

        A first step there includes one-time workspaces of libraries of kernels.
        """
        if plan.device.type == "cpu" or plan.has_given_back or not plan.reserve_bytes:
            return
        needed = max(step.peak_bytes - self.repriced(plan), 0)
        if 2 * needed < plan.reserve_bytes:
            plan.reserve_bytes, plan.has_given_back, plan.outdated = needed, True, True

    def warn_early(self, plan: Any) -> None:
        """Warn of an excess that the next plan makes room for."""
        self.context.warn(
            "early",
            f"the limit of {exact_bytes(plan.limit_bytes)} was not kept in a first step: it "
            f"needed {exact_bytes(plan.measured_bytes)}, {exact_bytes(plan.predicted_bytes)} were "
            "predicted, before all needs "
            "had been measured, such as the need of a loss outside of the model. The following "
            "steps are planned for it; loss_fn= makes the loss part of the plan",
        )

    def learn_peak(self, plan: Any, peak_bytes: int) -> None:
        """Renew the plan of a step that needed more than the limit, and warn."""
        if self.exceeds(plan, peak_bytes):
            if plan.outdated:
                plan.reserve_bytes = max(plan.reserve_bytes, peak_bytes - plan.predicted_bytes)
            warn_excess(plan, peak_bytes)

    def exceeds(self, plan: Any, peak_bytes: int) -> bool:
        """Note a peak, seen or expected; return whether it is over the limit.

        Then the plan is renewed, unless no steps run under it any more.
        """
        note_peak(plan, peak_bytes)
        if peak_bytes <= plan.limit_bytes:
            return False
        plan.measured_bytes = max(plan.measured_bytes or 0, peak_bytes)
        plan.outdated = self.context.is_current(plan)
        return True

    def warn_over(self, plan: Any, least_bytes: int) -> None:
        """Warn that the limit of a plan cannot be kept."""
        self.context.warn(
            "over",
            f"the limit of {exact_bytes(plan.limit_bytes)} could not be kept: the step needed "
            f"{exact_bytes(plan.measured_bytes)}, {exact_bytes(plan.predicted_bytes)} were "
            "predicted. Something "
            "outside the model, such as the loss, allocates during the step; a limit of "
            f"{exact_bytes(least_bytes)} would do, and loss_fn= makes the loss part of the plan",
        )
