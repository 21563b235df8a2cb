"""Parts engine: captured parts of a model that has no single graph, planned together."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch

from rotor._pytorch.casts import casts_are_shared
from rotor.algorithms.curve import Curve
from rotor.common.accounting import METERED_STEPS
from rotor.common.progress import progress
from rotor.common.tensor_trees import output_tensors
from rotor.common.undisturbed import Untriable
from rotor.engines.contract import (
    Call,
    CannotPlan,
    Context,
    IsPending,
    Key,
    StartMeter,
)
from rotor.engines.graph.calls import captured_key
from rotor.engines.graph.costs.recorded import price
from rotor.engines.graph.sizing import warn_unrepeatable
from rotor.engines.learning import MeteredEngine
from rotor.engines.parts.captures import Captures
from rotor.engines.parts.chained import MeasuredStages
from rotor.engines.parts.pieced import PiecesStep, make_code, make_pieces_plan
from rotor.engines.parts.pieces import Pieces, discover
from rotor.engines.parts.plan import (
    PartsPlan,
    is_of_additions,
    learn,
    learn_levels,
    parts_curve,
)
from rotor.engines.proofs import WholeProof, buffers_before, gradients_before
from rotor.errors import CaptureError
from rotor.meter.allocator import MeterBusyError
from rotor.meter.step_meter import StepBytes, cancel_running
from rotor.meter.watch import note_peak, sparse_growth, warn_excess, warn_sparse
from rotor.tier.offload import check_device


class PartsEngine(MeteredEngine):
    """Largest children of a model that can be captured, if the whole cannot be."""

    name: ClassVar[str] = "parts"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.pieces: dict[Key, Pieces] = {}
        self._metered: set[Any] = set()
        self._warned_bytes: dict[int, int] = {}

    # -- measuring and planning

    def key(self, call: Call) -> Key:
        """Return the kind of a step."""
        return captured_key(self.context, call)

    def forget(self, measured: Any) -> None:
        """Drop the parts of a kind of step."""
        for key in [key for key in self.pieces if key.measured == measured]:
            del self.pieces[key]

    def device_of(self, key: Key) -> torch.device | None:
        """Return the device of such steps; ``None`` before parts were captured for them."""
        found = self.pieces.get(key)
        return None if found is None else found.captures.device

    def reason_of(self, key: Key) -> str:
        """Return the reason for which no single graph exists."""
        return self.context.refusals[key.measured].reason

    def stages_of(self, key: Key) -> MeasuredStages | None:
        """Return the measured stages of the model, which may run as chains; ``None`` if unknown."""
        del key
        return None

    def announce(self, pieces: Pieces, reason: str) -> None:
        """Note the text of the warning that the model runs in parts."""
        self.fallback = pieces.describe()

    def measure(self, key: Key, call: Call) -> None:
        """Capture the parts of the model; keep fitting parts of an earlier search."""
        cancel_running()
        device, reason = self.context.device_of(call), self.reason_of(key)
        if self.settings.offload is not None:
            check_device(self.settings.offload.tier, device)
        captures = next(
            (p.captures for p in self.pieces.values() if p.captures.device == device),
            None,
        )
        old = self.pieces.pop(key, None)
        if captures is None:
            options = {"effort": "fast"} | self.settings.options
            pricing = partial(price, self.settings.profile)
            offload = self.settings.offload
            captures = Captures(
                device,
                pricing,
                options,
                shares_shapes=True,
                offload=offload,
                away=self.settings.away,
            )
        module = self.context.module
        lacking = self.context.structure.lacking_gradient(key.absent)
        existing = {id(p) for p in module.parameters() if p.requires_grad} - lacking
        try:
            with progress(1, "capturing the parts of the model") as update:
                stages = self.stages_of(key)
                found = discover(module, *call.arguments, captures, update, existing, stages)
        except MeterBusyError:
            if old is not None:
                self.pieces[key] = old
            raise
        except Untriable as error:
            raise CannotPlan(CaptureError(f"{reason}\nNor can parts be found: {error}")) from None
        if found is None:
            raise CannotPlan(CaptureError(reason))
        if casts_are_shared(device.type) and found.has_shared_parameters(module):
            together = "autocast casts a weight once for a captured part and for other code"
            raise CannotPlan(CaptureError(f"{reason}\nNor can parts be found: {together}"))
        pieces = self.pieces[key] = found if old is None else found.with_earlier(old)
        warn_unrepeatable(self.context, pieces.graphs())
        self.announce(pieces, reason)

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> PartsPlan[Pieces]:
        """Return the fastest choice under a limit."""
        pieces, reason, verify = self.pieces[key], self.reason_of(key), self.settings.verify
        plan = make_pieces_plan(reason, pieces, limit_bytes, reserve_bytes, verify)
        # Another engine may keep the limit, and is asked before any step goes over it.
        is_renewed = pieces.is_measured and key in self.context.plans
        plan.is_over = plan.predicted_bytes > limit_bytes and not is_renewed
        return plan

    def curve(self, key: Key, points: int, *, training: bool = False) -> tuple[Curve, torch.device]:
        """Return time of the parts against limit."""
        pieces = self.pieces[key]
        return parts_curve(pieces, points), pieces.captures.device

    # -- running

    def run(self, plan: PartsPlan[Pieces], call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run the model with the programs of a plan in the place of its parts."""
        module = self.context.module
        plan.verify = self.settings.verify
        if plan.measured_bytes is None:
            sparse_growth(plan, self.context.structure.current_parameters())
        proof = None
        if plan.is_verified(plan.verify):
            undo = buffers_before(module.buffers()), gradients_before(module.parameters())
            proof = WholeProof(plan.proved, undo)
        else:
            make_code(plan)
        meter = start()
        with PiecesStep(plan, meter, proof) as pieces:
            output = pieces.forward(module, call)
        if proof is not None:
            proof.seal()
        if meter is not None:
            meter.forward_done(output_tensors(output))
        token = pieces.token
        is_pending = None if token is None else lambda: token() is not None
        return self.context.with_loss(output, call.targets), is_pending

    # -- learning

    def learn_levels(self, plan: PartsPlan[Pieces], more: dict[str, int]) -> None:
        """Plan the next steps for the observed memory of the code between the parts."""
        peak, expected = learn_levels(plan, more)
        note_peak(plan, peak)
        plan.differs = True
        if peak > plan.limit_bytes:
            plan.measured_bytes = max(plan.measured_bytes or 0, peak)
            plan.outdated = self.context.is_current(plan)
        warn_excess(plan, expected)

    def learn(self, plan: PartsPlan[Pieces], step: StepBytes) -> None:
        """Compare a metered step with its plan, which is renewed if that helps."""
        is_first = plan.awaits_meter
        if is_first:
            plan.measured_timeline = step.timeline
        plan.outdated = learn(plan, step)
        note_peak(plan, step.peak_bytes)
        if is_of_additions(plan):
            warn_sparse(plan, step.peak_bytes)
            return
        is_over = step.peak_bytes > plan.limit_bytes
        if not is_first:
            warn_excess(plan, step.peak_bytes)
            plan.is_over = is_over and not plan.outdated
            return
        pieces = plan.parts
        varies = pieces.is_stale or pieces.searches > 1
        if varies and plan.key.measured in self._metered:
            # Plans are renewed until the search settles: each takes over the last warned peak.
            told = self._warned_bytes.get(plan.limit_bytes, 0)
            plan.warned_bytes = max(plan.warned_bytes, told)
            warn_excess(plan, step.peak_bytes)
            self._warned_bytes[plan.limit_bytes] = plan.warned_bytes
        self._metered.add(plan.key.measured)
        if is_over:
            plan.is_over = not plan.outdated or plan.meterings >= METERED_STEPS
            if not plan.is_over:
                self.warn_early(plan)
