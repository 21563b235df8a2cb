"""Proof of a step of a chain: recomputed outputs of stages against the first ones.

Checksums are computed on the tensors' devices, and compared at the end of the backward. After a
difference, gradients, buffers and other state of the model are restored to before the step.

Where ranks run together, a difference on one must not end the backward of that rank alone: the
others would wait for its collectives. So every rank runs its backward to the end, FSDP2's part
included; then the ranks exchange the differences, and restore gradients and state alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, fsdp
from rotor.common.checksums import Mismatch, Proof, Proved, recomputation_error
from rotor.common.places import Place, Saved
from rotor.common.ranks import Ranks
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.chain.stages import Stage
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


_Gradient = tuple[nn.Parameter, Any, int, Any]


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in memory that no allocator of a device counts."""
    size = tensor.numel() * tensor.element_size()
    if tensor.layout != torch.strided or not size:
        return tensor.detach().clone()
    if tensor.device.type == "cpu":
        copied = torch.frombuffer(bytearray(size), dtype=tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor.detach())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)


class StageProof(ABC):
    """Comparisons of the outputs of stages that run again with those of their first runs."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.proof = Proof()

    def first(self, i: int, value: Any) -> None:
        """Note the output of stage i when it is computed for the first time."""
        for k, tensor in enumerate(tree_tensors(value)):
            self.proof.first((i, k), tensor)

    def again(self, i: int, value: Any) -> None:
        """Compare the recomputed output of stage i."""
        for k, tensor in enumerate(tree_tensors(value)):
            self.proof.again((i, k), tensor)

    @abstractmethod
    def settle(self) -> None:
        """Read all comparisons, at the end of a backward, or have them read."""

    def refusal(self, found: Sequence[Mismatch], cure: str) -> tuple[list[int], Exception]:
        """Return the first stages that differed, and the error, which ends with a cure."""
        differing: dict[int, Mismatch] = {}
        for mismatch in found:
            differing.setdefault(mismatch.site[0], mismatch)  # type: ignore[index]
        roots = sorted(i for i in differing if i - 1 not in differing)
        stage = self._stages[roots[0]]
        return roots, recomputation_error(
            " and ".join(type(function).__name__ for function in stage.functions),
            stage.name,
            differing[roots[0]],
            cure,
            others=len(found) - 1,
        )


class StepProof(StageProof):
    """Comparisons of one step, whose results go to `proved`.

    The gradients of `parameters` are restored after a difference, unless their copies would need
    more than `room_bytes`; `failed` is called with the indices of stages that gave other bits.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        proved: Proved,
        parameters: Iterable[nn.Parameter],
        room_bytes: int,
        failed: Callable[[list[int]], object],
    ) -> None:
        super().__init__(stages)
        self._proved = proved
        self._failed = failed
        self._has_begun = self._is_added = False
        self._gradients = self._copied_gradients(list(parameters), room_bytes)
        slots = [
            slot
            for stage in stages
            for slot in (stage.buffers if stage.mutable_buffers is None else stage.mutable_buffers)
        ]
        self._buffers = [
            (slot, buffer, buffer.detach().clone())
            for slot in slots
            if (buffer := slot[0][slot[1]]) is not None
        ]
        places: dict[Any, Place] = {p.identity: p for stage in stages for p in stage.state}
        self._state = Saved(places.values())

    def begin_with(self, output: Any) -> None:
        """Note the existing gradients when the backward of an output begins."""
        for tensor in tree_tensors(output):
            node: Any = tensor.grad_fn
            if node is not None:
                node.register_prehook(self._begin)

    @staticmethod
    def _copied_gradients(parameters: list[nn.Parameter], room_bytes: int) -> list[_Gradient]:
        existing = [p.grad for p in parameters if p.grad is not None]
        has_room = memory.storage_bytes(existing) <= room_bytes
        found = []
        for parameter in parameters:
            gradient: Any = parameter.grad
            copy = None
            if gradient is not None and has_room:
                copy = gradient.detach().clone()
            found.append((parameter, gradient, getattr(gradient, "_version", 0), copy))
        return found

    def _begin(self, gradients: Any) -> None:
        """Note the current values of gradients that changed since the forward."""
        if self._has_begun or all(gradient is None for gradient in gradients):
            return
        self._has_begun = True
        found: list[_Gradient] = []
        for parameter, gradient, version, copy in self._gradients:
            now: Any = parameter.grad
            is_same = now is gradient and getattr(now, "_version", 0) == version
            found.append((parameter, now, version, copy if is_same else None))
            self._is_added |= now is not None and found[-1][3] is None
        self._gradients = found

    def settle(self) -> None:
        """Read all comparisons; after a difference restore all and raise RecomputationError."""
        values = self.proof.compared
        found = self.proof.finish()
        if not found:
            self._passed(values)
            return
        self._refuse(found)

    def _passed(self, values: int) -> None:
        self._proved.add(values)
        self._gradients, self._buffers = [], []

    def _refuse(self, found: Sequence[Mismatch], cure: str = CURE) -> None:
        """Restore everything, and raise."""
        self._restore()
        roots, error = self.refusal(found, cure + (_ADDED if self._is_added else ""))
        self._failed(roots)
        raise error

    def _restore(self) -> None:
        with torch.no_grad():
            for parameter, gradient, _, copy in self._gradients:
                if copy is not None:
                    gradient.copy_(copy)
                parameter.grad = gradient
            for (slots, name), buffer, copy in self._buffers:
                buffer.copy_(copy)
                slots[name] = buffer
        self._state.put(last=True)


