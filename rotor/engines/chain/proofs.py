"""Proof of a step of a chain: recomputed outputs of stages against the first ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor.common.checksums import Proved
from rotor.common.places import Saved
from rotor.engines.chain.stages import Stage
from rotor.engines.proofs import Origins, PutBack, StepProof, buffers_before
from rotor.meter import allocator as memory

CURE = (
    "Run the step again: from now on this stage is run once, and what it makes is kept. Or mend "
    "it: draw from PyTorch's generators, keep state in buffers, use "
    "torch.use_deterministic_algorithms(True)"
)
"""Advice to users on a stage that does not repeat."""

_ADDED = (
    ". Gradients that existed before the step did not fit in the limit a second time, so that a "
    "part of this step is added to them: call zero_grad() first"
)


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
    """Verified step of a chain, which puts gradients back if their copies fit in `room_bytes`."""

    def __init__(
        self,
        proved: Proved,
        stages: Sequence[Stage],
        parameters: Iterable[nn.Parameter],
        room_bytes: int,
    ) -> None:
        super().__init__(proved, stages_before(stages))
        parameters = list(parameters)
        existing = [p.grad for p in parameters if p.grad is not None]
        has_room = memory.storage_bytes(existing) <= room_bytes
        self._is_in_backward = False
        self._gradients: list[tuple[nn.Parameter, Any, int, Any]] = []
        for parameter in parameters:
            gradient: Any = parameter.grad
            copy = gradient.detach().clone() if gradient is not None and has_room else None
            self._gradients.append((parameter, gradient, getattr(gradient, "_version", 0), copy))

    def begin_backward(self, gradients: Any) -> None:
        """Note the current values of gradients that changed since the forward."""
        if self._is_in_backward or all(gradient is None for gradient in gradients):
            return
        self._is_in_backward = True
        for k, (parameter, gradient, version, copy) in enumerate(self._gradients):
            now: Any = parameter.grad
            is_same = now is gradient and getattr(now, "_version", 0) == version
            self._gradients[k] = parameter, now, version, copy if is_same else None
            if now is not None and self._gradients[k][3] is None:
                self.remark = _ADDED

    def restore(self) -> None:
        """Put the gradients back too."""
        super().restore()
        for parameter, gradient, _, copy in self._gradients:
            if copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient

    def forget(self) -> None:
        """Drop the copies of gradients too."""
        super().forget()
        self._gradients.clear()
