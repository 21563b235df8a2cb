"""Stages that differ from their measure: other inputs, and more memory than was measured.

A stage that works on selected rows was measured on the first batch. The memory that it keeps in
later steps is compared with that, by the level of the C library's heap before and after.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core, ends
from rotor.common.accounting import noise_bytes
from rotor.common.tensor_trees import grad_flags, tree_tensors
from rotor.engines.chain.measure import measure
from rotor.engines.chain.measures import Inspection
from rotor.engines.chain.observe import Observation, kept_bytes
from rotor.engines.chain.stages import Stage
from rotor.meter.watch import warn_excess
from rotor.units import exact_bytes

_MOST = 3


def measured_alike(inspections: Mapping[Any, Inspection], measured: Any) -> Inspection | None:
    """Return a measure (by `Key.measured`) of an input that differs only in requiring gradients."""

    def without_flags(measured: Any) -> Any:
        return tuple([tensor[:-1] for tensor in measured[0]]), measured[1:]

    for other, inspection in inspections.items():
        if without_flags(other) == without_flags(measured):
            return inspection
    return None


def with_other_input(
    old: Inspection,
    stages: Sequence[Stage],
    arg: Any,
    observed: Callable[[list[Stage], list[Observation]], object] | None = None,
) -> Inspection | None:
    """Measure only the first stages again, until an output requires gradients as before.

    `old` has the measures for an input with other flags, and `observed` is as of `measure`. Returns
    ``None`` if more than a few stages are concerned.
    """
    for count in range(1, min(_MOST, len(old.stages) - 1) + 1):
        if any(grad_flags(arg)) and not any(old.flags[count]):
            continue
        # One stage more: the last one is measured with its output held.
        part = {name for stage in old.stages[: count + 1] for name in stage.names}
        found = measure([s for s in stages if s.names[0] in part], arg, observed=observed)
        last, own = old.stages[count - 1].names[-1], [s.names[-1] for s in found.stages[:-1]]
        end = own.index(last) + 1 if last in own else None
        if end is None or found.flags[end] != old.flags[count]:
            continue
        places = {p.identity: p for stage in old.stages[:count] for p in stage.state}
        for stage in found.stages[:end]:
            kept = {place.identity for place in stage.state}
            stage.state += [place for key, place in places.items() if key not in kept]
        shift = end - count
        later = {i + shift: why for i, why in old.reasons.items() if i >= count}
        return replace(
            old,
            stages=[*found.stages[:end], *old.stages[count:]],
            measures=[*found.measures[:end], *old.measures[count:]],
            input_bytes=found.input_bytes,
            input_flags=found.input_flags,
            reasons={i: why for i, why in found.reasons.items() if i < end} | later,
        )
    return None


Growth = dict[int, tuple[int, int]]
"""Bytes by stage that were kept, and given, beyond the measured ones."""


def can_vary(stage: Stage) -> bool:
    """Return whether a stage may keep other bytes for equal shapes, as PyTorch's layers do not."""
    return not stage.is_of_layers()


class _WatchedStage:
    """Stage that reports the growth of the heap during its run."""

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


class StageWatch:
    """Comparison of the memory that stages keep with the measured one."""

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection
        self.growth: Growth = {}
        """Largest excess over the measure, by stage."""
        self.is_new = False
        """True if more growth was seen than the plan includes."""
        self.is_unexplained = False
        """True if the heap grew by more than a stage's tensors hold, such as a kernel's cache."""
        self._is_queued = False
        self.on_growth: Callable[[], None] | None = None
        """Function that is called at the end of a backward in which a stage kept more."""
        self._measures = inspection.measures
        self.stages: list[Any] = [
            _WatchedStage(stage, self._noting(i)) if can_vary(stage) else stage
            for i, stage in enumerate(inspection.stages)
        ]
        """Stages that run in place of the measured ones."""

    @staticmethod
    def of(inspection: Inspection) -> StageWatch | None:
        """Return the watch of a chain; ``None`` if nothing can vary, or be observed."""
        if inspection.device.type != "cpu" or _core.heap_bytes() < 0:
            return None
        return StageWatch(inspection) if any(map(can_vary, inspection.stages)) else None

    def forward_done(self, output: Any) -> None:
        """Check for growth at the end of the backward, if a stage has kept more."""
        if not (self.is_new or self.is_unexplained):
            return
        for tensor in tree_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._queue())
                return

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            ends.at_end_of_backward(self._finish, self._abandon)

    def _abandon(self) -> None:
        self._is_queued = False

    def _finish(self) -> None:
        self._is_queued = False
        if (self.is_new or self.is_unexplained) and self.on_growth is not None:
            self.on_growth()
            self.is_new = self.is_unexplained = False

    def _noting(self, i: int) -> Callable[[int, Any, Any], None]:
        def note(grown_bytes: int, x: Any, y: Any) -> None:
            measure = self._measures[i]
            is_recorded = torch.is_grad_enabled()
            expected = measure.xbar_bytes if is_recorded else measure.output_bytes
            more = grown_bytes - expected
            if more <= 0:
                return
            kept, given = self.growth.get(i, (0, 0))
            known = (kept if is_recorded else given) + noise_bytes(expected)
            if more <= known:
                return
            more = min(more, kept_bytes(self.inspection.stages[i], x, y) - expected)
            if more <= known:
                self.is_unexplained = True
                return
            self.growth[i] = (more, given) if is_recorded else (kept, more)
            self.is_new = True
            if core.in_backward():
                self._queue()

        return note


