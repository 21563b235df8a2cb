"""Every step is watched, cheaply: data of the same shape may need more than was measured.

A stage that works on selected rows, or eager code between captured parts, was measured on the first
batch. What they keep in later steps is compared with that: on the CPU by the level of the C
library's heap before and after, which costs less than a microsecond. Where it differs, and now and
then, a step is metered again. On CUDA the allocator's own counter tells of a new peak.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rotor import _core, _torch, memory
from rotor.errors import MemoryLimitWarning
from rotor.inspection import Inspection
from rotor.metering import Metered, StepBytes, StepMeter
from rotor.observing import kept_bytes
from rotor.stages import Stage
from rotor.units import format_bytes
from rotor.values import tensors_of

__all__ = [
    "LevelWatch",
    "PeakWatch",
    "StageWatch",
    "can_vary",
    "grown",
    "is_due",
    "known_growth",
    "meter_again",
    "note_peak",
    "sparse_growth",
    "stage_watch",
    "warn_excess",
    "warn_sparse",
]

_FIRST_STEPS = (16, 64)
_EVERY = 256
"""Steps after which one is metered again, though nothing was seen to differ."""

_NOISE_BYTES = 1 << 17
_NOISE_SHARE = 50
"""Less than these bytes, and than this part of what was expected, is taken for noise."""

_NEW_MAXIMUM = 1.05
"""An excess is told again where it is larger by this factor."""

Growth = dict[int, tuple[int, int]]
"""By number of a stage: bytes that it kept, and gave, beyond what was measured."""


def can_vary(stage: Stage) -> bool:
    """Return whether a stage may keep other bytes for an input of the same shape.

    PyTorch's own layers do not.
    """
    if not all(isinstance(function, nn.Module) for function in stage.functions):
        return True
    return any(
        not type(module).__module__.startswith("torch.nn.modules.") or _torch.has_hooks(module)
        for module in stage.modules()
    )


class _WatchedStage:
    """A stage that tells how the heap has grown while it ran."""

    def __init__(self, stage: Stage, note: Callable[[int, Any, Any], None]) -> None:
        self._stage = stage
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def __call__(self, x: Any) -> Any:
        before = _core.heap_bytes()
        y = self._stage(x)
        self._note(_core.heap_bytes() - before, x, y)
        return y


def _cuda_counters(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are allocated on a device, and the most since a reset."""
    found = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {})
    allocated = found.get("all", {"current": 0, "peak": 0})
    return allocated["current"], allocated["peak"]


