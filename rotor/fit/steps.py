"""Training steps that are run under a limit, for models without a single plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor._pytorch.optimizers import each_unwrapped, states_of
from rotor.algorithms.curve import Curve
from rotor.common.accounting import METERED_STEPS
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.fit.batches import is_out_of_memory, step_bytes
from rotor.graph.graph import Graph
from rotor.graph.program import Program, simulate
from rotor.meter import allocator
from rotor.meter.step_meter import Verdict
from rotor.tier.offload import trial_tier
from rotor.timing import measure_ns
from rotor.units import exact_bytes
from rotor.wrapper.checkpointable import Checkpointable

STEP_SECONDS = 2.0
_MOST_STEPS = 2 * METERED_STEPS + 1
"""Steps of two engines, the second after the first has exceeded the limit, and a last one."""
_NEAR = 0.03
_HALVINGS = 8


def wrapped(model: nn.Module, limit_bytes: int, **options: Any) -> Checkpointable:
    """Return a model with a limit.

    With ``offload_state`` it is a copy, and so is each optimizer, which lives as long.
    """
    optimizers = options.get("offload_state")
    if optimizers is not None:
        model, optimizers = copy.deepcopy((model, [one for one, _ in each_unwrapped(optimizers)]))
        options["offload_state"] = optimizers
        if isinstance(options.get("offload"), str):
            engine, limit = options.get("engine", "auto"), options.pop("host_limit", None)
            options["offload"] = trial_tier(options["offload"], engine, limit)
    made = Checkpointable(model, mem_limit=limit_bytes, **options)
    made.__dict__["_fitted_optimizers"] = optimizers
    return made


def resident_bytes(model: Checkpointable) -> int:
    """Return the bytes beside a step that the limit of a model counts."""
    return 0 if model.homes is None else model.homes["resident"]


def plain_resident_bytes(model: nn.Module, options: Mapping[str, Any]) -> int:
    """Return the bytes beside a plain step that a limit with these options counts."""
    given = options.get("offload_state")
    if given is None:
        return 0
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    states = [states_of(one, p) * p.nbytes for one, _ in each_unwrapped(given) for p in trained]
    return allocator.storage_bytes([*parameters, *model.buffers()]) + sum(states)


@dataclass(frozen=True, slots=True)
class RanStep:
    """Step under a limit, as it ran."""

    limit_bytes: int
    fits: bool
    measured_bytes: int | None = None
    """Peak above the level at its start; ``None`` if it did not run to its end."""
    seconds: float | None = None
    """Median time; ``None`` if it did not run to its end."""
    least_bytes: int | None = None
    """Least limit that is known to be needed; ``None`` if unknown."""


def has_single_plan(model: Checkpointable) -> bool:
    """Return whether a measured model has the plan of a chain or a graph."""
    try:
        model.cost_model()
    except (AttributeError, ValueError):
        return False
    return True


def unplanned_step(model: Checkpointable) -> Program | None:
    """Return the step of a measured model that recomputes nothing; ``None``: no single graph."""
    try:
        graph = model.cost_model()
    except ValueError:
        return None
    return simulate(graph, range(len(graph))) if isinstance(graph, Graph) else None


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a step."""
    ns = measure_ns(step, device, min_repeats=3, max_repeats=9, max_seconds=STEP_SECONDS)
    return max(ns, 1) / 1e9


def settle(model: Checkpointable, step: Callable[[], object]) -> None:
    """Run steps until a metered one has confirmed the plan, a few at most."""
    for _ in range(_MOST_STEPS):
        step()
        plan = model.plan
        if plan.measured_bytes is not None and plan.verdict is Verdict.KEEP:
            break


