"""Dynamic engine: any model runs as it is, and memory is managed while it runs."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from rotor import dtr
from rotor._pytorch import devices
from rotor.algorithms.curve import Curve
from rotor.common.accounting import (
    DYNAMIC_LOSS_FACTOR,
    DYNAMIC_NOISE_BYTES,
    METERED_STEPS,
    SCRAPS_BYTES,
    assumed_loss_bytes,
    has_room_for_proofs,
    is_new_maximum,
    noise_bytes,
)
from rotor.common.checksums import NO_ROOM, is_verified
from rotor.common.frames import warn_caller
from rotor.common.model_state import refuse_sharded
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.common.timeline import Timeline
from rotor.common.undisturbed import trial
from rotor.dtr.context import Unfollowed, check_heuristic
from rotor.dtr.recall import Stats
from rotor.dtr.repeating import verifying_bytes
from rotor.dtr.stepping import Unknown, learn_needs
from rotor.engines.contract import Call, CannotPlan, Context, Engine, IsPending, Key, StartMeter
from rotor.engines.dynamic.step import BudgetedStep
from rotor.errors import MemoryLimitWarning, RecomputationError
from rotor.meter.step_meter import Metered, StepBytes, StepMeter, cancel_running
from rotor.meter.watch import note_peak
from rotor.tier.offload import Offload, check_device
from rotor.tier.store import TierStore
from rotor.units import exact_bytes


class DynamicEngine(Engine):
    """Steps under a session of `rotor.dtr`.

    Results of a step are evicted when memory gets short, and computed again. Nothing is captured,
    measured or planned before, so that a forward may contain any code; the first step shows
    whether a limit can be kept.
    """

    name: ClassVar[str] = "dynamic"
    depends_on_structure: ClassVar[bool] = False
    plans_ahead: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._by_device: dict[torch.device, DynamicPlan] = {}
        self._plans = context.plans
        has_tier = context.settings.offload is not None
        recomputes = "recomputes, or moves to the second tier," if has_tier else "recomputes"
        self.fallback = (
            "no single graph of the model could be captured, so its memory is not planned: the "
            f"dynamic engine runs it, which evicts and {recomputes} while a step runs."
        )

    @property
    def _is_asked_for(self) -> bool:
        return self.settings.engine == self.name

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise if the model is sharded, random numbers may differ, or costs are given."""
        if self._is_asked_for:
            check_options(dict(options))
        else:
            super().check(options)
        refuse_sharded(self.context.module, "operations")
        if not self.settings.preserve_rng_state:
            raise ValueError(
                "the dynamic engine always recomputes with the random numbers of the first "
                "forward: leave preserve_rng_state at True"
            )
        if not (isinstance(self.settings.profile, str) and self.settings.profile == "measured"):
            raise ValueError(
                "the dynamic engine measures while it runs: profile= is for graphs, give "
                'engine="graph"'
            )

    # -- the limit

    def key(self, call: Call) -> Key:
        """Return the device: its limit holds for steps of every kind."""
        args, kwargs = call.arguments
        tensors = tree_tensors((args, kwargs)) or list(self.context.module.parameters())
        if not tensors:
            raise ValueError("neither the arguments nor the model hold a tensor")
        device = tensors[0].device
        if device not in self._by_device:
            refuse_sharded(self.context.module)
            self.context.check_devices((tensors, args, kwargs))
        return Key(device, ())

    def forget(self, measured: Any) -> None:
        """Keep everything: this engine has no measures."""

    def device_of(self, key: Key) -> torch.device | None:
        """Return the device of such steps; ``None`` if no other engine has refused them."""
        if self._is_asked_for or key.measured in self.context.refusals:
            return self._device_of(key)
        return None

    def _device_of(self, key: Key) -> torch.device:
        device: torch.device = key.measured
        return device if self._is_asked_for else self.context.refusals[key.measured].device

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> DynamicPlan:
        """Return the record of steps on a device, the same for all of them."""
        device = self._device_of(key)
        if self.settings.away is not None:
            # Once they exist, they count as the model's own: the limit of its steps stays.
            limit_bytes -= self.settings.away.absent_bytes()
        if self._plans is not self.context.plans:
            # The limit or an option has changed: earlier lessons are not for it.
            self._plans, self._by_device = self.context.plans, {}
        known = self._by_device.get(device)
        if known is not None and known.limit_bytes == limit_bytes:
            return known
        plan = self._by_device[device] = DynamicPlan(
            device,
            limit_bytes,
            "" if self._is_asked_for else self.context.refusals[key.measured].reason,
            options=self.settings.options if self._is_asked_for else {},
            reserve_bytes=reserve_bytes,
            assumed_loss_bytes=self.settings.loss_tmp_memory_usage,
            verify=self.settings.verify,
            offload=self.settings.offload,
        )
        if plan.offload is not None:
            check_device(plan.offload.tier, device)
            plan.offload.known_link(device)
        return plan

    def measure(self, key: Key, call: Call) -> None:
        """Raise InfeasibleError if a step does not fit in the limit."""
        cancel_running()
        plan = self._by_device[self._device_of(key)]
        # A step undoes its own writes to tensors: the trial need not guard them.
        given = (call.args, call.kwargs, call.targets)
        with trial(self.context.module, given, plan.device, is_guarded=False) as made:
            self._try(plan, Call(*made.arguments))

    def curve(self, key: Key, points: int, *, training: bool = False) -> tuple[Curve, torch.device]:
        """Raise ValueError: the cost of a limit is unknown before a step has run under it."""
        if not self._is_asked_for:
            reason = self.context.refusals[key.measured].reason
            raise ValueError(f"the model runs without a graph: {reason}")
        raise ValueError(
            "the dynamic engine decides while a step runs: what a limit costs is not known before. "
            'Give engine="graph" for a curve, or run steps under several limits and read report()'
        )

    # -- running

    def run(self, plan: DynamicPlan, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step under a session of the dynamic runtime."""
        if dtr.current() is not None:
            raise RuntimeError(
                "a model with a limit was called within rotor.dtr.budget, or within another model "
                "with a limit, and budgets do not nest: wrap the outermost model only"
            )
        plan.verify = self.settings.verify
        meter: Any = start()
        try:
            step, output = self._run(plan, call, meter=meter)
        except Unfollowed as error:
            raise CannotPlan(error) from None
        if meter is not None:
            plan.output_bytes, step.is_metered = step.output_bytes, True
            meter.forward_done(output_tensors(output))
        held = weakref.ref(step)

        def is_pending() -> bool:
            found = held()
            return found is not None and not found.is_done

        return output, is_pending

    def _run(
        self,
        plan: DynamicPlan,
        call: Call,
        *,
        meter: StepMeter | None = None,
        is_trial: bool = False,
    ) -> tuple[BudgetedStep, Any]:
        value, rerun = (*call.arguments, call.targets), None
        if not is_trial:
            rerun = self.context.structure.rerun(value, plan.device)
        step = plan.step(self.context.module, is_trial=is_trial)
        step.explain = lambda error: self.context.explain(error, plan.limit_bytes)
        plan.unknown = [] if meter is None else step.session.mark_unknown(meter.mark)
        return step, step.forward(self.context.plain, value, plan.room, rerun)

    def _try(self, plan: DynamicPlan, call: Call) -> None:
        """Run a forward and a backward without a trace; gradients of outputs are ones.

        Operations that do not repeat are kept, and the trial runs once more.
        """
        while True:
            known = len(plan.kept)
            try:
                return self._run_trial(plan, call)
            except RecomputationError:
                if len(plan.kept) == known:
                    raise

    def _run_trial(self, plan: DynamicPlan, call: Call) -> None:
        _, output = self._run(plan, call, is_trial=True)
        outputs = [t for t in output_tensors(output) if t.requires_grad]
        if not outputs:
            raise ValueError(
                "nothing in this step needs a gradient: call the plain model, chk.module"
            )
        inputs = [*self.context.module.parameters(), *tree_tensors(call.arguments)]
        needed = [t for t in inputs if t.requires_grad]
        given = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, needed, given, allow_unused=True)

    # -- learning

    def learn(self, plan: DynamicPlan, step: StepBytes) -> None:
        """Set room aside for the need of a metered step beyond the limit."""
        knew_loss = plan.loss_bytes is not None
        loss, held = plan.loss_bytes or 0, plan.held_bytes
        over = plan.learn(step)
        if over <= 0:
            return
        passed = bool(plan.latest) and plan.last.stats.overflows > 0
        # Guessed needs of the loss and of operators are known now, and need no reserve.
        if knew_loss and not plan.unknown and not passed:
            explained = max((plan.loss_bytes or 0) - loss, plan.held_bytes - held, 0)
            plan.reserve_bytes += max(over - explained, 0)
        if plan.meterings < METERED_STEPS:
            plan.measured_bytes = None
        else:
            plan.differs = not passed
        if is_new_maximum(step.peak_bytes, plan.limit_bytes, plan.warned_bytes):
            plan.warned_bytes = step.peak_bytes
            unknown = "" if knew_loss else ", of which nothing was known before"
            is_strict = self._is_asked_for and plan.options.get("strict", True)
            going = "are refused" if is_strict else "go on all the same"
            warn_caller(
                f"the limit of {exact_bytes(plan.limit_bytes)} could not be kept: the step needed "
                f"{exact_bytes(step.peak_bytes)}, {exact_bytes(plan.loss_bytes or 0)} of them at "
                f"most for the loss{unknown}. The next steps are run with as much less, and {going}"
                " where that is too little; a limit of "
                f"{exact_bytes(step.peak_bytes + 2 * SCRAPS_BYTES)} would do, and loss_fn= makes "
                "the loss part of what is managed",
                MemoryLimitWarning,
            )

    def learn_peak(self, plan: DynamicPlan, peak_bytes: int) -> None:
        """Meter the next step if this one was over the limit."""
        note_peak(plan, peak_bytes)
        plan.differs |= peak_bytes > plan.limit_bytes


_REMEMBERED = 20
_LEARNING_STEPS = (3, 16, 32)
"""Steps after which the speed of a second tier is compared with the one that was measured."""
_STEP_MARKS = ("loss", "backward")
_SETTINGS = inspect.signature(dtr.budget).parameters
OPTIONS = frozenset({"heuristic", "seed", "strict", "sample", "ignore_small", "storage_swap"})
_DEFAULTS = {name: _SETTINGS[name].default for name in OPTIONS}


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step."""

    stats: Stats
    output_bytes: int
    room_bytes: int
    """Rest of the limit for the loss."""


@dataclass(repr=False)
class DynamicPlan(Metered):
    """Record of the steps that run under one limit on one device."""

    engine: ClassVar[str] = "dynamic"

    device: torch.device
    limit_bytes: int
    reason: str = ""
    """Reason for which nothing is planned; empty if the user asked for this engine."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the session."""
    assumed_loss_bytes: int = 0
    """Need of the loss beside the gradient of the output, as given by the caller; or 0."""
    loss_bytes: int | None = None
    """Largest measured need of the caller's loss; ``None`` before the first metered step."""
    held_bytes: int = 0
    """Memory beyond the runtime's count when the model's backward began."""
    loss_output_bytes: int = 0
    """Bytes of the outputs for which the two needs above were measured."""
    step_bytes: int = 0
    """Peak of the latest metered step with outputs of that size."""
    output_bytes: int = 0
    """Bytes of the outputs in the metered step."""
    counted_bytes: int = 0
    """Runtime's count when the backward of the metered step began."""
    level_bytes: int | None = field(default=None, repr=False)
    """Bytes given out by the device at that time beyond the runtime's count, in the first step
    after a metered one.
    """
    unknown: Unknown = field(default_factory=list, repr=False)
    """Operators of that step whose needs were guessed."""
    offload: Offload | None = None
    kept: set[str] = field(default_factory=set)
    """Operators whose results are not evicted, because they differed when they ran again."""
    accepted: set[Any] = field(default_factory=set, repr=False)
    """Kinds of steps that have run within the limit, or with a warning, where nobody asked for
    this engine: no such step is refused later.
    """
    steps: int = 0
    latest: deque[StepFigures] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def __post_init__(self) -> None:
        if not has_room_for_proofs(verifying_bytes(self.device), self.limit_bytes):
            self.proved.unproved = NO_ROOM

    @property
    def last(self) -> StepFigures:
        """Figures of the latest step; ValueError before one."""
        if not self.latest:
            raise ValueError(
                "nothing is known before a step has run: train one, or measure(sample)"
            )
        return self.latest[-1]

    @property
    def predicted_bytes(self) -> int:
        """Unpredicted: the model's peak in the latest step, by the runtime's count."""
        return self.last.stats.peak_bytes

    @property
    def makespan(self) -> float:
        """Unpredicted: seconds of the latest step in operations, and in choosing."""
        stats = self.last.stats
        return (stats.base_ns + stats.remat_ns + stats.search_ns) / 1e9

    def _knows(self, output_bytes: int) -> bool:
        return self.loss_bytes is not None and output_bytes == self.loss_output_bytes

    def _loss(self, output_bytes: int) -> int:
        if self.loss_bytes is not None and output_bytes <= self.loss_output_bytes:
            return self.loss_bytes
        if self.assumed_loss_bytes:
            return self.assumed_loss_bytes + output_bytes
        return max(
            assumed_loss_bytes(output_bytes), self._scaled(self.loss_bytes or 0, output_bytes)
        )

    def held_by_loss(self, output_bytes: int) -> int:
        """Bytes that the loss holds while the model's backward runs."""
        if self.loss_bytes is not None and output_bytes <= self.loss_output_bytes:
            return self.held_bytes
        return self._loss(output_bytes)

    def _scaled(self, nbytes: int, output_bytes: int) -> int:
        known = self.loss_output_bytes
        return -(-nbytes * output_bytes // known) if known else 0

    def learn(self, step: StepBytes) -> int:
        """Note a metered step; return its excess over the limit, negative if it was below."""
        self.measured_bytes = step.peak_bytes
        self.measured_timeline = _without_parts(step.timeline)
        self.meterings += 1
        learn_needs(self.unknown, step.segments)
        output_bytes = self.output_bytes
        starts = {segment.name: segment.start_bytes for segment in step.segments}
        held = max(starts["backward"] - self.counted_bytes, 0)
        note_peak(self, step.peak_bytes)
        self.level_bytes = None
        if output_bytes >= self.loss_output_bytes:
            self.loss_output_bytes = output_bytes
            self.loss_bytes, self.held_bytes = step.loss_bytes, held
            self.step_bytes = step.peak_bytes
        else:
            self.loss_bytes = max(self.loss_bytes or 0, step.loss_bytes)
            self.held_bytes = max(self.held_bytes, held)
        return step.peak_bytes - self.limit_bytes

    def step(self, module: nn.Module, *, is_trial: bool = False) -> BudgetedStep:
        """Return a step of a module, about to begin; a trial leaves no trace."""
        level = devices.level(self.device)
        kind = getattr(self.key, "measured", None)
        # Steps of an accepted kind go on over the limit, and a warning says by how much.
        is_accepted = bool(self.reason) and kind in self.accepted and not is_trial

        def began(step: BudgetedStep) -> None:
            session = step.session
            if step.is_metered:
                self.counted_bytes = session.current_bytes
            held = self.held_by_loss(step.output_bytes)
            if self._knows(step.output_bytes) and not is_trial:
                seen = devices.level(self.device) - level - session.current_bytes
                # The level of the CPU's heap includes Python's objects.
                known = held if self.device.type == "cpu" else min(held, max(seen, 0))
                session.outside_bytes = self.reserve_bytes + known
                held += 0 if level < 0 or step.is_metered else self._grown(step, seen)
            elif not is_trial:
                session.outside_bytes = self.reserve_bytes + step.gradient_bytes
                held = max(held, step.gradient_bytes)
            session.aim(self.limit_bytes - self.reserve_bytes - held)

        store = None if self.offload is None else TierStore(self.offload)

        def ended(step: BudgetedStep) -> None:
            self.steps += 1
            if store is not None and self.steps in _LEARNING_STEPS:
                store.learn()
            if step.is_proved:
                self.proved.add(step.session.compared)
            if step.has_run:
                self.accepted.add(kind)
            if step.session.told_bytes > self.warned_bytes:
                peak_bytes = step.session.stats.peak_bytes
                self.warned_bytes = max(step.session.told_bytes, peak_bytes)
            room = self.reserve_bytes + self._loss(step.output_bytes)
            self.latest.append(StepFigures(step.session.stats, step.output_bytes, room))

        step = BudgetedStep(
            module,
            self.limit_bytes,
            self.device,
            backward_began=began,
            ended=ended,
            is_trial=is_trial,
            observer=None,
            verify=not self.proved.unproved and is_verified(self.verify, self.proved.ran),
            kept=self.kept,
            offload=store,
            **(_DEFAULTS | {"strict": not is_accepted} | self.options),
        )
        self.proved.ran += not is_trial
        step.session.aim(self.limit_bytes - self.reserve_bytes)
        step.session.outside_bytes = self.reserve_bytes
        step.session.told_bytes = self.warned_bytes
        return step

    def _grown(self, step: BudgetedStep, seen_bytes: int) -> int:
        """Return the growth of the loss's memory since the step after the latest metered one."""
        if step.is_crowded:
            return 0
        if self.level_bytes is None:
            self.level_bytes = seen_bytes
        more = seen_bytes - self.level_bytes
        if more <= noise_bytes(self.level_bytes, DYNAMIC_NOISE_BYTES):
            return 0
        self.differs = True
        return more

    def room(self, step: BudgetedStep) -> tuple[int, int]:
        """Return the bytes to leave for the loss of a step, and its known need."""
        wished = self._loss(step.output_bytes)
        if not self._knows(step.output_bytes):
            is_guess = self.loss_bytes is None and not self.assumed_loss_bytes
            return max(wished, DYNAMIC_LOSS_FACTOR * step.output_bytes if is_guess else 0), 0
        step.tried_bytes = self.step_bytes + 2 * SCRAPS_BYTES
        return wished, wished


def _without_parts(timeline: Timeline | None) -> Timeline | None:
    """Return the timeline without the marks of single operators."""
    if timeline is None:
        return None
    return replace(timeline, marks=tuple(m for m in timeline.marks if m[0] in _STEP_MARKS))


def check_options(options: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for an option that `rotor.dtr.budget` does not take."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(
                f"unknown option {name!r}, expected one of {', '.join(sorted(OPTIONS))} of "
                "rotor.dtr.budget"
            )
    check_heuristic(options.get("heuristic", _DEFAULTS["heuristic"]))
