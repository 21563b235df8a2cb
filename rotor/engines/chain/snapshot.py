"""Snapshots of the state in which a stage begins, for equal numbers in a recomputation.

Random number generators are set back and restored afterwards; buffers that the first forward
changed (the running statistics of BatchNorm, the vectors of spectral norm) are replaced by copies
of their former values, so that the real ones are updated exactly once.
"""

from __future__ import annotations

from typing import Any

import torch

from rotor._pytorch import core
from rotor.common.generators import RngTracker
from rotor.common.places import Saved
from rotor.engines.chain.stages import Stage

__all__ = ["Snapshot"]


class Snapshot:
    """State in which the first forward of a stage began, for its recomputations.

    Parameters
    ----------
    stage
        Stage that is about to run for the first time.
    rng
        Reader of random states, ``None`` if they are not to be preserved.
    """

    __slots__ = (
        "_buffers",
        "_parameters",
        "_rng",
        "_stage",
        "_state",
        "_states",
        "_versions",
        "_watched",
    )

    def __init__(self, stage: Stage, rng: RngTracker | None) -> None:
        self._stage = stage
        self._parameters = stage.current_parameters()
        self._versions = [-1 if p is None else p._version for p in self._parameters]
        self._rng = rng
        self._states = None if rng is None else rng.latest or rng.read()
        self._watched: list[tuple[core.Slot, torch.Tensor, int]] = []
        self._buffers: list[tuple[core.Slot, torch.Tensor]] = []
        self._state = Saved(stage.state)
        if stage.buffers:
            self._copy_buffers(stage)

    def _copy_buffers(self, stage: Stage) -> None:
        self._watched = [
            (slot, buffer, buffer._version)
            for slot in stage.buffers
            if (buffer := slot[0][slot[1]]) is not None
        ]
        mutable = stage.buffers if stage.mutable_buffers is None else stage.mutable_buffers
        self._buffers = [
            (slot, buffer.detach().clone())
            for slot in mutable
            if (buffer := slot[0][slot[1]]) is not None
        ]

    def finish(self) -> None:
        """End the first forward: keep only the state that it changed.

        Raises
        ------
        RuntimeError
            The stage changed a buffer of which no copy was made.
        """
        states, rng = self._states, self._rng
        if states is not None and rng is not None and not rng.drawn_since(states):
            self._states = None
        if not self._watched:
            return
        # Kernels such as native_batch_norm change buffers without a trace in their versions.
        if self._stage.mutable_buffers is None:
            self._buffers = [
                (slot, copy)
                for slot, copy in self._buffers
                if not torch.equal(copy, slot[0][slot[1]])
            ]
        else:
            self._check_watched()
        self._watched = []

    def _check_watched(self) -> None:
        copied = {_key(slot) for slot, _ in self._buffers}
        for slot, buffer, version in self._watched:
            same = slot[0][slot[1]] is buffer and buffer._version == version
            if not same and _key(slot) not in copied:
                raise RuntimeError(
                    f"stage {self._stage.name} changed its buffer {slot[1]!r}, which it did not "
                    "do when it was measured, so recomputing it would change it twice: call "
                    "measure() again with the model as it is now"
                )

    def recompute(self, x: Any, *, last: bool) -> Any:
        """Run the stage again as the first time; the `last` run may use up the copies."""
        self._check_parameters()
        if not self._buffers and not self._state and self._states is None:
            return self._stage(x)
        saved = None
        current = self._state.current()
        replaced = [slots[name] for (slots, name), _ in self._buffers]
        try:
            if self._states is not None and self._rng is not None:
                saved = self._rng.read()
                self._rng.write(self._states)
            for (slots, name), copy in self._buffers:
                slots[name] = copy if last else copy.clone()
            self._state.put(last=last)
            return self._stage(x)
        finally:
            for ((slots, name), _), buffer in zip(self._buffers, replaced, strict=True):
                slots[name] = buffer
            for place, value in current:
                place.put(value)
            if saved is not None and self._rng is not None:
                self._rng.write(saved)

    def _check_parameters(self) -> None:
        for now, then, version in zip(
            self._stage.current_parameters(), self._parameters, self._versions, strict=True
        ):
            if now is not then or (now is not None and now._version != version):
                raise RuntimeError(
                    f"the parameters of stage {self._stage.name} were changed or replaced "
                    "between its forward and its recomputation in the backward, which would give "
                    "wrong gradients: step the optimizer, or swap parameters, after the backward"
                )


def _key(slot: core.Slot) -> tuple[int, str]:
    return id(slot[0]), slot[1]
