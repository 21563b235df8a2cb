"""Revolve: the checkpoints of algorithmic differentiation, for stages taken as equal.

Optimal in the number of forwards for a number of checkpoints when all stages are alike and what
a stage keeps for its backward is too large to keep for two stages at once.

References
----------
.. [1] A. Griewank, A. Walther, "Algorithm 799: Revolve: An Implementation of Checkpointing for the
   Reverse or Adjoint Mode of Computational Differentiation", ACM TOMS 26(1), 2000.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np

from rotor import _core
from rotor.algorithms._candidates import CandidateAlgorithm
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import priced
from rotor.chain import Chain


class Griewank(CandidateAlgorithm):
    """Revolve on as many checkpoints as the budget allows.

    The schedule is made as if all stages were equal. The simulator, which knows the true sizes,
    finds the numbers of checkpoints that fit. If the stages are really equal, the largest number
    that fits is the fastest, and is taken; otherwise the fastest number that fits.

    Parameters
    ----------
    checkpoints
        A number of checkpoints beside the chain's input, or None for any.

    Raises
    ------
    ValueError
        `checkpoints` is negative or no whole number.

    Notes
    -----
    O(n r) operations per schedule, with r the most that a stage is run again; n schedules.
    """

    name: ClassVar[str] = "griewank"

    def __init__(self, checkpoints: int | None = None) -> None:
        if checkpoints is not None and (
            isinstance(checkpoints, bool)
            or not isinstance(checkpoints, int | np.integer)
            or checkpoints < 0
        ):
            raise ValueError(f"checkpoints must be a number of at least 0, got {checkpoints!r}")
        self.checkpoints = None if checkpoints is None else int(checkpoints)

    def schedules(self, chain: Chain) -> list[Callable[[], Sequence]]:
        """Return Revolve's schedule for each allowed number of checkpoints."""
        n = len(chain)
        numbers = range(n) if self.checkpoints is None else [min(self.checkpoints, n - 1)]
        return [partial(revolve_sequence, chain, checkpoints) for checkpoints in numbers]

    def __repr__(self) -> str:
        return f"Griewank(checkpoints={self.checkpoints!r})"


def revolve_sequence(chain: Chain, checkpoints: int) -> Sequence:
    """Return Revolve's schedule of a chain with 0 or more checkpoints beside its input."""
    return priced(_core.revolve(len(chain), checkpoints), chain)
