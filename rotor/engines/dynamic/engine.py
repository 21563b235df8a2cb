"""Dynamic engine: any model runs as it is, and memory is managed while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rotor import dtr
from rotor.algorithms.curve import Curve
from rotor.common.accounting import METERED_STEPS, SCRAPS_BYTES, is_new_maximum
from rotor.common.frames import warn_caller
from rotor.common.model_state import refuse_sharded
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.common.undisturbed import trial
from rotor.dtr.context import Unfollowed
from rotor.engines.contract import Call, CannotPlan, Context, Engine, IsPending, Key, StartMeter
from rotor.engines.dynamic.plan import DynamicPlan, check_options
from rotor.engines.dynamic.step import BudgetedStep
from rotor.errors import MemoryLimitWarning, RecomputationError
from rotor.meter.step_meter import StepBytes, StepMeter, cancel_running
from rotor.meter.watch import note_peak
from rotor.tier.offload import check_device
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
        module, with_loss = self.context.module, self.context.with_loss

        def forward(args: Any, kwargs: dict[str, Any], targets: Any) -> Any:
            return with_loss(module.forward(*args, **kwargs), targets)

        value, rerun = (*call.arguments, call.targets), None
        if not is_trial:
            rerun = self.context.structure.rerun(value, plan.device)
        step = plan.step(module, is_trial=is_trial)
        step.explain = lambda error: self.context.explain(error, plan.limit_bytes)
        plan.unknown = [] if meter is None else step.session.mark_unknown(meter.mark)
        return step, step.forward(forward, value, plan.room, rerun)

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
