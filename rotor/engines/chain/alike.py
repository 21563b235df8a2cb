"""Stages that are alike, whose times are measured once, and stages merged with a neighbour."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from rotor._pytorch import core
from rotor.common.modes import RngTracker
from rotor.common.tensor_trees import (
    Flags,
    check_output,
    detached,
    grad_flags,
    map_tensors,
    tree_tensors,
    versions,
)
from rotor.common.undisturbed import trial
from rotor.engines.chain.observe import Observation
from rotor.engines.chain.stages import Stage


def _storages(value: Any) -> set[int]:
    return set(core.storages_of(t for t in tree_tensors(value) if t.numel()))


def merge_stages(
    stages: Sequence[Stage], arg: Any, done: Callable[[], object] = lambda: None
) -> list[Stage]:
    """Return `stages` that can be cut apart: in-place and viewing ones join their predecessor.

    Runs the model forward once, without a graph and on copies of its buffers, and on a copy of its
    input `arg` where a stage that might write to it comes first; calls `done` after each stage.
    Raises ValueError that names the stage if the first stage changes the model's input in place, or
    a stage runs only where gradients are enabled, and TypeError if a stage returns something other
    than tensors.
    """
    merged: list[Stage] = []
    views_input = False
    x = detached(arg)
    has_copy = False
    first = x
    with torch.no_grad():
        for stage in stages:
            if first is not None and not has_copy and _may_write(stage, x):
                first = x = _copy(x)
                has_copy = True
            before, untouched = versions(x), versions(first)
            with stage.on_copies():
                y = _run_without_graph(stage, x)
            done()
            check_output(stage.name, y)
            if first is not None and versions(first) != untouched:
                raise ValueError(
                    f"stage {stage.name} changes the model's input in place; it would destroy the "
                    "input that recomputations start from. Make its first operation not in place "
                    "(inplace=False), or put a stage before it"
                )
            only_views = _storages(y) <= _storages(x)
            if merged and (views_input or versions(x) != before or only_views):
                merged[-1] = merged[-1].merged_with(stage)
                views_input = views_input and only_views
            else:
                merged.append(stage)
                views_input = only_views
            x = y
            if not views_input:
                first = None
    return merged


def _copy(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def _may_write(stage: Stage, x: Any) -> bool:
    """Return whether a stage may write to its input; PyTorch's layers write only where asked to."""
    if any(tensor.is_inference() for tensor in tree_tensors(x)):
        return True
    return not stage.is_of_layers() or any(
        getattr(module, "inplace", False) for module in stage.modules()
    )


def _run_without_graph(stage: Stage, x: Any) -> Any:
    """Run a stage with gradients disabled; raise ValueError if it needs them enabled."""
    try:
        return stage(x)
    except RuntimeError as error:
        if not _runs_with_graph(stage, x):
            raise
        raise ValueError(
            f"stage {stage.name} runs only where gradients are enabled, as it computes some in its "
            f"forward ({error}), and a chain runs stages without a graph too. Put "
            '"with torch.enable_grad():" around what computes them; or use engine="dynamic"'
        ) from error


def _runs_with_graph(stage: Stage, x: Any) -> bool:
    x = _copy(x)
    with torch.enable_grad(), stage.on_copies():
        try:
            stage(x)
        except RuntimeError:
            return False
    return True


def frozen_prefix(stages: list[Stage], arg: Any) -> list[Stage]:
    """Return the first stages that need no gradient, as one stage of which nothing is kept."""
    if any(grad_flags(arg)):
        return stages
    count = 0
    while count < len(stages) and not stages[count].parameters():
        count += 1
    if count < 2:
        return stages
    head = stages[0]
    for stage in stages[1:count]:
        head = head.merged_with(stage)
    return [head, *stages[count:]]


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


def changing_weight(model: nn.Module, device: torch.device) -> str:
    """Return the name of a parametrized weight that is another whenever it is computed; or "".

    ``torch.nn.utils.parametrize.cached`` computes it once for all stages and calls.
    """
    with trial(model, (), device), torch.no_grad():
        for prefix, module in model.named_modules():
            if not parametrize.is_parametrized(module):
                continue
            for name, weight in module.parametrizations.items():
                rng = RngTracker(device)
                before, values = rng.read(), weight()
                if rng.drawn_since(before) or not torch.equal(values, weight()):
                    return f"{prefix}.{name}" if prefix else name
    return ""


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
