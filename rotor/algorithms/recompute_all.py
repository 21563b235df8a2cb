"""Recomputation of everything from the chain's input, for each backward again.

``Fck_0 Fn_1 .. Fn_{i-1} Fe_i B_i`` for i = n-1 .. 0, with the loss between the first ``Fe`` and
``B``. No activation but the chain's input outlives its next forward, so that no schedule holds
fewer activations; the time is quadratic, n (n - 1) / 2 forwards more than without recomputation.
It is Revolve's schedule without checkpoints (Griewank and Walther, Algorithm 799, 2000).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rotor.algorithms._candidates import CandidateAlgorithm
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain


class RecomputeAll(CandidateAlgorithm):
    """Schedule that keeps the chain's input alone; infeasible if one stage at a time is too large.

    Notes
    -----
    Least in activations held, not always in peak: where a stage's temporaries dwarf activations, a
    schedule that runs that stage once, early, with little else in memory, can need less.
    """

    name: ClassVar[str] = "recompute_all"

    def schedules(self, chain: Chain) -> list[Callable[[], Sequence]]:
        """Return the one schedule that keeps the chain's input alone."""
        n = len(chain)
        ops: list[tuple[str, int]] = []
        for i in reversed(range(n)):
            ops += [("Fck" if k == 0 else "Fn", k) for k in range(i)]
            ops.append(("Fe", i))
            if i == n - 1:
                ops.append(("L", n))
            ops.append(("B", i))
        return [lambda: Sequence(ops, chain)]
