"""No recomputation: what plain PyTorch does.

``Fe_0 .. Fe_{n-1} L B_{n-1} .. B_0``: the fastest schedule that there is, and the reference for the
overhead of all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rotor.algorithms._candidates import CandidateAlgorithm
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain


class NoCheckpoint(CandidateAlgorithm):
    """Keeps everything; infeasible where that does not fit in the budget."""

    name: ClassVar[str] = "no_checkpoint"

    def candidates(self, chain: Chain) -> Iterator[Sequence]:
        """The one schedule without recomputation."""
        n = len(chain)
        forward = [("Fe", i) for i in range(n)]
        backward = [("B", i) for i in reversed(range(n))]
        yield Sequence([*forward, ("L", n), *backward], chain)

    def count(self, chain: Chain) -> int:
        """One."""
        return 1
