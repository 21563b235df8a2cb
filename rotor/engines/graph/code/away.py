"""Gradients that leave for homes in a second tier while the backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rotor._pytorch import core
from rotor.engines.contract import CannotPlan
from rotor.engines.graph.code.early import Owners, Standing
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import CaptureError
from rotor.tier.state import AwayState


@dataclass(frozen=True)
class Away:
    """Gradients that leave for homes in a second tier."""

    gradients: frozenset[int]
    """Their numbers."""
    settle: Callable[[], None]
    """Function that waits until the ones that have left are there."""
    standing: Standing
    """Tensors that stand for the parameters."""
    alignment_bytes: int
    """Alignment of the memory to which a gradient is fetched."""

    @classmethod
    def of(
        cls,
        state: AwayState | None,
        lowered: Lowered,
        owners: Owners | None,
        slots: Sequence[core.Slot],
    ) -> Away | None:
        """Return the gradients of a captured step that leave, if any can.

        What makes or reads them runs once from now on: they are in memory while they leave, and go
        with their handover. Raise CannotPlan if the origins of gradients are unknown.
        """
        if state is None:
            return None
        if owners is None:
            raise CannotPlan(
                CaptureError(
                    "a tensor other than a parameter or an argument gets a gradient, or the "
                    "forward reads gradients, so that no gradient can leave for a second tier in "
                    "the backward: leave offload_state out"
                )
            )
        found = [
            index
            for index, owner in owners.items()
            if owner.slots and state.has(core.value_in(slots[owner.slots[0]]))
        ]
        leaving = {s for k in found for s in lowered.values[lowered.gradients[k]].storages}
        for task in lowered.tasks:
            is_used = not leaving.isdisjoint((*task.inputs, *task.made.values()))
            task.once |= is_used and task.node is not None
        standing = Standing(state.parameter_of, state.expect)
        return cls(frozenset(found), state.settle, standing, state.tier.alignment_bytes)