class StageWatch:
    """Compares what the stages of a chain keep with what was measured.

    Parameters
    ----------
    inspection
        What was measured.

    Attributes
    ----------
    inspection
        The same.
    stages
        Those to run in their place.
    growth
        The most that was seen beyond the measure, by stage.
    is_new
        More of it was seen than the plan knows.
    is_unexplained
        The heap grew by more than the tensors of a stage hold: by what a kernel caches, say.
    """

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection
        self.growth: Growth = {}
        self.is_new = False
        self.is_unexplained = False
        self._is_queued = False
        self._told: Callable[[], None] | None = None
        self._measures = inspection.measures
        self.stages: list[Any] = [
            _WatchedStage(stage, self._noting(i)) if can_vary(stage) else stage
            for i, stage in enumerate(inspection.stages)
        ]

    @staticmethod
    def of(inspection: Inspection) -> StageWatch | None:
        """Return the watch of a chain; ``None`` where nothing can vary, or be seen."""
        if inspection.device.type != "cpu" or _core.heap_bytes() < 0:
            return None
        return StageWatch(inspection) if any(map(can_vary, inspection.stages)) else None

    def tell(self, told: Callable[[], None]) -> None:
        """Have `told` called at the end of a backward, when a stage has kept more."""
        self._told = told

    def forward_done(self, output: Any) -> None:
        """Have the end of the backward looked at, where a stage has kept more."""
        if not (self.is_new or self.is_unexplained):
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._queue())
                return

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            _torch.at_end_of_backward(self._finish, self._abandon)

    def _abandon(self) -> None:
        self._is_queued = False

    def _finish(self) -> None:
        self._is_queued = False
        if (self.is_new or self.is_unexplained) and self._told is not None:
            self._told()
            self.is_new = self.is_unexplained = False

    def _noting(self, i: int) -> Callable[[int, Any, Any], None]:
        def note(grown_bytes: int, x: Any, y: Any) -> None:
            measure = self._measures[i]
            is_recorded = torch.is_grad_enabled()
            expected = measure.xbar_bytes if is_recorded else measure.output_bytes
            more = grown_bytes - expected
            kept, given = self.growth.get(i, (0, 0))
            noise = max(_NOISE_BYTES, expected // _NOISE_SHARE)
            known = (kept if is_recorded else given) + noise
            if more <= known:
                return
            more = min(more, kept_bytes(self.inspection.stages[i], x, y) - expected)
            if more <= known:
                self.is_unexplained = True
                return
            self.growth[i] = (more, given) if is_recorded else (kept, more)
            self.is_new = True
            if _torch.in_backward():
                self._queue()

        return note


def grown(inspection: Inspection, growth: Growth) -> Inspection:
    """Return an inspection in which stages keep more than was measured.

    Parameters
    ----------
    inspection
        What was measured.
    growth
        What was seen beyond it. Temporaries are taken to grow with what is kept.
    """
    measures = list(inspection.measures)
    for i, (kept, given) in growth.items():
        m = measures[i]
        measures[i] = replace(
            m,
            output_bytes=m.output_bytes + given,
            xbar_bytes=m.xbar_bytes + max(kept, given),
            forward_nograd_tmp_bytes=m.forward_nograd_tmp_bytes + max(kept - given, 0),
            backward_peak_bytes=m.backward_peak_bytes + max(kept, given),
        )
        if i + 1 < len(measures):
            following = measures[i + 1]
            measures[i + 1] = replace(following, grad_bytes=following.grad_bytes + given)
    return replace(inspection, measures=measures)


Watches = dict[int, tuple[Inspection, StageWatch | None]]
"""The watches of a model, by the identity of what was measured."""


def known_growth(watches: Watches, inspection: Inspection) -> Inspection:
    """Return an inspection with what its stages were seen to keep beyond it."""
    known, watch = watches.get(id(inspection), (None, None))
    return grown(inspection, watch.growth) if known is inspection and watch else inspection


def stage_watch(model: Any, plan: Any) -> StageWatch | None:
    """Return what sees how much the stages keep in a step; ``None`` where that cannot vary.

    Parameters
    ----------
    model
        The model of a chain; its next steps are planned for what is seen.
    plan
        Under which the step runs.
    """
    inspection, watches = plan.inspection, model._watches
    if model._ranks is not None:
        return None
    if watches.get(id(inspection), (None,))[0] is not inspection:
        watches[id(inspection)] = (inspection, StageWatch.of(inspection))
    watch: StageWatch | None = watches[id(inspection)][1]
    if watch is not None:
        myself, watched = weakref.ref(model), weakref.ref(watch)

        def told() -> None:
            found, seen = myself(), watched()
            if found is not None and seen is not None:
                _learn_growth(found, plan, seen)

        watch.tell(told)
    return watch


def _learn_growth(model: Any, plan: Any, watch: StageWatch) -> None:
    key = next((k for k, known in model._plans.items() if known is plan), None)
    plan.differs = True
    if key is None or not watch.is_new:
        return
    peak = model._repriced(key, plan)
    note_peak(plan, peak)
    if peak > plan.limit_bytes:
        plan.measured_bytes = max(plan.measured_bytes or 0, peak)
        plan.outdated = True
        names = [plan.inspection.measures[i].name for i in sorted(watch.growth)]
        warn_excess(plan, peak, names)


class _Watch:
    """What looks at a step at its marks, and at the end of its backward.

    Parameters
    ----------
    model
        Whose step; it is not held.
    plan
        Under which it runs.
    """

    def __init__(self, model: Any, plan: Any) -> None:
        self._model = weakref.ref(model)
        self._plan = plan

    def mark(self, name: str) -> None:
        """Begin another part of the step."""

    def cancel(self) -> None:
        """Stop without a result: nothing has been started."""

    def forward_done(self, output: Any) -> None:
        """Mark the end of the forward, and have the backward's end looked at."""
        self.mark("loss")
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_arrived)
                return

    def _gradient_arrived(self, _: torch.Tensor) -> None:
        self.mark("backward")
        _torch.at_end_of_backward(self._finish)

    def _finish(self) -> None:
        raise NotImplementedError


