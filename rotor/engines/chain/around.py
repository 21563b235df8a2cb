"""Way around a chain's schedule, for backwards that it cannot give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rotor.common.rerun import Rerun, attach
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.chain.schedule import Schedule
from rotor.engines.chain.stages import Stage

__all__ = ["attach_chain"]


def attach_chain(
    output: Any, rerun: Rerun | None, stages: Sequence[Stage], schedule: Schedule, arg: Any
) -> Any:
    """Return a chain's output, for backwards too that its schedule cannot give.

    Parameters
    ----------
    output, rerun
        The output, and the state in which the chain began; ``None``: others are refused.
    stages, schedule, arg
        The chain, the operations that ran, and its input.
    """
    if rerun is None or schedule.tail == schedule.head:
        return output

    def forward(value: Any) -> Any:
        for stage in stages:
            for function in stage.functions:
                value = function(value)
        return value

    inputs = [tensor for tensor in tree_tensors(arg) if tensor.requires_grad]
    parameters = {id(p): p for stage in stages for p in stage.parameters()}
    return attach(output, rerun, forward, [*inputs, *parameters.values()], _never_again)


def _never_again() -> None:
    """Return what a dead reference does: a schedule runs one backward."""
