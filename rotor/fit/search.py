"""The largest batch whose training step fits in memory, and the one of best throughput."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rotor.common.calls import targets_of
from rotor.common.model_state import refuse_sharded
from rotor.common.progress import progress
from rotor.engines.graph.costs.recorded import MEASURED, source_of
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.fit.batches import (
    Batch,
    batches_of,
    check_counts,
    device_of,
    is_out_of_memory,
    step_bytes,
    sum_of,
    training_step,
    unchanged,
)
from rotor.fit.result import BatchFit, LargestBatch, TriedBatch, shown_bytes
from rotor.fit.steps import (
    LimitedSteps,
    has_single_plan,
    plain_resident_bytes,
    resident_bytes,
    seconds_of,
    settle,
    unplanned_step,
    wrapped,
)
from rotor.meter import allocator
from rotor.meter.room import Room, checked_total, step_limit, step_limit_there
from rotor.tier.offload import trial_tier
from rotor.timing import single_runs
from rotor.units import exact_bytes, format_bytes, parse_bytes
from rotor.wrapper.checkpointable import Checkpointable

logger = logging.getLogger("rotor")

MAX_BATCH = 65536
_FIRST = 2
_GROWTH = 8
_SECANTS = 8
_NEAR = 1.15
_SURE = 0.95
"""Part of the limit up to which an expected need is taken to fit before a size has run."""
_GROWTH_RUN = 2
"""Growth of sizes that are run because nothing says before what they need."""


def largest_batch(
    model: nn.Module,
    sample: Any,
    mem_limit: int | str | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    engine: str = "auto",
    multiple_of: int = 1,
    max_batch: int = MAX_BATCH,
    points: int = 5,
    timed: bool = True,
    total_limit: int | str | None = None,
    **options: Any,
) -> LargestBatch:
    """Find the largest batch whose training step fits, and the one of best throughput.

    Batch sizes are planned, not run: the need of a size's least plan is nearly affine in the size,
    so that few sizes are tried, the last ones side by side. Then the largest is run, with some
    of the sizes below it: its measured peak is within the limit. Plain PyTorch runs small batches,
    from which the largest that fits is extrapolated, and then this largest batch.

    A model without a single plan - in parts, or under the dynamic engine - is run in each size
    that is tried, from small ones up, twice the largest so far at most.

    With ``profile=``, a machine that is not here, nothing is run: the figures are those of plans,
    and those of plain PyTorch of a step that recomputes nothing.

    The model is restored afterwards: parameters, gradients, buffers, random states, training flags.
    Hooks on its modules run, those on its parameters do not.

    Parameters
    ----------
    model
        Any module, on the device that it is trained on.
    sample
        One batch: a tensor, a tuple of arguments, or a dictionary of keyword arguments. Tensors as
        long in their first dimension as the first tensor are split along it, and are repeated to
        the sizes wanted; others stay. Or a callable that gets a batch size and returns
        ``(args, kwargs, targets)``, a tuple, a dictionary and a tuple.
    mem_limit
        As for `Checkpointable`: the most that a step may have allocated above the level at its
        start. Gradients count: they do not exist when the step begins. ``None``: 90 % of what is
        free, divided by the processes of ``torchrun`` that share it.
    loss_fn, targets
        ``loss_fn(output, *targets)``, part of the plan; `targets` is split as `sample` is. Without
        it, the loss is the ``loss`` of an output that has one, else the sum of the outputs.
    engine
        "auto", "chain", "graph" or "dynamic", as for `Checkpointable`.
    multiple_of
        Try multiples of this size only.
    max_batch
        Try no larger size.
    points
        Number of sizes to run with rotor at most, the largest among them, to find the best
        throughput.
    total_limit
        Most bytes of the process on the device, as for `Checkpointable`.
    timed
        True: stages and operations are timed until their times are stable. False: each is run once,
        which takes a fraction of the time, and finds the same largest batch; plans are then made
        from rough times, so that steps may be a little slower. Throughput is measured either way.
    **options
        Options of `Checkpointable`, such as ``offload``. Graphs are planned with ``effort="fast"``
        by default. With ``offload_state=``, an optimizer of the model, copies of both go to the
        tier, and bytes are those of parameters, gradients, states and a step.

    Returns
    -------
    LargestBatch
        The sizes and their figures; it prints as a table.

    Raises
    ------
    InfeasibleError
        The smallest size does not fit; ``minimum_bytes`` is the least limit that it fits in.
    ValueError
        The limit is more than the device has free; the sample holds no tensor, or targets are given
        without a loss; a number is not positive; a machine that is not here has no limit, or the
        model no graph.
    TypeError
        The model is no module, or the callable returns something else.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    >>> found = largest_batch(model, torch.randn(8, 64), "200 KB", multiple_of=8, points=1)
    >>> found.largest.measured_bytes <= 200_000 < found.refused.least_bytes
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, Checkpointable):
        raise TypeError("model is wrapped already: give the plain one, model.module")
    refuse_sharded(model)
    if isinstance(options.get("offload"), str):
        # All sizes share a file, and its measured speed.
        options = {**options}
        limit = options.pop("host_limit", None)
        options["offload"] = trial_tier(options["offload"], engine, limit)
    check_counts(multiple_of=multiple_of, max_batch=max_batch, points=points)
    if max_batch < multiple_of:
        raise ValueError(f"max_batch = {max_batch} is below multiple_of = {multiple_of}")
    there = source_of(options.get("profile", MEASURED))
    if there != MEASURED and engine == "auto":
        engine = "graph"
    batches = batches_of(model, sample, targets_of(targets) or (), loss_fn is not None, engine)
    device = device_of(batches(multiple_of))
    search: type[_Search] = _PlannedSearch
    kept: AbstractContextManager[None] = nullcontext()
    if isinstance(there, str):
        search, kept = _Search, unchanged(model, device, batches(multiple_of)[:2])
        free = allocator.free_bytes(device)
        limit = step_limit(device, mem_limit, total_limit, model)
        if limit > free:
            raise ValueError(
                f"the limit is {format_bytes(limit)} and {device} has {format_bytes(free)} free: "
                "the answer is verified by a run, so give a limit that is free"
            )
    else:
        limit = step_limit_there(there.free_bytes, mem_limit, total_limit)
    with progress(1, "trying batches", at_once=True) as update, kept:
        most = max_batch // multiple_of
        given = (model, batches, device, limit, loss_fn, engine, multiple_of, most, options)
        update(0)
        try:
            return search(*given, timed=timed, update=update).run(points)
        except InfeasibleError as error:
            if total_limit is not None and (mem_limit is None or parse_bytes(mem_limit) > limit):
                room = Room(model, checked_total(total_limit))
                room.take(device)
                room.explain(error)
            raise


