"""Proofs of steps that ranks run together: all of them find out, and all of them stop.

A value that came out otherwise on one rank must not end the backward of that rank alone, for the
others would wait for its collectives. So every rank runs its backward to the end, with what FSDP2
does there; then they show each other what differed, and put gradients and state back alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rotor import _fsdp, _torch
from rotor.checksums import Mismatch, Proved
from rotor.distributed import Ranks
from rotor.stage_proofs import CURE, StepProof, host_copy
from rotor.stages import Stage

__all__ = ["ShardedGradients", "ShardedProof", "found_together"]


class ShardedGradients:
    """The gradients of a sharded model, outside of what its device counts.

    Parameters
    ----------
    sharded
        Parameters that FSDP2 gathers.
    plain
        The others.
    """

    def __init__(
        self, sharded: Sequence[_fsdp.ShardedParameter], plain: Sequence[nn.Parameter]
    ) -> None:
        with torch.no_grad():
            self._sharded = [(p, found := p.gradients(), _copies(found)) for p in sharded]
            self._plain = [(p, p.grad, _copies([p.grad])) for p in plain]

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for parameter, gradients, copies in self._sharded:
                _write(gradients, copies)
                parameter.put_gradients(gradients)
            for plain, gradient, copies in self._plain:
                _write([gradient], copies)
                plain.grad = gradient


def _copies(gradients: Sequence[Any]) -> list[torch.Tensor | None]:
    return [None if g is None else host_copy(_fsdp.local(g)) for g in gradients]


def _write(gradients: Sequence[Any], copies: Sequence[torch.Tensor | None]) -> None:
    for gradient, copy in zip(gradients, copies, strict=True):
        if copy is not None:
            _fsdp.local(gradient).copy_(copy)


def found_together(ranks: Ranks, own: Sequence[Any]) -> tuple[list[Any], str]:
    """Return what was found on any rank, and which ranks it was, as a sentence.

    A collective operation; what was found is sent only where there is something.

    Parameters
    ----------
    ranks
        Those who run the step.
    own
        What was found on this one; the rank's own comes after that of ranks before it.
    """
    counts = [count for (count,) in ranks.exchange_ints(len(own))]
    if not any(counts):
        return [], ""
    found = [item for items in ranks.exchange(list(own)) for item in items]
    where = ", ".join(str(rank) for rank, count in enumerate(counts) if count)
    return found, f"Found on rank {where} of {ranks.size}; every rank stops the step"


class ShardedProof(StepProof):
    """The comparisons of one step of a sharded chain, the same on all ranks.

    Parameters
    ----------
    stages, proved, failed
        As of `StepProof`.
    ranks
        Those who run the step.
    keep
        Copies the gradients that exist now.
    """

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
        """Nothing: the run tells when its backward begins."""

    def begin(self) -> None:
        """Copy the gradients that exist when the backward begins."""
        self._kept = self._keep()

    def settle(self) -> None:
        """Read all comparisons when the whole backward is over, and what FSDP2 does at its end."""
        _torch.check_after_backward(self._settle_together)

    def _settle_together(self) -> None:
        values = self._proof.compared
        found: list[Mismatch]
        found, where = found_together(self._ranks, self._proof.finish())
        if found:
            once = {mismatch.site: mismatch for mismatch in reversed(found)}
            self._refuse(list(once.values()), f"{where}. {CURE}")
        self._passed(values)
        self._kept = None

    def _restore(self) -> None:
        super()._restore()
        if self._kept is not None:
            self._kept.restore()