class ShardedGradients:
    """Gradients of a sharded model, stored outside of its device's memory."""

    def __init__(
        self, sharded: Sequence[fsdp.ShardedParameter], plain: Sequence[nn.Parameter]
    ) -> None:
        with torch.no_grad():
            self._sharded = [(p, found := p.gradients(), _copies(found)) for p in sharded]
            self._plain = [(p, p.grad, _copies([p.grad])) for p in plain]

    def restore(self) -> None:
        """Restore the gradients."""
        with torch.no_grad():
            for parameter, gradients, copies in self._sharded:
                _write(gradients, copies)
                parameter.put_gradients(gradients)
            for plain, gradient, copies in self._plain:
                _write([gradient], copies)
                plain.grad = gradient


def _copies(gradients: Sequence[Any]) -> list[torch.Tensor | None]:
    return [None if g is None else host_copy(fsdp.local(g)) for g in gradients]


def _write(gradients: Sequence[Any], copies: Sequence[torch.Tensor | None]) -> None:
    for gradient, copy in zip(gradients, copies, strict=True):
        if copy is not None:
            fsdp.local(gradient).copy_(copy)


def found_together(ranks: Ranks, own: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the differences of all ranks, in their order, and a sentence that names these ranks.

    This is a collective operation; differences are sent only if some exist.
    """
    counts = [count for (count,) in ranks.exchange_ints(len(own))]
    if not any(counts):
        return [], ""
    found = [item for items in ranks.exchange(list(own)) for item in items]
    where = ", ".join(str(rank) for rank, count in enumerate(counts) if count)
    return found, f"Found on rank {where} of {ranks.size}; every rank stops the step"


class ShardedProof(StepProof):
    """Comparisons of one step of a sharded chain, the same on all ranks."""

    def __init__(
        self,
        stages: Sequence[Stage],
        proved: Proved,
        failed: Callable[[list[int]], object],
        ranks: Ranks,
        keep: Callable[[], ShardedGradients],
    ) -> None:
        super().__init__(stages, proved, (), 0, failed)
        self._ranks = ranks
        self._keep = keep
        self._kept: ShardedGradients | None = None

    def begin_with(self, output: Any) -> None:
        """Do nothing: the run reports the start of its backward."""

    def begin(self) -> None:
        """Copy the existing gradients when the backward begins."""
        self._kept = self._keep()

    def settle(self) -> None:
        """Read all comparisons after the whole backward, FSDP2's last part included."""
        core.check_after_backward(self._settle_together)

    def _settle_together(self) -> None:
        values = self.proof.compared
        found: list[Mismatch]
        found, where = found_together(self._ranks, self.proof.finish())
        if found:
            once = {mismatch.site: mismatch for mismatch in reversed(found)}
            self._refuse(list(once.values()), f"{where}. {CURE}")
        self._passed(values)
        self._kept = None

    def _restore(self) -> None:
        super()._restore()
        if self._kept is not None:
            self._kept.restore()
