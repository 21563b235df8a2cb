"""Cost of training on sequences of many lengths under one limit."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.calls import sample_call
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.fit.batches import device_of, resized, step_bytes, sum_of, training_step, unchanged
from rotor.fit.result import shown_bytes, shown_seconds
from rotor.fit.steps import (
    has_single_plan,
    plain_figures,
    plain_resident_bytes,
    resident_bytes,
    seconds_of,
    settle,
    wrapped,
)
from rotor.meter.room import step_limit
from rotor.report.text import table
from rotor.units import format_bytes
from rotor.wrapper.checkpointable import Checkpointable


@dataclass(frozen=True, slots=True)
class LengthCost:
    """Steps of one length, as they ran; bytes are above the level at which a step begins."""

    length: int
    fits: bool
    least_bytes: int | None
    """Least limit for which a plan was found; ``None`` without a single plan."""
    measured_bytes: int | None
    """Peak of a step within the limit; ``None`` if it does not fit."""
    seconds: float | None
    """Time of that step."""
    plain_bytes: int | None
    """Peak of a plain step; ``None`` if the device has no room for it."""
    plain_seconds: float | None
    """Time of that step."""


@dataclass(frozen=True)
class LengthsCost:
    """Result of `cost_of_lengths`."""

    limit_bytes: int
    lengths: Mapping[int, int]
    """Number of times that each length comes."""
    rows: tuple[LengthCost, ...]

    @property
    def fitting_share(self) -> float:
        """Share of the batches that are no longer than the longest that ran within the limit."""
        longest = max((row.length for row in self.rows if row.fits), default=0)
        counted = sum(count for length, count in self.lengths.items() if length <= longest)
        return counted / sum(self.lengths.values())

    @property
    def slowdown(self) -> float | None:
        """Time of all fitting batches over plain's; ``None`` if plain has no figure for them."""
        ours, plain = self.seconds("seconds"), self.seconds("plain_seconds")
        return None if ours is None or not plain else ours / plain

    def seconds(self, name: str) -> float | None:
        """Return the seconds of a batch on average, over the lengths that fit.

        `name` is "seconds", for steps within the limit, or "plain_seconds".
        """
        rows = [row for row in self.rows if row.fits]
        known = [(row.length, getattr(row, name)) for row in rows]
        if not known or any(value is None for _, value in known):
            return None
        places, values = zip(*known, strict=True)
        fitting = {n: count for n, count in self.lengths.items() if n <= places[-1]}
        each = np.interp(list(fitting), places, values)
        return float(np.average(each, weights=list(fitting.values())))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return {
            "format": "rotor.lengths",
            "version": 1,
            "limit_bytes": self.limit_bytes,
            "batches": sum(self.lengths.values()),
            "fitting_share": self.fitting_share,
            "seconds": self.seconds("seconds"),
            "plain_seconds": self.seconds("plain_seconds"),
            "slowdown": self.slowdown,
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        lines = [["length", "least", "peak", "step", "plain peak", "plain step"]]
        for row in self.rows:
            peak = shown_bytes(row.measured_bytes) if row.fits else "does not fit"
            ours = [shown_bytes(row.least_bytes), peak, shown_seconds(row.seconds)]
            plain = [shown_bytes(row.plain_bytes), shown_seconds(row.plain_seconds)]
            lines.append([str(row.length), *ours, *plain])
        count = sum(self.lengths.values())
        text = (
            f"{table(lines)}\n\n"
            f"{count} batches of lengths {min(self.lengths)} to {max(self.lengths)} in "
            f"{format_bytes(self.limit_bytes)}: {self.fitting_share:.1%} fit"
        )
        if self.slowdown is not None:
            text += (
                f"\n{shown_seconds(self.seconds('seconds'))} a batch on average, "
                f"{self.slowdown:.2f} x the {shown_seconds(self.seconds('plain_seconds'))} of "
                "plain PyTorch (captures and planning apart, which come once)"
            )
        return text


def _chosen(lengths: Mapping[int, int], points: int) -> list[int]:
    """Return lengths to run: the extremes, and others at even shares of the batches."""
    ordered = sorted(Counter(lengths).elements())
    count = max(points - 1, 1)
    return sorted({ordered[(len(ordered) - 1) * k // count] for k in range(count + 1)})


def cost_of_lengths(
    model: nn.Module,
    sample: Any,
    lengths: Mapping[int, int],
    mem_limit: int | str | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    engine: str = "auto",
    points: int = 5,
    total_limit: int | str | None = None,
    **options: Any,
) -> LengthsCost:
    """Run training steps of a few lengths within a limit and plainly, and weigh them.

    `sample` is one batch: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
    Tensors as long in their second dimension as the first tensor are cut, or repeated, along it.
    `lengths` says how often each length comes (`lengths_of`); at most `points` of them are run, and
    figures of the others lie on straight lines between theirs. The loss of the output is by default
    the output's own, or the sum of its tensors; limits and options are as for
    `rotor.Checkpointable`. The model is restored afterwards, as by `rotor.largest_batch`. Raises
    ValueError if the sample has no second dimension, or no length is given.
    """
    if not lengths or points < 1:
        raise ValueError("lengths or points are missing: expected at least one of each")
    args, kwargs = sample_call(sample)
    leaves, spec = core.tree_flatten((args, kwargs))
    first = next((x for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 1), None)
    if first is None or not first.shape[1]:
        raise ValueError(
            "the sample holds no tensor with a second dimension, which is the length: expected "
            "batches of sequences, such as --input 8,128"
        )
    whole = first.shape[1]
    device = device_of((args, kwargs, ()))
    limit = step_limit(device, mem_limit, total_limit, model)
    loss_of = loss_fn or sum_of

    def batch_of(length: int) -> Any:
        cut = [
            resized(leaf, 1, whole, length) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        return core.tree_unflatten(cut, spec)

    def step_of(runner: Any, length: int) -> Callable[[], None]:
        given, named = batch_of(length)
        trained = runner.module if isinstance(runner, Checkpointable) else runner
        return training_step(trained, lambda: loss_of(runner(*given, **named)))

    rows = []
    with unchanged(model, device, batch_of(min(lengths))):
        silent = {"verbosity": -1} | options
        beside = plain_resident_bytes(model, options)
        ours = wrapped(model, limit, engine=engine, **silent)
        for length in _chosen(lengths, points):
            found = _limited(ours, step_of(ours, length), device, limit)
            plain = plain_figures(step_of(model, length), device, beside) or (None, None)
            rows.append(LengthCost(length, *found, *plain))
    return LengthsCost(limit, dict(lengths), tuple(rows))


def _limited(
    model: Checkpointable, step: Callable[[], None], device: torch.device, limit: int
) -> tuple[bool, int | None, int | None, float | None]:
    """Return if a step fits, the least limit, and its peak and time."""
    with warnings.catch_warnings(action="ignore", category=MemoryLimitWarning):
        try:
            settle(model, step)
            model.wait_for_planning()
            peak = step_bytes(step, device) + resident_bytes(model)
            seconds = seconds_of(step, device)
        except InfeasibleError as error:
            return False, error.minimum_bytes, None, None
        least = None
        if has_single_plan(model):
            with suppress(InfeasibleError):
                try:
                    model.plan_step(1)
                except InfeasibleError as error:
                    least = error.minimum_bytes
                model.plan_step(limit)
    return peak <= limit, least, peak, seconds