class _Line:
    """Line of bytes against batch size, through the two known points nearest to the limit.

    If some points are below the limit and some above, one of each is used.
    """

    def __init__(self) -> None:
        self.points: dict[int, int] = {}

    def at(self, size: int, limit: int) -> int | None:
        """Return the predicted bytes of a size; ``None`` if fewer than two points are known."""
        if len(self.points) < 2:
            return None
        (a, low), (b, high) = self._nearest(limit)
        return round(low + (high - low) * (size - a) / (b - a))

    def largest_below(self, limit: int) -> int | None:
        """Return the largest size predicted to need at most the limit."""
        if len(self.points) < 2:
            return None
        (a, low), (b, high) = self._nearest(limit)
        slope = (high - low) / (b - a)
        return None if slope <= 0 else int(a + (limit - low) / slope)

    def _nearest(self, limit: int) -> list[tuple[int, int]]:
        nearest = sorted(self.points.items(), key=lambda item: abs(item[1] - limit))
        over = [item[1] > limit for item in nearest]
        other = over.index(not over[0]) if len(set(over)) == 2 else 1
        return sorted([nearest[0], nearest[other]])


@dataclass
class _Search:
    """One search; sizes inside are in units of `unit` samples."""

    model: nn.Module
    batches: Callable[[int], Batch]
    device: torch.device
    limit: int
    given_loss: Callable[..., torch.Tensor] | None
    engine: str
    unit: int
    most: int
    options: dict[str, Any]
    timed: bool
    update: Callable[[int, int], object]
    engine_name: str = ""
    rows: dict[tuple[str, int], TriedBatch] = field(default_factory=dict)
    plans: dict[int, Checkpointable] = field(default_factory=dict)
    line: _Line = field(default_factory=_Line)
    warned: bool = False
    engines: dict[int, str] = field(default_factory=dict)
    enough: int | None = None
    away: Checkpointable | None = None
    """Model whose parameters are in a second tier, where all sizes run."""

    def __post_init__(self) -> None:
        self.is_run = self.engine == "dynamic"
        self.where = str(self.options.get("profile", self.device))
        self.beside = plain_resident_bytes(self.model, self.options)

    # -- batches and steps

    def _loss(self, size: int) -> tuple[Batch, Callable[..., torch.Tensor]]:
        """Return the batch of a size, and the loss, which is planned with it."""
        args, kwargs, targets = self.batches(size * self.unit)
        if targets and self.given_loss is None:
            raise ValueError("targets are for a loss: give loss_fn= too")
        return (args, kwargs, targets), self.given_loss or sum_of

    def _step(self, model: nn.Module, size: int) -> Callable[[], None]:
        (args, kwargs, targets), loss_fn = self._loss(size)

        def loss() -> torch.Tensor:
            if isinstance(model, Checkpointable):
                found: torch.Tensor = model(*args, targets=targets, **kwargs)
                return found
            return loss_fn(model(*args, **kwargs), *targets)

        return training_step(model.module if isinstance(model, Checkpointable) else model, loss)

    def _note(self, runs: str, size: int, fits: bool, least: int | None, **ran: Any) -> None:
        batch = size * self.unit
        self.rows[runs, batch] = TriedBatch(batch, runs, fits, least, **ran)
        # The number of sizes that are left is known only at the end.
        self.update(len(self.rows), len(self.rows) + 1)
        verdict = "fits" if fits else "too large"
        logger.debug("batch %d (%s): least %s, %s", batch, runs, shown_bytes(least), verdict)

    # -- with rotor

    def _plan(self, size: int) -> bool:
        """Return whether a plan of a size fits; keep it if so."""
        known = self.rows.get(("rotor", size * self.unit))
        if known is not None and (not known.fits or size in self.plans):
            return known.fits
        least: int | None = None
        try:
            with warnings.catch_warnings():
                # The reason why a model is planned in parts is logged once.
                warnings.simplefilter("ignore" if self.warned else "default", MemoryLimitWarning)
                model, least, fits = self._planned(size)
            self.warned = True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        if least is not None:
            self.line.points[size] = least
        if fits:
            self.plans = {size: model}
        self._note("rotor", size, fits, least)
        return fits

    def _ran(self, model: Checkpointable, size: int) -> tuple[Checkpointable, int | None, bool]:
        """Return a model without a single plan that has run a size, and its figures."""
        (args, kwargs, targets), loss_fn = self._loss(size)
        with nullcontext() if self.timed else single_runs():
            if self.engine != "dynamic":
                model.measure(*args, targets=targets, **kwargs)
        steps = LimitedSteps(
            model,
            lambda wrapped: self._step(wrapped, size),
            self.device,
            lambda: Checkpointable(self.model, engine="dynamic", loss_fn=loss_fn),
        )
        expected = self.line.at(size, self.limit)
        if expected is not None and expected > _SURE * self.limit:
            steps.run_dynamically()
        least: int | None = steps.meter_parts() or None
        ran = steps.run(self.limit, timed=False)
        plan = steps.runner.plan
        self.engines[size] = self.engine_name if plan is None else plan.engine
        if not ran.fits:
            self.enough = ran.least_bytes or self.enough
        if plan is not None and plan.engine == "dynamic":
            # The peak of a refused step is a limit that suffices; the least one is unknown.
            least = ran.measured_bytes if not ran.fits else None
        return steps.runner, least, ran.fits

    def _measured(self, size: int) -> Checkpointable:
        """Return the model with a limit, measured on a size unless steps have to be run."""
        (args, kwargs, targets), loss_fn = self._loss(size)
        model = self.away or wrapped(
            self.model, self.limit, engine=self.engine, loss_fn=loss_fn, **self.options
        )
        if model.homes is not None:
            self.away = model
        self.engine_name = model.planned_as
        if not self.is_run:
            with nullcontext() if self.timed else single_runs():
                model.measure(*args, targets=targets, **kwargs)
        return model

    def _planned(self, size: int) -> tuple[Checkpointable, int | None, bool]:
        model = self._measured(size)
        may_choose = "effort" not in self.options
        fast = {"effort": "fast"} if may_choose else {}
        if self.is_run or not has_single_plan(model):
            self.is_run = True
            return self._ran(model, size)
        try:
            model.plan_step(1, **fast)
        except InfeasibleError as error:
            least = error.minimum_bytes
        else:
            least = model.get_expected_memory() + resident_bytes(model)
        tries = [fast]
        if may_choose and self.limit < least <= _NEAR * self.limit:
            tries.append({"effort": "default"})
        for more in tries:
            try:
                plan = model.plan_step(self.limit, **more)
                self.engines[size] = plan.engine
                return model, min(least, plan.predicted_bytes + resident_bytes(model)), True
            except InfeasibleError as error:
                least = min(least, error.minimum_bytes)
        return model, least, False

    def _largest(self, highest: int) -> int:
        """Return the largest size below `highest` with a plan that fits; 0: none has."""
        low, high = 0, highest
        for tried in self.rows.values():
            size = tried.batch // self.unit
            if tried.runs == "rotor" and tried.fits and size < high:
                low = max(low, size)
        size, tries = min(_FIRST, high - 1), 0
        while low + 1 < high:
            if low < size < high:
                if self._plan(size):
                    low = size
                else:
                    high = size
            tries += 1
            guess = self.line.largest_below(self.limit) if tries <= _SECANTS else None
            if guess is None:
                is_growing = len(self.line.points) < 2 and 2 * low < high
                guess = 2 * low if is_growing else (low + high) // 2
            growth = _GROWTH_RUN if self.is_run else _GROWTH
            size = max(low + 1, min(guess, high - 1, growth * max(low, 1)))
        return low

    def _verified(self, size: int) -> BatchFit | None:
        """Return a size as it ran within the limit; ``None`` if its peak exceeded it."""
        if not self._plan(size):
            return None
        model = self.plans[size]
        least = self.rows["rotor", size * self.unit].least_bytes
        try:
            with warnings.catch_warnings(action="ignore", category=MemoryLimitWarning):
                step = self._step(model, size)
                # The first steps are metered by the wrapper, and may be planned again.
                settle(model, step)
                measured = step_bytes(step, self.device) + resident_bytes(model)
                predicted = model.get_expected_memory() + resident_bytes(model)
                seconds = seconds_of(step, self.device) if measured <= self.limit else None
        except (InfeasibleError, RuntimeError, MemoryError) as error:
            if not (isinstance(error, InfeasibleError) or is_out_of_memory(error)):
                raise
            measured, predicted, seconds = None, 0, None
        fits = seconds is not None
        if measured is not None and not fits:
            least = max(least or 0, measured)
        self._note("rotor", size, fits, least, measured_bytes=measured, seconds=seconds)
        if seconds is None or measured is None:
            return None
        return BatchFit(size * self.unit, predicted, measured, seconds)

    def _largest_verified(self, planned: int) -> tuple[int, BatchFit | None]:
        """Return the largest size, up to a planned one, that ran within the limit; 0: none did."""
        low, high, found = 0, planned + 1, None
        size, step = planned, 1
        while low + 1 < high:
            fit = self._verified(size)
            if fit is not None:
                low, found = size, fit
            else:
                high = size
            if low:
                size = (low + high) // 2
                continue
            needed = self.rows["rotor", size * self.unit].least_bytes or self.limit
            size = max(1, min(size * self.limit // max(needed, 1), size - step))
            step *= 2
        return low, found

    # -- with plain PyTorch

    def _plain(self, largest: int) -> BatchFit | None:
        """Return the largest size that plain PyTorch runs within the limit."""
        line, low, size = _Line(), 0, min(_FIRST, self.most)
        high = min(2 * largest, self.most) + 1
        found: BatchFit | None = None
        while low + 1 < high:
            predicted = line.at(size, self.limit)
            try:
                step = self._step(self.model, size)
                step()
                measured = step_bytes(step, self.device) + self.beside
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                high = size
                self._note("plain", size, False, predicted)
            else:
                line.points[size] = measured
                low, high = (size, high) if measured <= self.limit else (low, size)
                self._note("plain", size, size == low, measured, measured_bytes=measured)
                if size == low:
                    expected = measured if predicted is None else predicted
                    found = BatchFit(size * self.unit, expected, measured, 1.0)
            guess = line.largest_below(self.limit)
            if guess is not None and low and guess <= low:
                # The next size is known to be too large without being run.
                over = line.at(low + 1, self.limit)
                if over is not None and low + 1 < high:
                    self._note("plain", low + 1, False, over)
                break
            # Bytes grow at most in proportion to the batch, so that this size fits.
            safe = int(low * self.limit / line.points[low]) if low else 0
            size = max(low + 1, min(safe, high - 1, high if guess is None else guess))
        if found is None:
            return None
        seconds = seconds_of(self._step(self.model, low), self.device)
        row = self.rows["plain", found.batch]
        self.rows["plain", found.batch] = replace(row, seconds=seconds)
        return replace(found, seconds=seconds)

    # -- the whole search

    def run(self, points: int) -> LargestBatch:
        size, largest = self._largest_verified(self._largest(self.most + 1))
        if largest is None:
            least = min(
                (t.least_bytes for t in self.rows.values() if t.least_bytes is not None),
                default=self.limit + 1,
            )
            needs = f"the least that it fits in is {exact_bytes(least)}"
            if self.is_run and self.enough is not None:
                least = self.enough
                needs = f"about {exact_bytes(least)} would do"
            raise InfeasibleError(
                f"a batch of {self.unit} does not fit in {exact_bytes(self.limit)}: "
                f"{needs}. Give a step as much, or make the model or its input smaller",
                least,
            )
        plain = self._plain(size)
        fits = [(largest, "rotor")] + ([(plain, "plain")] if plain is not None else [])
        for other in self._others(size, plain, points - 1):
            fit = self._verified(other)
            if fit is not None:
                fits.append((fit, "rotor"))
        best, best_runs = max(fits, key=lambda item: item[0].samples_per_second)
        rows = sorted(self.rows.values(), key=lambda tried: (tried.batch, tried.runs))
        return LargestBatch(
            self.limit,
            self.engines.get(size, self.engine_name),
            self.where,
            self.unit,
            largest,
            best,
            best_runs,
            plain,
            tuple(rows),
        )

    def _others(self, largest: int, plain: BatchFit | None, count: int) -> list[int]:
        """Return sizes to run beside the largest: from the largest plain one up, in even ratios."""
        start = max(largest // 2, 1) if plain is None else plain.batch // self.unit
        start = min(start, largest)
        sizes = {
            round(start * (largest / start) ** (k / count)) if count else start
            for k in range(count)
        }
        return sorted(sizes - {largest})


class _PlannedSearch(_Search):
    """Search for a machine that is not here: no step is run."""

    def _ran(self, model: Checkpointable, size: int) -> tuple[Checkpointable, int | None, bool]:
        raise ValueError(
            f"the model is planned as {model.planned_as}, whose steps have to be run here: leave "
            "profile= out, or give a model of which one graph can be captured"
        )

    def _verified(self, size: int) -> BatchFit | None:
        if not self._plan(size):
            return None
        model = self.plans[size]
        seconds = model.get_expected_makespan()
        least = self.rows["rotor", size * self.unit].least_bytes
        self._note("rotor", size, True, least, seconds=seconds)
        return BatchFit(size * self.unit, model.get_expected_memory(), None, seconds)

    def _plain(self, largest: int) -> BatchFit | None:
        """Return the largest size whose step fits without recomputation."""
        line, low, high = _Line(), 0, min(2 * largest, self.most) + 1
        found: BatchFit | None = None
        size = min(_FIRST, self.most)
        while low + 1 < high:
            step = unplanned_step(self._measured(size))
            assert step is not None
            line.points[size] = step.peak_bytes
            fits = step.peak_bytes <= self.limit
            seconds = step.time_ns / 1e9
            self._note("plain", size, fits, step.peak_bytes, seconds=seconds)
            if fits:
                low = size
                found = BatchFit(size * self.unit, step.peak_bytes, None, seconds)
            else:
                high = size
            guess = line.largest_below(self.limit)
            size = max(low + 1, min(2 * low if guess is None else guess, high - 1))
        return found
