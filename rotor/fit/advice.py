"""Advice on one call of a module: bytes of its training step, and the cost of a limit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rotor.algorithms.curve import Curve
from rotor.common.tensor_trees import tree_tensors
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.fit import batches
from rotor.fit.steps import LimitedSteps, has_single_plan, measured_curve
from rotor.meter.room import Room, step_limit
from rotor.wrapper.checkpointable import Checkpointable

_CHEAP = (1.10, 1.25, 1.5, 2.0)
"""Slow-downs that a limit may cost, the next where the one before saves next to nothing."""
_SAVES = 0.95
_POINTS = 12


@dataclass(frozen=True)
class Advice:
    """Cost of limits for a step, and of one limit."""

    curve: Curve
    plain_bytes: int
    """Need of a step without recomputation."""
    limit_bytes: int
    slowdown: float | None
    """Time of a step within that limit, divided by that of the fastest; ``None``: nothing fits."""
    engine: str | None = None
    """Form in which training plans that step; ``None`` where steps were run."""
    predicted_bytes: int | None = None
    """Peak of that step; ``None`` where steps were run."""


def cheap_limit(curve: Curve, needed_bytes: int | None = None) -> int:
    """Return the least limit that costs at most a tenth of the time.

    It saves something of what a step needs without a limit: where that was metered, it may be less
    than at the end of the curve, as a chain keeps more. If it saves next to nothing, return the
    least limit that costs at most 25 %, then 50 %, then 100 % of the time; if none of these saves
    more, return the least limit of all.
    """
    slower = curve.seconds / curve.seconds[-1]
    needed = min(int(curve.bytes[-1]), needed_bytes or int(curve.bytes[-1]))
    for most in _CHEAP:
        cheap = int(curve.bytes[slower <= most].min())
        if cheap < _SAVES * needed:
            return cheap
    return int(curve.minimum_bytes)


def device_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the device of a call."""
    tensors = tree_tensors((args, kwargs)) or list(module.parameters())
    return tensors[0].device


def advise(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    room: Room | None = None,
    needed_bytes: int | None = None,
) -> Advice:
    """Return the cost of limits for a training step with these arguments; leave no trace.

    `room` gives the limit of the advice; without it, a cheap limit is taken, below what the step
    needed without one, if that was metered. A model without a single plan runs steps, with the sum
    of the outputs for a loss, within the free memory of the device. Raises InfeasibleError,
    ValueError or CaptureError if no plan exists.
    """
    device = device_of_call(module, args, kwargs)

    def limit_of(curve: Curve) -> int:
        # Read after planning: libraries that planning has loaded take memory beside each step.
        return cheap_limit(curve, needed_bytes) if room is None else room.take(device)

    with batches.unchanged(module, device, (args, kwargs)), warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryLimitWarning)
        model = Checkpointable(module, verbosity=-1)
        model.measure(*args, **kwargs)
        if has_single_plan(model):
            curve = model.curve(_POINTS, training=True)
            limit = limit_of(curve)
            try:
                plan = model.plan_step(limit)
            except InfeasibleError:
                return Advice(curve, int(curve.bytes[-1]), limit, None)
            return Advice(
                curve,
                plan.unlimited_bytes,
                limit,
                # A point of the curve may be faster within the limit; parts are not a whole step.
                min(1 + plan.recomputation, _slowdown(curve, limit) or float("inf")),
                plan.engine,
                plan.predicted_bytes,
            )

        def step_of(wrapped: Any) -> Callable[[], None]:
            return batches.training_step(module, lambda: batches.sum_of(wrapped(*args, **kwargs)))

        steps = LimitedSteps(
            model, step_of, device, lambda: Checkpointable(module, engine="dynamic", verbosity=-1)
        )
        curve = measured_curve(steps, step_limit(device, module=module), 5)
    limit = limit_of(curve)
    return Advice(curve, int(curve.bytes[-1]), limit, _slowdown(curve, limit))


def _slowdown(curve: Curve, limit_bytes: int) -> float | None:
    """Return the time within a limit against the fastest; ``None`` where nothing fits."""
    if limit_bytes < curve.minimum_bytes:
        return None
    return curve.at(limit_bytes) / float(curve.seconds[-1])