def grown(inspection: Inspection, growth: Growth) -> Inspection:
    """Return an inspection with the growth of its stages; temporaries are assumed to grow too."""
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
"""Watches of a model, by the identity of their inspection."""


def known_growth(watches: Watches, inspection: Inspection) -> Inspection:
    """Return an inspection that includes the observed growth of its stages."""
    known, watch = watches.get(id(inspection), (None, None))
    return grown(inspection, watch.growth) if known is inspection and watch else inspection


def stage_watch(engine: Any, plan: Any) -> StageWatch | None:
    """Return the watch of a step, for later plans; ``None`` if no stage's memory can vary."""
    inspection, watches = plan.inspection, engine.watches
    if engine.context.peers.ranks is not None:
        return None
    if watches.get(id(inspection), (None,))[0] is not inspection:
        watches[id(inspection)] = (inspection, StageWatch.of(inspection))
    watch: StageWatch | None = watches[id(inspection)][1]
    if watch is not None:
        myself, watched = weakref.ref(engine), weakref.ref(watch)

        def on_growth() -> None:
            found, seen = myself(), watched()
            if found is not None and seen is not None:
                _learn_growth(found, plan, seen)

        watch.on_growth = on_growth
    return watch


def _learn_growth(engine: Any, plan: Any, watch: StageWatch) -> None:
    plan.differs = True
    if not (watch.is_new and engine.context.is_current(plan)):
        return
    if peak := _excess(engine, plan):
        names = [plan.inspection.measures[i].name for i in sorted(watch.growth)]
        warn_excess(plan, peak, names)


def _excess(engine: Any, plan: Any) -> int:
    """Note the need of a plan by the latest costs; return it where it is over the limit, else 0."""
    peak: int = engine.repriced(plan)
    return peak if engine.exceeds(plan, peak) else 0


class _Kept:
    """Mark on the graph of a step without recomputation, whose backward is still to come."""

    is_done = False

    def __call__(self, _: Any) -> None:
        self.is_done = True


def kept_until_backward(output: Any) -> Callable[[], bool] | None:
    """Return the function that tells if an output's graph, if any, has neither run nor is dropped.

    It is for a step without recomputation.
    """
    for tensor in tree_tensors(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(kept := _Kept())
            found = weakref.ref(kept)
            return lambda: (step := found()) is not None and not step.is_done
    return None


def watch_output(engine: Any, plan: Any, output: Any) -> None:
    """Note at the end of the backward if the caller holds the output, for which there is no room.

    The plan of the step was made without the output. The engine makes no such plan again.
    """
    watched = [tensor for tensor in tree_tensors(output) if tensor.requires_grad]
    storages = [core.storage_reference(tensor) for tensor in watched]
    myself = weakref.ref(engine)

    def finish() -> None:
        found = myself()
        if found is not None and not all(storage.expired() for storage in storages):
            _learn_held(found, plan)

    for tensor in watched:
        tensor.register_hook(lambda _: ends.at_end_of_backward(finish))


def _learn_held(engine: Any, plan: Any) -> None:
    engine.held.add(plan.key.measured)
    if peak := _excess(engine, plan):
        engine.context.warn(
            "held",
            f"a step needed {exact_bytes(peak)}, and the limit is {exact_bytes(plan.limit_bytes)}: "
            "the model's output was held until the end of the backward, and no schedule has room "
            "for it. Delete the output before the backward, or raise the limit",
        )
