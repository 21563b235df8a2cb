"""Steps of models that have no single graph: their parts are captured, and planned together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rotor.checkpointable import METERED_STEPS
from rotor.dynamic import DynamicSteps
from rotor.dynamic_plan import DynamicPlan
from rotor.errors import InfeasibleError
from rotor.graph.kinds import Captures
from rotor.graph.lowering import Lowered
from rotor.graph.pieced import (
    PiecesPlan,
    PiecesStep,
    expect_additions,
    is_of_additions,
    learn,
    learn_levels,
)
from rotor.graph.pieces import Pieces, discover
from rotor.graph.proving import PartsTally
from rotor.graph.recorded import price
from rotor.graph.repeating import attributes_kept, described_unrepeatable
from rotor.memory import MeterBusyError
from rotor.metering import StepBytes, StepWatch, cancel_running
from rotor.progress import progress
from rotor.recompute import generators_kept
from rotor.stages import Structure
from rotor.values import tensors_within
from rotor.watching import LevelWatch, note_peak, sparse_growth, warn_excess, warn_sparse


class PiecesSteps(DynamicSteps):
    """What `Checkpointable` does where only parts of a model could be captured."""

    _pieces: dict[Any, Pieces]
    _reasons: dict[Any, tuple[torch.device, str]]
    _steps: dict[Any, Any]
    _profile: Any
    _structure: Structure

    def _forget(self, measured: Any) -> None:
        """Measure this kind of step again when it comes."""
        known: Any
        for known in (self._plans, self._pieces):
            for key in [key for key in known if key[0] == measured]:
                del known[key]
        for known in (self._steps, self._reasons):
            known.pop(measured, None)

    def _dynamic_plan(self, key: Any) -> DynamicPlan:
        device, reason = self._reasons[key[0]]
        for plan in self._plans.values():
            if isinstance(plan, DynamicPlan) and plan.device == device:
                return plan
        limit = self._limit_on(device)
        return DynamicPlan(
            device,
            limit,
            reason,
            assumed_loss_bytes=self.loss_tmp_memory_usage,
            verify=self.verify,
        )

    def _without_pieces(
        self, key: Any, plan: PiecesPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> PiecesPlan | DynamicPlan:
        """The dynamic engine's plan where that keeps the limit, which the pieces do not."""
        plan.is_over = False
        dynamic = self._dynamic_plan(key)
        cancel_running()
        modules = list(self.module.modules())
        try:
            with generators_kept(modules), attributes_kept(modules):
                self._try_dynamically(dynamic, args, targets, kwargs)
        except InfeasibleError:
            self._warn_once("over", plan.told_over())
            return plan
        self._warn_once(
            "over",
            f"{plan.told_over()}. The dynamic engine keeps the limit: from now on it runs the "
            "model, evicts and recomputes while a step runs, and nothing is planned",
        )
        del self._pieces[key]
        self._plans[key] = dynamic
        return dynamic

    def _search_pieces(self, key: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cancel_running()
        device = self._reasons[key[0]][0]
        captures = next(
            (
                pieces.captures
                for other, pieces in self._pieces.items()
                if self._reasons[other[0]][0] == device
            ),
            None,
        )
        old = self._pieces.pop(key, None)
        if captures is None:
            options = {"effort": "fast"} | self._options
            captures = Captures(device, partial(price, self._profile), options)
        lacking = self._structure.lacking_gradient(key[1])
        existing = {id(p) for p in self.module.parameters() if p.requires_grad} - lacking
        try:
            with progress(1, "capturing the parts of the model") as update:
                found = discover(self.module, args, kwargs, captures, update, existing)
        except MeterBusyError:
            if old is not None:
                self._pieces[key] = old
            raise
        if found is not None:
            self._pieces[key] = found if old is None else found.with_earlier(old)

    def _warn_unrepeatable(self, graphs: Sequence[Lowered]) -> None:
        text = described_unrepeatable(graphs)
        if text:
            self._warn_once("unrepeatable", text)

    def _expect_sparse(self, plan: Any) -> None:
        """Plan for sparse gradients that have grown since a step was metered."""
        if isinstance(plan, PiecesPlan):
            more = sparse_growth(plan, self._structure.parameters)
            if more:
                expect_additions(plan, more)

    def _step_by_pieces(
        self, plan: PiecesPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if plan.measured_bytes is None:
            sparse_growth(plan, self._structure.parameters)
        tally = PartsTally(plan.proved, self.module) if plan.is_verified(self.verify) else None
        meter = self._start_meter(plan)
        with PiecesStep(plan, meter, tally) as pieces:
            output = self.module.forward(*args, **kwargs)
        if tally is not None:
            tally.seal()
        self.__dict__["_pending"] = pieces.token
        if meter is not None:
            meter.forward_done(tensors_within(output))
        return self._with_loss(output, targets)

    def _watch(self, plan: Any) -> StepWatch | None:
        watch = super()._watch(plan)
        if watch is None and isinstance(plan, PiecesPlan) and plan.levels and plan.is_watched:
            return LevelWatch(self, plan) if plan.device.type == "cpu" else None
        return watch

    def _learn_levels(self, plan: PiecesPlan, more: dict[str, int]) -> None:
        """Have the next steps planned for what the code between the parts was seen to keep."""
        peak, expected = learn_levels(plan, more)
        note_peak(plan, peak)
        plan.differs = True
        if peak > plan.limit_bytes:
            plan.measured_bytes = max(plan.measured_bytes or 0, peak)
            plan.outdated = any(known is plan for known in self._plans.values())
        warn_excess(plan, expected)

    def _learn_again(self, plan: Any, step: StepBytes) -> None:
        if not isinstance(plan, PiecesPlan):
            super()._learn_again(plan, step)
            return
        note_peak(plan, step.peak_bytes)
        plan.outdated = learn(plan, step)
        if is_of_additions(plan):
            warn_sparse(plan, step.peak_bytes)
            return
        warn_excess(plan, step.peak_bytes)
        plan.is_over = step.peak_bytes > plan.limit_bytes and not plan.outdated

    def _learn_pieces(self, plan: PiecesPlan, step: StepBytes) -> None:
        could_do_better = learn(plan, step)
        note_peak(plan, step.peak_bytes)
        plan.outdated = could_do_better
        if is_of_additions(plan):
            warn_sparse(plan, step.peak_bytes)
            return
        over = step.peak_bytes > plan.limit_bytes
        if over and (not could_do_better or plan.meterings >= METERED_STEPS):
            plan.is_over = True
