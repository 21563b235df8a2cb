"""Ways around a chain's schedule, for backwards that it cannot give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rotor._pytorch import backwards
from rotor.common.rerun import Rerun, attach
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.chain.measures import Inspection
from rotor.engines.chain.schedule import Schedule
from rotor.engines.chain.stages import Stage

__all__ = ["Around"]


class Around:
    """Ways around the schedule of one step.

    One leads around the stages that the schedule runs, so that those of plain autograd see every
    backward. Another leads around the whole chain for gradients that are to be differentiated, so
    that their sums are made in the order of plain autograd; unless values leave the stages, or the
    last ones have registered hooks, which would be called without a gradient.

    Parameters
    ----------
    begun
        Function that returns the state in which a forward of some value begins.
    inspection, schedule
        The chain, and the operations to execute.
    arg
        Input of the first stage, which runs next.
    """

    def __init__(
        self,
        begun: Callable[[Any], Rerun],
        inspection: Inspection,
        schedule: Schedule,
        arg: Any,
    ) -> None:
        self._begun, self._inspection, self._schedule = begun, inspection, schedule
        # A step that leaves all to plain autograd too shows which buffers forwards write to.
        self._arg, self._rerun = arg, begun(arg) if schedule.head == 0 else None
        self._hooks, self._is_hooked = 0, False

    def begin(self, arg: Any) -> None:
        """Note the state before the stages of the schedule, unless they are the first."""
        if self._rerun is None:
            self._arg, self._rerun = arg, self._begun(arg)

    def stages(self, output: Any) -> Any:
        """Return the output of the schedule's stages, for other backwards too."""
        schedule, self._hooks = self._schedule, backwards.hooks_made()
        return self._attach(output, self._inspection.stages[schedule.head : schedule.tail])

    def end(self) -> None:
        """Note whether the stages after those of the schedule have registered hooks."""
        self._is_hooked = self._hooks != backwards.hooks_made()

    def whole(self, output: Any) -> Any:
        """Return the chain's output, for gradients of gradients too."""
        schedule = self._schedule
        is_one = schedule.tail in (schedule.head, schedule.n)
        if is_one or self._is_hooked or self._inspection.plain != (0, schedule.n):
            return output
        return self._attach(output, self._inspection.stages, is_outer=True)

    def _attach(self, output: Any, stages: Sequence[Stage], *, is_outer: bool = False) -> Any:
        def forward(value: Any) -> Any:
            for stage in stages:
                for function in stage.functions:
                    value = function(value)
            return value

        assert self._rerun is not None
        inputs = [tensor for tensor in tree_tensors(self._arg) if tensor.requires_grad]
        parameters = {id(p): p for stage in stages for p in stage.parameters()}
        leaves = [*inputs, *parameters.values()]
        return attach(output, self._rerun, forward, leaves, _never_again, is_outer=is_outer)


def _never_again() -> None:
    """Return what a dead reference does: a schedule runs one backward."""
