"""Proofs of steps that ranks run together: a difference on one stops all of them.

A difference on one rank must not end the backward of that rank alone: the other ranks would wait
for its collectives. So every rank runs its backward to the end, FSDP2's part included;
then the ranks exchange the differences, and restore gradients and state alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, fsdp
from rotor.common.checksums import Mismatch, Proved
from rotor.common.ranks import Ranks
from rotor.engines.chain.proofs import CURE, StepProof, host_copy
from rotor.engines.chain.stages import Stage

__all__ = ["ShardedGradients", "ShardedProof", "found_together"]


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
