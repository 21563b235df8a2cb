"""Parts engine: captured parts of a model that has no single graph, planned and run together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Self

import torch
from torch import nn

from rotor._pytorch.casts import casts_are_shared
from rotor.algorithms.curve import Curve
from rotor.common.accounting import METERED_STEPS, scrap_bytes
from rotor.common.calls import call_signature
from rotor.common.progress import progress
from rotor.common.substitutes import PatchedForwards
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
from rotor.engines.graph.sizing import warn_unrepeatable
from rotor.engines.learning import MeteredEngine
from rotor.engines.parts.captures import Captures
from rotor.engines.parts.chained import ChainKind, MeasuredStages, mark_backward
from rotor.engines.parts.kinds import Failure, Kind, backward_marks
from rotor.engines.parts.pieces import Pieces, Site, discover
from rotor.engines.parts.plan import (
    PartsPlan,
    PlacedStep,
    choose_within,
    is_of_additions,
    learn,
    learn_levels,
    parts_curve,
    without_bases,
)
from rotor.engines.proofs import StepProof, WholeProof, buffers_before, gradients_before
from rotor.errors import CaptureError, InfeasibleError
from rotor.graph.assembly import least_bytes, peak_of, simulate
from rotor.meter.allocator import MeterBusyError
from rotor.meter.step_meter import StepBytes, StepWatch, cancel_running
from rotor.meter.watch import LevelWatch, note_peak, sparse_growth, warn_excess, warn_sparse
from rotor.tier.offload import check_device
from rotor.units import exact_bytes


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
            away = self.settings.away
            captures = Captures(self.settings, device, shares_shapes=True, away=away)
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
            # Code is made before the step: within it, a watch of the heap would see it.
            for site, number in zip(plan.parts.sites, plan.choice, strict=True):
                if isinstance(site.kind, Kind):
                    site.kind.emitted(number)
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
        plan.differs = True
        self.exceeds(plan, peak)
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


def make_pieces_plan(
    reason: str,
    pieces: Pieces,
    limit_bytes: int,
    reserve_bytes: int,
    verify: str | int,
) -> PartsPlan[Pieces]:
    """Return the fastest choice under a limit; raise InfeasibleError if the pieces alone do not
    fit.

    If the code between the pieces leaves too little, return the choice of the least peak: the need
    of that code is known only after a metered step, and no plan changes it.
    """
    for site in pieces.sites:
        site.kind.refresh()
    for kind in pieces.kinds:
        kind.follow_link()
    options, most = pieces.options(), pieces.tier_limit_bytes
    alone = without_bases(pieces.bases)
    least_alone = least_bytes(options, alone, most)
    if max(least_alone, least_bytes(options, pieces.bases, most)) > limit_bytes:
        # Programs of another shape may keep more than this shape needs.
        for kind in pieces.kinds:
            if kind.is_carried:
                kind.find_programs(again=True)
        options = pieces.options()
        least_alone = least_bytes(options, alone, most)
    least = least_bytes(options, pieces.bases, most)
    if least_alone > limit_bytes:
        choice = choose_within(options, alone, least_alone, most)
        enough = max(least_alone, least + reserve_bytes)
        enough += scrap_bytes(enough)
        names = [site.name for site in pieces.sites]
        raise InfeasibleError(
            f"no plan was found that fits in {exact_bytes(limit_bytes)}; the captured parts of the "
            f"model alone need {exact_bytes(least_alone)}, and a step with the code between them "
            f"about {exact_bytes(enough)}: give at least that, or a smaller batch",
            enough,
            peak=peak_of(options, alone, choice, names).in_all(enough, "between the parts"),
        )
    choice = choose_within(options, pieces.bases, limit_bytes - reserve_bytes, most)
    plan = PartsPlan(
        pieces.captures.device,
        reason,
        pieces,
        choice,
        simulate(options, pieces.bases, choice),
        limit_bytes,
        least + reserve_bytes,
        verify=verify,
        reserve_bytes=reserve_bytes,
    )
    if plan.tier is not None:
        plan.tier.prepare()
    return plan


class PiecesStep:
    """Runner of a plan's pieces during the model's forward, with a proof in a verified step."""

    def __init__(
        self, plan: PartsPlan[Pieces], meter: StepWatch | None, proof: StepProof | None = None
    ) -> None:
        self._plan = plan
        self._meter = meter
        self._proof = proof
        sites = enumerate(plan.parts.sites)
        self._sites = {(s.module, s.number): k for k, s in sites if isinstance(s.kind, Kind)}
        self._is_in_chain = False
        self._placed = PlacedStep() if plan.tier is None else plan.tier.begin()
        self._counts: dict[nn.Module, int] = {}
        self._stack = ExitStack()
        self.token: weakref.ref[torch.Tensor] | None = None

    def __enter__(self) -> Self:
        modules = dict.fromkeys(module for module, _ in self._sites)
        self._stack.enter_context(self._placed)
        self._replaced = self._stack.enter_context(PatchedForwards(modules, self._runner))
        self._others = self._stack.enter_context(
            PatchedForwards(self._plan.parts.uncalled_modules, self._uncalled)
        )
        if self._meter is not None:
            self._meter.mark("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def forward(self, model: nn.Module, call: Call) -> Any:
        """Return the output of the model; call its stages one by one if some are a chain."""
        pieces = self._plan.parts
        if not pieces.chains:
            return model.forward(*call.args, **call.kwargs)
        (x,) = (*call.args, *call.kwargs.values())
        numbers = {site: k for k, site in enumerate(pieces.sites)}
        for unit in pieces.units:
            x = self._run_chain(numbers[unit], unit, x) if isinstance(unit, Site) else unit(x)
        return x

    def _run_chain(self, k: int, site: Site, x: Any) -> Any:
        """Return the output of a chain's stages."""
        chain, number = site.kind, self._plan.choice[k]
        assert isinstance(chain, ChainKind)
        if self._meter is not None:
            self._meter.mark(f"forward {k}")
        self._is_in_chain = True
        try:
            output = chain.run(number, x, self._proof, k)
        finally:
            self._is_in_chain = False
        if self._meter is not None:
            self._meter.mark(f"after {k}")
            mark_backward(x, output, *backward_marks(self._meter.mark, k))
        return output

    def _uncalled(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        """Return the forward of a module on a path where no pieces were searched."""
        pieces = self._plan.parts

        def run(*args: Any, **kwargs: Any) -> Any:
            pieces.is_stale = True
            has_parts = next(module.children(), None) is not None
            if not torch.is_grad_enabled() or not has_parts:
                return forward(*args, **kwargs)
            path = pieces.uncalled_modules[module]
            output, failed = self._call_as_found(path, module, args, kwargs)
            return forward(*args, **kwargs) if failed else output

        return run

    def _call_as_found(
        self, path: str, module: nn.Module, args: Any, kwargs: Any, k: int | None = None
    ) -> tuple[Any, Failure]:
        """Return the output of a call that is not in the plan, captured now, and whether it failed.

        It needs what was planned for call `k`, if possible.
        """
        with self._others.paused(), self._replaced.paused():
            signature = call_signature(args, kwargs)
            try:
                captures = self._plan.parts.captures
                kind = captures.kind_of(path, module, signature, args, kwargs)
            except MeterBusyError:
                return None, "now"  # An operation is not known yet, and the step is being metered.
            finally:
                if isinstance(self._meter, LevelWatch):
                    self._meter.cancel()
            if isinstance(kind, Kind):
                is_held, planned = False, None
                if k is not None:
                    site = self._plan.parts.sites[k]
                    is_held = site.is_held
                    planned = site.kind.options(is_held)[self._plan.choice[k]]
                emitted = kind.emitted(kind.in_place_of(planned, is_held))
                output, failed = kind.call(emitted, module, args, kwargs)
                self.token = self.token if failed else kind.capture.token
                return output, failed
        return None, "now"

    def _runner(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            number = self._counts[module] = self._counts.get(module, -1) + 1
            if self._is_in_chain or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            k = self._sites.get((module, number))
            if k is None:
                self._plan.parts.is_stale = True
                return forward(*args, **kwargs)
            site = self._plan.parts.sites[k]
            if site.failed or site.signature != call_signature(args, kwargs):
                self._plan.parts.is_stale |= not (site.failed or site.varies)
                # The call runs without a plan: the next metered step tells its need.
                self._plan.differs = True
                return forward(*args, **kwargs)
            assert isinstance(site.kind, Kind)
            return self._run(k, site, site.kind, forward, args, kwargs)

        return run

    def _run(self, k: int, site: Site, kind: Kind, forward: Any, args: Any, kwargs: Any) -> Any:
        emitted = kind.code_for(self._plan.choice[k], self._proof, k, site.path)
        marks = None
        if self._meter is not None:
            marks = backward_marks(self._meter.mark, k)
            self._meter.mark(f"forward {k}")
        with self._replaced.paused(site.module):
            output, failed = kind.call(
                emitted, site.module, args, kwargs, marks, self._placed.of(k)
            )
            self.token = self.token if failed else kind.capture.token
        if self._meter is not None:
            self._meter.mark(f"after {k}")
        if failed:
            site.failed = failed == "for good"
            self._plan.parts.is_stale = True
            if not site.failed:
                # The code has taken another branch than when it was captured.
                output, failed = self._call_as_found(site.path, site.module, args, kwargs, k)
            return forward(*args, **kwargs) if failed else output
        return output
