"""Segments: the periodic checkpoints of Chen, Xu, Zhang, Guestrin.

The chain is cut in segments of equal numbers of stages. The forward pass keeps the input of each
segment, and everything of the last one; the backward pass runs each segment again, keeping all,
and then backward. This is what ``torch.utils.checkpoint_sequential`` does; sqrt(n) segments bound
the memory of n equal stages by O(sqrt(n)) for one more forward pass.

References
----------
.. [1] T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost",
   arXiv:1604.06174, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np

from rotor.algorithms._candidates import CandidateAlgorithm
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain


class ChenSqrt(CandidateAlgorithm):
    """Segments of equal length, each recomputed once.

    Parameters
    ----------
    segments
        How many: a number (at most the number of stages is used), "sqrt" for the published
        ``round(sqrt(n))``, or None for the number, 1 to n, that is fastest within the budget.

    Raises
    ------
    ValueError
        A number of segments below 1, or another word than "sqrt".

    Notes
    -----
    Blind to sizes and times when it places the segments; the number of segments alone is chosen by
    the simulator. One segment is no recomputation.
    """

    name: ClassVar[str] = "chen_sqrt"

    def __init__(self, segments: int | str | None = None) -> None:
        if isinstance(segments, str):
            if segments != "sqrt":
                raise ValueError(f'segments must be a number, "sqrt" or None, got {segments!r}')
        elif segments is not None and (
            isinstance(segments, bool) or not isinstance(segments, int | np.integer) or segments < 1
        ):
            raise ValueError(f"segments must be at least 1, got {segments!r}")
        self.segments = int(segments) if isinstance(segments, np.integer) else segments

    def schedules(self, chain: Chain) -> list[Callable[[], Sequence]]:
        """Return a schedule for each allowed number of segments."""
        n, given = len(chain), self.segments
        wanted = round(math.sqrt(n)) if isinstance(given, str) else given
        numbers = range(1, n + 1) if wanted is None else [min(wanted, n)]
        return [partial(segment_sequence, chain, segments) for segments in numbers]

    def __repr__(self) -> str:
        return f"ChenSqrt(segments={self.segments!r})"


def segment_sequence(chain: Chain, segments: int) -> Sequence:
    """Return the schedule of a number of segments whose lengths differ by one at most.

    Raise ValueError if `segments` is below one or above the number of stages of `chain`.
    """
    n = len(chain)
    if not 1 <= segments <= n:
        raise ValueError(f"segments must be between 1 and the {n} stages, got {segments}")
    bounds = [g * n // segments for g in range(segments + 1)]
    ops: list[tuple[str, int]] = []
    for first, end in pairwise(bounds[:-1]):
        ops += [("Fck" if i == first else "Fn", i) for i in range(first, end)]
    for g in reversed(range(segments)):
        stages = range(bounds[g], bounds[g + 1])
        ops += [("Fe", i) for i in stages]
        if g == segments - 1:
            ops.append(("L", n))
        ops += [("B", i) for i in reversed(stages)]
    return Sequence(ops, chain)