def plain_figures(
    step: Callable[[], object], device: torch.device, beside_bytes: int = 0
) -> tuple[int, float] | None:
    """Return peak and seconds of a plain training step; ``None`` if it is out of memory.

    The peak includes bytes beside the step that a limit counts.
    """
    try:
        step()
        return beside_bytes + step_bytes(step, device), seconds_of(step, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


class LimitedSteps:
    """Steps of one batch under one limit after the other, for a model without a single plan.

    The wrapped `model` was measured on the batch. A model in parts is first run at the least peak
    of its parts, which shows the memory of the code between them. A limit that the parts cannot
    keep is given to the dynamic engine, for which `dynamic` wraps the model: it refuses an
    operation before it exceeds the limit. `step_of` makes a whole training step of a wrapped model.
    """

    def __init__(
        self,
        model: Checkpointable,
        step_of: Callable[[Any], Callable[[], None]],
        device: torch.device,
        dynamic: Callable[[], Checkpointable],
    ) -> None:
        self.model = model
        self.device = device
        self._step_of = step_of
        self._make_dynamic = dynamic
        # Parameters in a second tier are there for one wrapped model.
        is_last = model.planned_as == "dynamic" or model.homes is not None
        self._dynamic: Checkpointable | None = model if is_last else None
        self.least_parts_bytes = 0
        self.runner = model

    def run_dynamically(self) -> None:
        """Have the dynamic engine run the steps from now on: the parts cannot keep the limit."""
        if self._dynamic is None:
            self.model = self._dynamic = self._make_dynamic()

    def meter_parts(self) -> int:
        """Run a step of a model in parts at their least peak; return the least limit of its plans.

        Return 0 for a model that the dynamic engine runs, and for one that has a plan of its
        stages below the limits of its parts.
        """
        if self._dynamic is not None or has_single_plan(self.model):
            return 0
        with warnings.catch_warnings(action="ignore", category=MemoryLimitWarning):
            try:
                self.model.plan_step(1)
            except InfeasibleError as error:
                self.model.plan_step(error.minimum_bytes)
                self._step_of(self.model)()
                plan = self.model.plan
                self.least_parts_bytes = max(plan.least_bytes, error.minimum_bytes)
                return self.least_parts_bytes
        self._dynamic = self.model
        return 0

    def run(self, limit_bytes: int, *, timed: bool = True) -> RanStep:
        """Return a step under a limit, run until it has settled, and measured."""
        self.runner = self._chosen(limit_bytes)
        try:
            with warnings.catch_warnings(action="ignore", category=MemoryLimitWarning):
                return self._measured(limit_bytes, timed)
        except InfeasibleError as error:
            return RanStep(limit_bytes, False, least_bytes=error.minimum_bytes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return RanStep(limit_bytes, False)

    def _chosen(self, limit_bytes: int) -> Checkpointable:
        if self._dynamic is self.model or limit_bytes >= self.least_parts_bytes:
            return self.model
        if self._dynamic is None:
            self._dynamic = self._make_dynamic()
        return self._dynamic

    def _measured(self, limit_bytes: int, timed: bool) -> RanStep:
        model = self.runner
        model.plan_step(limit_bytes)
        step = self._step_of(model)
        settle(model, step)
        peak, own = model.plan.measured_bytes, resident_bytes(model)
        if peak is None or peak + own <= limit_bytes:
            peak = step_bytes(step, self.device)
        peak += own
        if peak > limit_bytes:
            return RanStep(limit_bytes, False, peak, least_bytes=peak)
        seconds = seconds_of(step, self.device) if timed else None
        return RanStep(limit_bytes, True, peak, seconds)


def measured_curve(
    steps: LimitedSteps,
    most_bytes: int,
    points: int,
    on_step: Callable[[RanStep], None] = lambda ran: None,
    limit_bytes: int | None = None,
) -> Curve:
    """Return step time against memory, by steps that are run within limits up to `most_bytes`.

    There are `points` limits from the least to the peak without recomputation, and `limit_bytes`, a
    limit of interest. `on_step` is called with each step that ran, or was refused. Raises
    InfeasibleError if no step fits in the largest limit.
    """
    least_parts = steps.meter_parts()

    def run(limit: int, *, timed: bool = True) -> RanStep:
        ran = steps.run(limit, timed=timed)
        on_step(ran)
        return ran

    first = run(most_bytes)
    if not first.fits or first.measured_bytes is None:
        least = first.least_bytes
        needs = "runs out of memory" if least is None else f"needs {exact_bytes(least)}"
        raise InfeasibleError(
            f"a step does not fit in {exact_bytes(most_bytes)}: it {needs}. "
            "Make the model or its input smaller",
            least or most_bytes + 1,
        )
    ran = [first]
    high, low = first.measured_bytes, 0
    for _ in range(_HALVINGS):
        if high - low <= _NEAR * first.measured_bytes:
            break
        limit = (low + high) // 2
        if low < least_parts < high:
            limit = least_parts
            least_parts = 0
        tried = run(limit, timed=False)
        low, high = (low, limit) if tried.fits else (limit, high)
    gap = first.measured_bytes - high
    for k in range(max(points - 1, 1)):
        ran.append(run(high + gap * k // max(points - 1, 1)))
    if limit_bytes is not None and high <= limit_bytes < first.measured_bytes:
        ran.append(run(limit_bytes))
    return Curve.from_points(
        (one.measured_bytes, one.seconds)
        for one in ran
        if one.fits and one.measured_bytes is not None and one.seconds is not None
    )
