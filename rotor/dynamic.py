"""`Checkpointable` that decides while the model runs: any model, nothing captured or planned."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rotor import dtr
from rotor.algorithms.curve import Curve
from rotor.checkpointable import METERED_STEPS, Checkpointable
from rotor.dtr.recall import MOST_SCRAPS
from rotor.dynamic_plan import DynamicPlan, check_options
from rotor.errors import MemoryLimitWarning, RecomputationError
from rotor.graph.calls import takes_targets
from rotor.metering import StepBytes, StepMeter, cancel_running
from rotor.nested import NestedStep
from rotor.report.html import measured_page
from rotor.report.text import dynamic_figures, dynamic_report, dynamic_table, step_rows
from rotor.stages import refuse_sharded
from rotor.units import parse_bytes
from rotor.values import tensors_of, tensors_within
from rotor.watching import note_peak

_NO_TARGETS: tuple[Any, ...] = ()


class DynamicSteps(Checkpointable):
    """What engines share that can run a model under `rotor.dtr`."""

    _pending: weakref.ref[Any] | None

    def _step_dynamically(
        self, plan: DynamicPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if dtr.current() is not None:
            raise RuntimeError(
                "a model with a limit was called within rotor.dtr.budget, or within another model "
                "with a limit, and budgets do not nest: wrap the outermost model only"
            )
        pending = self._pending() if self._pending is not None else None
        if isinstance(pending, NestedStep) and not pending.is_done:
            self._warn_pending(plan.limit_bytes)
        meter: Any = self._start_meter(plan)
        if meter is None:
            cancel_running()
        try:
            step, output = self._run_dynamically(plan, args, targets, kwargs, meter=meter)
        except BaseException:
            if meter is not None:
                meter.cancel()
            raise
        self.__dict__["_pending"] = weakref.ref(step)
        if meter is not None:
            plan.output_bytes, step.is_metered = step.output_bytes, True
            meter.forward_done(tensors_within(output))
        return output

    def _run_dynamically(
        self,
        plan: DynamicPlan,
        args: Any,
        targets: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        meter: StepMeter | None = None,
        is_trial: bool = False,
    ) -> tuple[NestedStep, Any]:
        module, loss_fn = self.module, self.loss_fn

        def call(args: Any, kwargs: dict[str, Any], targets: Sequence[Any]) -> Any:
            output = module.forward(*args, **kwargs)
            return output if not targets or loss_fn is None else loss_fn(output, *targets)

        step = plan.step(module, is_trial=is_trial)
        plan.unknown = [] if meter is None else step.session.mark_unknown(meter.mark)
        return step, step.forward(call, (args, kwargs, tuple(targets)), plan.room)

    def _try_dynamically(
        self, plan: DynamicPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Run a forward and a backward of which nothing is left; gradients of outputs are ones.

        What does not repeat in it is kept, and it runs once more.
        """
        while True:
            known = len(plan.kept)
            try:
                return self._run_trial(plan, args, targets, kwargs)
            except RecomputationError:
                if len(plan.kept) == known:
                    raise

    def _run_trial(
        self, plan: DynamicPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        _, output = self._run_dynamically(plan, args, targets, kwargs, is_trial=True)
        outputs = [t for t in tensors_within(output) if t.requires_grad]
        if not outputs:
            raise ValueError(
                "nothing in this step needs a gradient: call the plain model, chk.module"
            )
        inputs = [*self.module.parameters(), *tensors_of((args, kwargs))]
        needed = [t for t in inputs if t.requires_grad]
        given = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, needed, given, allow_unused=True)

    def _learn_dynamically(self, plan: DynamicPlan, step: StepBytes) -> None:
        knew_loss = plan.loss_bytes is not None
        loss, held = plan.loss_bytes or 0, plan.held_bytes
        over = plan.learn(step)
        if over <= 0:
            return
        # What guesses about the loss and operators have cost is known now.
        if knew_loss and not plan.unknown:
            explained = max((plan.loss_bytes or 0) - loss, plan.held_bytes - held, 0)
            plan.reserve_bytes += max(over - explained, 0)
        if plan.meterings < METERED_STEPS:
            plan.measured_bytes = None
        else:
            plan.differs = True
        is_told = bool(plan.latest) and plan.last.stats.overflows > 0
        if step.peak_bytes > plan.warned_bytes and not is_told:
            plan.warned_bytes = step.peak_bytes
            unknown = "" if knew_loss else ", of which nothing was known before"
            warnings.warn(
                f"the limit of {plan.limit_bytes} bytes could not be kept: the step needed "
                f"{step.peak_bytes} bytes, {plan.loss_bytes} of them at most for the loss"
                f"{unknown}. The next steps are run with as much less, and are refused where that "
                f"is too little; a limit of {step.peak_bytes + 2 * MOST_SCRAPS} bytes would do, "
                "and loss_fn= makes the loss part of what is managed",
                MemoryLimitWarning,
                stacklevel=2,
            )

    def _learn_again(self, plan: Any, step: StepBytes) -> None:
        if isinstance(plan, DynamicPlan):
            self._learn_dynamically(plan, step)
        else:
            super()._learn_again(plan, step)

    def _learn_peak(self, plan: Any, peak_bytes: int) -> None:
        if not isinstance(plan, DynamicPlan):
            super()._learn_peak(plan, peak_bytes)
            return
        note_peak(plan, peak_bytes)
        plan.differs |= peak_bytes > plan.limit_bytes


