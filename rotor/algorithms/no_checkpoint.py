"""No recomputation, as in plain PyTorch.

``Fe_0 .. Fe_{n-1} L B_{n-1} .. B_0``: the fastest schedule of all, and the reference for the
overhead of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rotor.algorithms._candidates import CandidateAlgorithm
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain


class NoCheckpoint(CandidateAlgorithm):
    """Schedule that keeps everything; infeasible if that does not fit in the budget."""

    name: ClassVar[str] = "no_checkpoint"

    def schedules(self, chain: Chain) -> list[Callable[[], Sequence]]:
        """Return the one schedule without recomputation."""
        n = len(chain)
        forward = [("Fe", i) for i in range(n)]
        backward = [("B", i) for i in reversed(range(n))]
        return [lambda: Sequence([*forward, ("L", n), *backward], chain)]
