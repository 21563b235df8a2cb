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
from rotor.graph.pieced import PiecesPlan, PiecesStep, learn
from rotor.graph.pieces import Pieces, discover
from rotor.graph.recorded import price
from rotor.graph.repeating import described_unrepeatable
from rotor.metering import StepBytes, cancel_running
from rotor.progress import progress
from rotor.stages import Structure
from rotor.values import tensors_within


class PiecesSteps(DynamicSteps):
    """What `Checkpointable` does where only parts of a model could be captured."""

    _pieces: dict[Any, Pieces]
    _reasons: dict[Any, tuple[torch.device, str]]
    _profile: Any
    _structure: Structure

    def _dynamic_plan(self, key: Any) -> DynamicPlan:
        device, reason = self._reasons[key[0]]
        for plan in self._plans.values():
            if isinstance(plan, DynamicPlan) and plan.device == device:
                return plan
        limit = self._limit_on(device)
        return DynamicPlan(device, limit, reason, assumed_loss_bytes=self.loss_tmp_memory_usage)

    def _without_pieces(
        self, key: Any, plan: PiecesPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> PiecesPlan | DynamicPlan:
        """The dynamic engine's plan where that keeps the limit, which the pieces do not."""
        plan.is_over = False
        dynamic = self._dynamic_plan(key)
        cancel_running()
        try:
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
        with progress(1, "capturing the parts of the model") as update:
            found = discover(self.module, args, kwargs, captures, update, existing)
        if found is not None:
            self._pieces[key] = found if old is None else found.with_earlier(old)

    def _warn_unrepeatable(self, graphs: Sequence[Lowered]) -> None:
        text = described_unrepeatable(graphs)
        if text:
            self._warn_once("unrepeatable", text)

    def _step_by_pieces(
        self, plan: PiecesPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        meter = self._start_meter(plan)
        with PiecesStep(plan, meter) as pieces:
            output = self.module.forward(*args, **kwargs)
        self.__dict__["_pending"] = pieces.token
        if meter is not None:
            meter.forward_done(tensors_within(output))
        return self._with_loss(output, targets)

    def _learn_pieces(self, plan: PiecesPlan, step: StepBytes) -> None:
        could_do_better = learn(plan, step)
        plan.outdated = could_do_better
        over = step.peak_bytes > plan.limit_bytes
        if over and (not could_do_better or plan.meterings >= METERED_STEPS):
            plan.is_over = True
