"""State in which a stage begins, for equal numbers in a recomputation, and proofs of these.

Random number generators are set back and restored afterwards; buffers that the first forward
changed (the running statistics of BatchNorm, the vectors of spectral norm) are replaced by copies
of their former values, so that the real ones are updated exactly once. Parameters that the forward
writes to get their former values, and are written to again. Other state that the stage depends on
is put back where it was replaced; where it was written to, the backward is refused.

A verified step compares recomputed outputs of stages with the first ones. After a difference it
puts back what it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor._pytorch.backwards import versions_set
from rotor.common.checksums import Proved
from rotor.common.modes import RngTracker
from rotor.common.places import Saved, tensors_in
from rotor.engines.chain.stages import Stage
from rotor.engines.proofs import Origins, PutBack, StepProof, buffers_before, gradients_before
from rotor.errors import RecomputationError


class Snapshot:
    """State in which a stage's first forward began, with random states if there is an `rng`."""

    __slots__ = (
        "_buffers",
        "_own",
        "_record",
        "_rng",
        "_sharded",
        "_stage",
        "_state",
        "_states",
        "_versions",
        "_written",
    )

    def __init__(self, stage: Stage, rng: RngTracker | None) -> None:
        self._stage = stage
        self._record = stage.record()
        self._sharded = [(p, p._version) for p in stage.sharded_parameters()]
        self._rng = rng
        self._states = None if rng is None else rng.latest or rng.read()
        self._buffers: list[tuple[core.Slot, torch.Tensor]] = []
        self._state = Saved(stage.state)
        self._own = {id(t) for p in stage.state if p.in_place for t in tensors_in(p.get())}
        mutable = stage.buffers if stage.mutable_buffers is None else stage.mutable_buffers
        for slot in mutable:
            if (buffer := slot[0][slot[1]]) is not None:
                self._buffers.append((slot, buffer.detach().clone()))
                self._own.add(id(buffer))
        self._written: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._versions: list[int] = []
        if stage.written:
            parameters = [slots[name] for slots, name in stage.written]
            self._own.update(map(id, parameters))
            self._written = [(p, p.detach().clone(), p._version) for p in parameters]

    def finish(self) -> None:
        """Keep the state that the forward changed; raise RecomputationError if some has no copy."""
        states, rng = self._states, self._rng
        if states is not None and rng is not None and not rng.drawn_since(states):
            self._states = None
        self._versions = [p._version for p, _, _ in self._written]
        if written := self._foreign():
            self._stage.note_written(written)
            raise RecomputationError(
                f"{self._record.name_of(written[0])} was written to in the forward of stage "
                f"{self._stage.name}, which it was not when the stage was measured, and "
                "recomputing the stage would write twice: run the step again, which from now on "
                "keeps a copy of it",
                self._stage.name,
            )
        # Kernels such as native_batch_norm change buffers without a trace in their versions.
        if self._stage.mutable_buffers is None:
            self._buffers = [
                (slot, copy)
                for slot, copy in self._buffers
                if not torch.equal(copy, slot[0][slot[1]])
            ]

    def _foreign(self) -> list[torch.Tensor]:
        """Return the tensors written to that the stage is not known to write to itself."""
        found = [tensor for tensor in self._record.written() if id(tensor) not in self._own]
        others = self._stage.others() if found else ()
        return [tensor for tensor in found if id(tensor) not in others]

    def check(self) -> None:
        """Raise RecomputationError if what a recomputation depends on was written to meanwhile."""
        found = self._foreign()
        written = zip(self._written, self._versions, strict=True)
        found += [p for (p, *_), then in written if p._version != then]
        name = self._record.name_of(found[0]) if found else ""
        if not found and self._sharded:
            now = self._stage.sharded_parameters()
            pairs = zip(now, self._sharded, strict=True)
            if any(p is not then or p._version != version for p, (then, version) in pairs):
                name = "a parameter"
        if name:
            raise RecomputationError(
                f"{name} was changed or replaced between the forward of stage "
                f"{self._stage.name} and its recomputation in the backward, which would give "
                "wrong gradients: step the optimizer, or write to tensors, after the backward",
                self._stage.name,
            )

    def recompute(self, x: Any, *, last: bool) -> Any:
        """Run the stage again as the first time; the `last` run may use up the copies."""
        self.check()
        kept = {place.identity for place in self._stage.state}
        kept.update([_key(slot) for slot, _ in self._buffers])
        with self._record.put_back(kept), self._parameters_as_before():
            if not self._buffers and not self._state and self._states is None:
                return self._stage(x)
            return self._run(x, last)

    def _run(self, x: Any, last: bool) -> Any:
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

    @contextmanager
    def _parameters_as_before(self) -> Iterator[None]:
        """Give parameters that the stage writes to the values from before its first forward."""
        after = [(p, p.detach().clone()) for p, _, _ in self._written]
        try:
            for parameter, before, _ in self._written:
                parameter.data.copy_(before)
            with versions_set([(p, version) for p, _, version in self._written]):
                yield
        except BaseException:
            for parameter, value in after:
                parameter.data.copy_(value)
            raise


def _key(slot: core.Slot) -> tuple[int, str]:
    return id(slot[0]), slot[1]


CURE = (
    "Run the step again: from now on this stage is run once, and what it makes is kept. Or mend "
    "it: draw from PyTorch's generators, keep state in buffers, use "
    "torch.use_deterministic_algorithms(True)"
)
"""Advice to users on a stage that does not repeat."""


class StageOrigins(Origins):
    """Stages; `failed` is called with the indices of those that gave other bits."""

    cure = CURE

    def __init__(self, stages: Sequence[Stage], failed: Callable[[list[int]], object]) -> None:
        self._stages = stages
        self._failed = failed

    def roots(self, sites: Collection[int]) -> list[int]:
        """Return the stages before each of which no other one differed."""
        return sorted(i for i in sites if i - 1 not in sites)

    def named(self, site: int) -> tuple[str, str]:
        """Return the types of a stage's functions, and its name."""
        stage = self._stages[site]
        return " and ".join(type(function).__name__ for function in stage.functions), stage.name

    def keep(self, sites: Sequence[int]) -> None:
        """Have stages run once from now on."""
        self._failed(list(sites))


def python_before(stages: Iterable[Stage]) -> PutBack:
    """Return the function that puts the stages' state beside buffers back."""
    places = {place.identity: place for stage in stages for place in stage.state}
    return partial(Saved(places.values()).put, last=True)


def stages_before(stages: Sequence[Stage]) -> list[PutBack]:
    """Return the functions that put the stages' buffers and other state back."""
    slots = [
        slot
        for stage in stages
        for slot in (stage.buffers if stage.mutable_buffers is None else stage.mutable_buffers)
        if slot[0][slot[1]] is not None
    ]
    buffers = [values[name] for values, name in slots]

    def put_back() -> None:
        for (values, name), buffer in zip(slots, buffers, strict=True):
            values[name] = buffer

    return [buffers_before(buffers, torch.Tensor.clone), put_back, python_before(stages)]


class ChainProof(StepProof):
    """Verified step of a chain, which puts the gradients back with which its backward began."""

    def __init__(
        self, proved: Proved, stages: Sequence[Stage], parameters: Iterable[nn.Parameter]
    ) -> None:
        super().__init__(proved, stages_before(stages))
        self._parameters = list(parameters)
        self._is_in_backward = False

    def begin_backward(self, gradients: Any) -> None:
        """Copy the gradients that the backward adds to."""
        if not self._is_in_backward and any(gradient is not None for gradient in gradients):
            self._is_in_backward = True
            self.undo.append(gradients_before(self._parameters))
