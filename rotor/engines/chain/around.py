"""Ways around a chain's schedule, for backwards that it cannot give."""

from __future__ import annotations

from typing import Any
from weakref import WeakMethod

from rotor._pytorch import backwards, devices
from rotor.common.rerun import Rerun, Unit, attach
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.chain.measures import Inspection
from rotor.engines.chain.schedule import Schedule
from rotor.engines.chain.segments import bounds_of_segments, run_in_segments
from rotor.engines.chain.stages import shared_parameters

__all__ = ["Around"]


class Around:
    """Ways around the schedule of one step; `arg` is the input of the stage that runs next.

    One leads around the stages that the schedule runs, so that the stages of plain autograd see
    every backward. Another leads around the whole chain for gradients that are to be
    differentiated, so that their sums are made in the order of plain autograd; unless values leave
    the stages, or the last ones have registered hooks, which would be called without a gradient.
    """

    def __init__(
        self,
        unit: Unit,
        inspection: Inspection,
        schedule: Schedule,
        arg: Any,
        *,
        is_whole: bool = True,
    ) -> None:
        self._unit, self._inspection, self._schedule = unit, inspection, schedule
        self._is_whole, self._arg = is_whole, None
        self._rerun: Rerun | None = None
        # The heap of the C library is slow to count, and only a schedule's own stages need it.
        counts = is_whole and schedule.tail > schedule.head
        self._start_bytes = devices.level(inspection.device) if counts else None
        self._hooks, self._is_hooked = 0, False
        if schedule.tail == schedule.head:
            # A step that leaves all to plain autograd too shows which buffers forwards write to.
            unit.note_written()
        elif schedule.head == 0:
            self.begin(arg)

    def begin(self, arg: Any, run: Any = None) -> None:
        """Note the run of the schedule's stages, and the state before them, unless it is known."""
        if self._rerun is None:
            device, is_whole = self._inspection.device, self._is_whole
            self._arg, self._rerun = arg, Rerun(self._unit, arg, device, is_whole=is_whole)
            self._rerun.needs.start_bytes = self._start_bytes
        if run is not None:
            self._rerun.leave = WeakMethod(run.release)

    def stages(self, output: Any) -> Any:
        """Return the output of the schedule's stages, for other backwards too."""
        schedule, self._hooks = self._schedule, backwards.hooks_made()
        return self._attach(output, schedule.head, schedule.tail)

    def end(self) -> None:
        """Note whether the stages after those of the schedule have registered hooks."""
        self._is_hooked = self._hooks != backwards.hooks_made()

    def whole(self, output: Any) -> Any:
        """Return the chain's output, for gradients of gradients too."""
        schedule = self._schedule
        is_one = schedule.tail in (schedule.head, schedule.n)
        if is_one or self._is_hooked or self._inspection.plain != (0, schedule.n):
            return output
        return self._attach(output, 0, schedule.n, is_outer=True)

    def _attach(self, output: Any, begin: int, end: int, *, is_outer: bool = False) -> Any:
        inspection, rerun = self._inspection, self._rerun
        stages, measures = inspection.stages[begin:end], inspection.measures[begin:end]
        assert rerun is not None

        def forward(value: Any) -> Any:
            is_plain = rerun.is_batched or bool(shared_parameters(stages))
            bounds = [0, len(stages)] if is_plain else bounds_of_segments(measures)
            return run_in_segments(
                stages, measures, bounds, value, inspection.device, rerun.needs.note
            )

        inputs = [tensor for tensor in tree_tensors(self._arg) if tensor.requires_grad]
        parameters = {id(p): p for stage in stages for p in stage.parameters()}
        leaves = [*inputs, *parameters.values()]
        return attach(output, rerun, forward, leaves, _never_again, is_outer=is_outer)


def _never_again() -> None:
    """Return ``None``, as a dead reference does: a schedule runs one backward."""