class DynamicCheckpointable(DynamicSteps):
    """What `Checkpointable` makes of any module with ``engine="dynamic"``.

    The model runs as it is, in training under a session of `rotor.dtr`: what it computes is evicted
    when memory gets short, and computed again. Nothing is captured, measured or planned before, so
    whatever a model does in its forward it may do; whether a limit can be kept shows in the first
    step. `compute_sequence` sets the limit.
    """

    _plans: dict[Any, DynamicPlan]
    _latest: DynamicPlan | None

    def _begin(self) -> None:
        if not self.preserve_rng_state:
            raise ValueError(
                "the dynamic engine always recomputes with the random numbers of the first "
                "forward: leave preserve_rng_state at True"
            )
        if not (isinstance(self._profile, str) and self._profile == "measured"):
            raise ValueError(
                "the dynamic engine measures while it runs: profile= is for graphs, give "
                'engine="graph"'
            )

    def _check_options(self, options: dict[str, Any]) -> None:
        check_options(options)

    def _measure_sample(self, sample: Any) -> None:
        if isinstance(sample, dict):
            self.measure(**sample)
        else:
            self.measure(*(sample if isinstance(sample, tuple) else (sample,)))

    def __getstate__(self) -> dict[str, Any]:
        unbound: dict[str, Any] = {"_plans": {}, "_latest": None, "_latest_key": None}
        return super().__getstate__() | unbound | {"_structure": None}

    # -- the limit

    def measure(self, *args: Any, targets: Sequence[Any] = (), **kwargs: Any) -> None:
        """Run a training step on a sample of the arguments, within the limit.

        Nothing is changed: parameters, gradients, buffers, random states, training flags. The
        gradients of outputs are ones.

        Raises
        ------
        InfeasibleError
            The step does not fit in the limit.
        ValueError
            Nothing in the step needs a gradient.
        """
        flags = [(module, module.training) for module in self.module.modules()]
        if not self.module.training:
            self.module.train()
        plan = self._plan_for(args, kwargs)
        cancel_running()
        try:
            with torch.enable_grad():
                self._try_dynamically(plan, args, targets, kwargs)
        finally:
            for module, training in flags:
                module.training = training

    def compute_sequence(
        self,
        custom_mem_limit_bytes: int | str | None = None,
        mem_slots: int | None = None,
        *,
        mem_limit: int | str | None = None,
        **options: Any,
    ) -> None:
        """Set the limit of the following steps; nothing is computed before they run.

        Parameters
        ----------
        custom_mem_limit_bytes, mem_limit
            The limit, by its published name or by ours; by default the one given before.
        mem_slots
            Accepted as published; it changes nothing.
        **options
            ``heuristic``, ``seed``, ``strict``, ``sample``, ``ignore_small`` and ``storage_swap``
            of `rotor.dtr.budget`.

        Raises
        ------
        ValueError
            Two limits are given.
        """
        if custom_mem_limit_bytes is not None and mem_limit is not None:
            raise ValueError("give the limit once: mem_limit= or custom_mem_limit_bytes=")
        given = custom_mem_limit_bytes if mem_limit is None else mem_limit
        limit = self.mem_limit if given is None else parse_bytes(given)
        check_options(options)
        self.__dict__.update(mem_limit=limit, _options=self._options | options, _plans={})

    def _plan_for(self, args: Any, kwargs: dict[str, Any]) -> DynamicPlan:
        tensors = tensors_of((args, kwargs)) or list(self.module.parameters())
        if not tensors:
            raise ValueError("neither the arguments nor the model hold a tensor")
        device = tensors[0].device
        plan = self._plans.get(device)
        if plan is None:
            refuse_sharded(self.module)
            self._check_devices((tensors, args, kwargs))
            plan = self._make(device)
        self.__dict__["_latest"] = plan
        return plan

    def _make(self, key: Any, reserve_bytes: int = 0) -> DynamicPlan:
        plan = DynamicPlan(
            key,
            self._limit_on(key),
            options=self._options,
            reserve_bytes=reserve_bytes,
            assumed_loss_bytes=self.loss_tmp_memory_usage,
            verify=self.verify,
        )
        self._plans[key] = plan
        self.__dict__.update(_latest=plan, _latest_key=key)
        return plan

    def curve(self) -> Curve:
        """Not known of this engine.

        Raises
        ------
        ValueError
            Always: what a limit costs is not known before a step has run under it.
        """
        raise ValueError(
            "the dynamic engine decides while a step runs: what a limit costs is not known before. "
            'Give engine="graph" for a curve, or run steps under several limits and read report()'
        )

    def display(self) -> str:
        """A table of the last steps: peaks, evictions, what ran again, times; ValueError: none."""
        return dynamic_table(self._planned())

    def _report(self) -> str:
        return dynamic_report(self._planned())

    def _write_page(self, path: Path) -> None:
        plan = self._planned()
        text = measured_page(plan, dynamic_figures(plan), ("Last steps", step_rows(plan)))
        path.write_text(text, encoding="utf-8")

    # -- running

    def forward(self, *args: Any, targets: Any = _NO_TARGETS, **kwargs: Any) -> Any:
        """The model's output, or its loss where ``loss_fn`` and `targets` are given.

        In training mode with gradients enabled the model runs under its limit; otherwise it runs
        as it is.
        """
        if self.loss_fn is None and targets is not _NO_TARGETS and takes_targets(self.module):
            kwargs["targets"], targets = targets, _NO_TARGETS
        if not self._checked_call(targets):
            return self._with_loss(self.module.forward(*args, **kwargs), targets)
        return self._step_dynamically(self._plan_for(args, kwargs), args, targets, kwargs)

    def _learn(self, plan: Any, step: StepBytes) -> None:
        self._learn_dynamically(plan, step)

    def _learn_loss(self, key: Any, plan: Any, step: StepBytes) -> bool:
        return False

    def _repriced(self, key: Any, plan: Any) -> int:
        return int(plan.predicted_bytes)