class LevelWatch(_Watch):
    """Compares the bytes at the marks of a step with what a metered step had there.

    Parameters
    ----------
    model, plan
        Whose step, under which plan: ``model._learn_levels(plan, more)`` is called at the end of a
        backward with the bytes beyond ``plan.levels`` by mark, where there are some.
    """

    def __init__(self, model: Any, plan: Any) -> None:
        super().__init__(model, plan)
        self._more: dict[str, int] = {}
        self._begin = _core.heap_bytes()

    def mark(self, name: str) -> None:
        """Look at the level, at the begin of a part of the step."""
        expected = self._plan.levels.get(name)
        if expected is None:
            return
        more = _core.heap_bytes() - self._begin - expected
        if more > max(_NOISE_BYTES, expected // _NOISE_SHARE):
            self._more[name] = max(more, self._more.get(name, 0))

    def _finish(self) -> None:
        model = self._model()
        if self._more and model is not None:
            found, self._more = self._more, {}
            model._learn_levels(self._plan, found)


class PeakWatch(_Watch):
    """Reads CUDA's counter of the peak, without setting it back, around a step.

    Parameters
    ----------
    model, plan
        Whose step, under which plan: ``model._learn_peak(plan, peak_bytes)`` is called at the end
        of a backward in which the counter has risen.
    """

    def __init__(self, model: Any, plan: Any) -> None:
        super().__init__(model, plan)
        self._begin, self._before = _cuda_counters(plan.device)

    def _finish(self) -> None:
        _, peak = _cuda_counters(self._plan.device)
        model = self._model()
        if peak > self._before and model is not None:
            model._learn_peak(self._plan, peak - self._begin)


def sparse_growth(plan: Metered, slots: Iterable[_torch.Slot]) -> int:
    """Return how many bytes of sparse gradients exist beyond those of metered steps.

    Sparse gradients are added up side by side, until they are coalesced or dropped: each step of
    gradient accumulation needs more. A plan for which there are more has its next step metered.

    Parameters
    ----------
    plan
        Under which the next step runs.
    slots
        Where the parameters are.
    """
    found = 0
    for values, name in slots:
        gradient = None if values[name] is None else values[name].grad
        if gradient is not None and gradient.layout is not torch.strided:
            found += memory.storage_bytes(_torch.strided_parts(gradient))
    more = max(found - plan.sparse_bytes, 0)
    plan.sparse_bytes += more
    plan.differs |= more > 0
    return more if plan.measured_bytes is not None else 0


def is_due(plan: Metered, slots: Iterable[_torch.Slot] = ()) -> bool:
    """Count a step that is not metered; return whether it should be after all.

    Parameters
    ----------
    plan
        Under which it runs.
    slots
        Where the parameters are, whose sparse gradients may have grown.
    """
    plan.unmetered += 1
    sparse_growth(plan, slots)
    due = plan.differs or plan.unmetered in _FIRST_STEPS or plan.unmetered % _EVERY == 0
    plan.differs = False
    return due


def meter_again(model: Any, plan: Any) -> StepMeter | None:
    """Return a meter of a step of a plan that was metered before; ``None`` where one runs."""
    myself = weakref.ref(model)

    def done(step: StepBytes) -> None:
        found = myself()
        if found is not None:
            found._learn_again(plan, step)

    try:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return StepMeter(plan.device, done, gradients)
    except memory.MeterBusyError:
        return None


def note_peak(plan: Metered, peak_bytes: int) -> None:
    """Note what a step needed."""
    plan.least_bytes_seen = min(plan.least_bytes_seen or peak_bytes, peak_bytes)
    plan.most_bytes_seen = max(plan.most_bytes_seen, peak_bytes)


def warn_sparse(plan: Any, peak_bytes: int, *, stacklevel: int = 3) -> None:
    """Warn of a step above the limit where sparse gradients are added up, as `warn_excess`.

    Parameters
    ----------
    plan
        Under which it ran.
    peak_bytes
        What the step needed.
    """
    if peak_bytes <= max(plan.limit_bytes, plan.warned_bytes * _NEW_MAXIMUM):
        return
    plan.warned_bytes = peak_bytes
    warnings.warn(
        f"a step needed about {format_bytes(peak_bytes)} ({peak_bytes} bytes), and the limit is "
        f"{format_bytes(plan.limit_bytes)}: {plan.sparse_bytes} bytes of sparse gradients existed, "
        "which PyTorch puts side by side, not one on the other, and copies whenever more are "
        "added. They grow with every step of gradient accumulation, and no plan changes that: "
        "coalesce them after each backward (p.grad = p.grad.coalesce()), accumulate over fewer "
        "steps, or give a higher limit",
        MemoryLimitWarning,
        stacklevel=stacklevel,
    )


def warn_excess(
    plan: Any, peak_bytes: int, where: Sequence[str] = (), *, stacklevel: int = 3
) -> None:
    """Warn of a step above the limit, once for each new maximum.

    Parameters
    ----------
    plan
        Under which it ran.
    peak_bytes
        What the step needed.
    where
        The parts of the model that kept more than was measured, where that is known.
    """
    if peak_bytes <= max(plan.limit_bytes, plan.warned_bytes * _NEW_MAXIMUM):
        return
    plan.warned_bytes = peak_bytes
    named = f" by {', '.join(where)}" if where else ""
    warnings.warn(
        f"a step needed about {format_bytes(peak_bytes)} ({peak_bytes} bytes), and the limit is "
        f"{format_bytes(plan.limit_bytes)}: the memory of this model depends on the values of its "
        f"input, and more was needed{named} than when it was measured. The following steps are "
        "planned for as much; measure the model on a batch that needs the most, or give a lower "
        "limit",
        MemoryLimitWarning,
        stacklevel=stacklevel,
    )
