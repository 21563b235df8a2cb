"""Stages that are alike: their times are measured once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.tensor_trees import Flags, tree_tensors
from rotor.engines.chain.observe import Observation
from rotor.engines.chain.stages import Stage

__all__ = ["MOST_APART", "TimedStage", "structure_of"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
MOST_APART = 1.5
"""Ratio of the rough times of two stages above which each is timed."""


@dataclass(frozen=True)
class TimedStage:
    """Stage with measured times, which hold for other stages of the same structure."""

    figures: tuple[Any, ...]
    """Sizes that the metered run found, in bytes."""
    rough_ns: int
    """Time of the metered run."""
    times: tuple[int, int, int]
    """Times of the stage without a graph, with one, and backward, in ns."""

    def is_like(self, figures: tuple[Any, ...], rough_ns: int) -> bool:
        """Return whether a stage of the same structure ran in the same bytes and about the time."""
        longer, shorter = max(rough_ns, self.rough_ns), min(rough_ns, self.rough_ns)
        return figures == self.figures and longer <= MOST_APART * shorter


def structure_of(stage: Stage, x: Any, flags: Flags, seen: Observation) -> Hashable | None:
    """Return a value that stages of equal modules and inputs share; ``None`` if there can be no
    equal.

    A stage with functions that are no modules, or with hooks, has no equal.
    """
    if not all(isinstance(function, nn.Module) for function in stage.functions):
        return None
    if any(core.has_hooks(module) for module in stage.modules()):
        return None
    return (
        tuple(_module(module) for module in stage.modules()),
        tuple(_tensor(t) for t in tree_tensors(x)),
        repr((flags, seen.flags)),
        seen.uses_rng,
        seen.repeats,
        len(seen.mutable_buffers),
        len(seen.changes),
    )


def _module(module: nn.Module) -> Hashable:
    settings = tuple(
        (name, repr(value))
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and not tree_tensors(value))
    )
    slots = [*core.parameter_slots(module), *core.buffer_slots(module)]
    return (
        type(module),
        module.extra_repr(),
        settings,
        tuple((name, _tensor(where[name])) for where, name in slots),
        tuple(name for name, _ in module.named_children()),
    )


def _tensor(t: torch.Tensor) -> Hashable:
    strides = t.stride() if t.layout is torch.strided else ()
    return type(t), t.shape, strides, t.dtype, t.device, t.layout, t.requires_grad
