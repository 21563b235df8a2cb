"""Plain engine: the last one, which runs a model as PyTorch does, and meters its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rotor.common.accounting import is_new_maximum
from rotor.common.frames import warn_caller
from rotor.common.tensor_trees import output_tensors
from rotor.common.undisturbed import Untriable, trial
from rotor.engines.contract import Call, Engine, IsPending, Key, StartMeter
from rotor.errors import MemoryLimitWarning
from rotor.meter.step_meter import Metered, StepBytes
from rotor.meter.watch import note_peak
from rotor.units import exact_bytes


@dataclass(repr=False)
class PlainPlan(Metered):
    """Record of steps that nothing limits; their needs are compared with the limit."""

    engine: ClassVar[str] = "plain"

    device: torch.device
    limit_bytes: int
    reason: str
    """Reason for which no other engine runs them."""

    @property
    def predicted_bytes(self) -> int:
        """Unpredicted: the peak of the latest metered step; ValueError before one."""
        if self.measured_bytes is None:
            raise ValueError("nothing is known before a step has run: train one")
        return self.measured_bytes

    @property
    def makespan(self) -> float:
        """Unpredicted: seconds of the latest metered step; 0 if unknown."""
        timeline = self.measured_timeline
        return 0.0 if timeline is None else float(timeline.seconds[-1])


class PlainEngine(Engine):
    """Metered steps of plain PyTorch, for models that no other engine can run."""

    name: ClassVar[str] = "plain"
    depends_on_structure: ClassVar[bool] = False
    plans_ahead: ClassVar[bool] = False
    fallback = "no engine can plan the model: plain PyTorch runs it, and nothing keeps the limit."

    def key(self, call: Call) -> Key:
        """Return the device: nothing else matters."""
        return Key(self.context.device_of(call), ())

    def forget(self, measured: Any) -> None:
        """Keep everything: this engine has no measures."""

    def device_of(self, key: Key) -> torch.device:
        """Return the device of such steps."""
        known = self.context.refusals.get(key.measured)
        device: torch.device = key.measured if known is None else known.device
        return device

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> PlainPlan:
        """Return a new record of steps."""
        known = self.context.refusals.get(key.measured)
        why = self.settings.unsuited if known is None else known.why
        reason = "; ".join(f"{name}: {text.splitlines()[0]}" for name, text in why.items())
        return PlainPlan(self.device_of(key), limit_bytes, reason)

    def measure(self, key: Key, call: Call) -> None:
        """Raise the error of a forward, where one can be tried; the forward leaves no trace."""
        module, given = self.context.module, call.arguments
        peers = self.context.peers.members
        try:
            with torch.no_grad(), trial(module, given, self.device_of(key), peers=peers) as made:
                args, kwargs = made.arguments
                module.forward(*args, **kwargs)
        except Untriable:
            return

    def run(self, plan: PlainPlan, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step as PyTorch does."""
        meter = start()
        output = self.context.module.forward(*call.args, **call.kwargs)
        if meter is not None:
            meter.forward_done(output_tensors(output))
        return self.context.with_loss(output, call.targets), None

    def learn(self, plan: PlainPlan, step: StepBytes) -> None:
        """Warn, in numbers, of a step that needed more than the limit."""
        plan.measured_timeline = step.timeline
        plan.meterings += 1
        self.learn_peak(plan, step.peak_bytes)

    def learn_peak(self, plan: PlainPlan, peak_bytes: int) -> None:
        """Warn of a peak above the limit, once for each new maximum."""
        plan.measured_bytes = peak_bytes
        note_peak(plan, peak_bytes)
        if is_new_maximum(peak_bytes, plan.limit_bytes, plan.warned_bytes):
            plan.warned_bytes = peak_bytes
            warn_caller(
                f"a step of plain PyTorch needed {exact_bytes(peak_bytes)}, and the limit is "
                f"{exact_bytes(plan.limit_bytes)}: no engine could run the model within it, for "
                f"this reason: {plan.reason}",
                MemoryLimitWarning,
            )
