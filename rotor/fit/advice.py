"""Advice on one call of a module: bytes of its training step, and the cost of a limit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from rotor.algorithms.curve import Curve
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.chain.stages import is_plain_sequential
from rotor.errors import CaptureError, MemoryLimitWarning
from rotor.fit import batches
from rotor.fit.steps import LimitedSteps, has_single_plan, measured_curve
from rotor.meter.room import step_limit
from rotor.wrapper.checkpointable import Checkpointable

__all__ = ["Advice", "advise", "better_of", "device_of_call"]

_CHEAP = (1.10, 1.25, 1.5, 2.0)
"""Slow-downs that a limit may cost, the next where the one before saves next to nothing."""
_SAVES = 0.95
_POINTS = 12


@dataclass(frozen=True)
class Advice:
    """Cost of limits for a step.

    Attributes
    ----------
    curve
        Step time against memory.
    plain_bytes
        Need of a step without recomputation.
    """

    curve: Curve
    plain_bytes: int

    def slowdown(self, limit_bytes: int) -> float:
        """Return the time of a step within a limit, divided by that of the fastest."""
        return self.curve.at(limit_bytes) / float(self.curve.seconds[-1])

    def cheap_limit(self) -> int:
        """Return the least limit that costs at most a tenth of the time.

        If that saves next to nothing, return the least limit that costs a quarter, half, or as much
        again; if these save nothing either, return the least limit of all.
        """
        slower = self.curve.seconds / self.curve.seconds[-1]
        for most in _CHEAP:
            cheap = int(self.curve.bytes[slower <= most].min())
            if cheap < _SAVES * self.plain_bytes:
                return cheap
        return int(self.curve.minimum_bytes)


def device_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the device of a call."""
    tensors = tree_tensors((args, kwargs)) or list(module.parameters())
    return tensors[0].device


def advise(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Advice:
    """Return the cost of limits for a training step with these arguments; leave no trace.

    A model without a single plan runs steps, with the sum of the outputs for a loss, within the
    free memory of the device.

    Raises
    ------
    InfeasibleError, ValueError, CaptureError
        No plan exists.
    """
    device = device_of_call(module, args, kwargs)
    with batches.unchanged(module, device, (args, kwargs)), warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryLimitWarning)
        model = _wrap(module)
        model.measure(*args, **kwargs)
        if has_single_plan(model):
            curve = model.curve(_POINTS)
            plain_bytes = int(curve.bytes[-1])
            if is_plain_sequential(module):
                curve = better_of(curve, _graph_curve(module, args, kwargs))
        else:
            curve = measured_curve(
                LimitedSteps(
                    model,
                    lambda wrapped: _step_of(module, wrapped, args, kwargs),
                    device,
                    lambda: _wrap(module, engine="dynamic"),
                ),
                step_limit(device, module=module),
                5,
            )
            plain_bytes = int(curve.bytes[-1])
    return Advice(curve, plain_bytes)


def better_of(chain: Curve, graph: Curve | None) -> Curve:
    """Return the curve of the plans that engine="auto" runs, on the clock of the chain.

    It takes the plan with less recomputation, against a step without it, in the same limit.

    Parameters
    ----------
    chain, graph
        Curves of one model's chain, and of its graph; ``None`` if no graph could be captured.
    """
    if graph is None:
        return chain
    scale = float(chain.seconds[-1] / graph.seconds[-1])
    both = [(chain.bytes, chain.seconds), (graph.bytes, graph.seconds * scale)]
    return Curve.from_points(
        point for sizes, times in both for point in zip(sizes.tolist(), times.tolist(), strict=True)
    )


def _wrap(module: nn.Module, **options: Any) -> Checkpointable:
    make: Any = Checkpointable
    wrapped: Checkpointable = make(module, verbosity=-1, **options)
    return wrapped


def _graph_curve(module: nn.Module, args: Any, kwargs: Any) -> Curve | None:
    graph = _wrap(module, engine="graph")
    try:
        graph.measure(*args, **kwargs)
    except CaptureError:
        return None
    found: Curve = graph.curve(_POINTS)
    return found


def _step_of(module: nn.Module, model: Any, args: Any, kwargs: Any) -> Any:
    def step() -> None:
        batches.sum_of(model(*args, **kwargs)).backward()
        for parameter in module.parameters():
            parameter.grad = None

    return step
