"""Algorithms that have few schedules of a chain: price them all, take the fastest that fits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import DynamicAlgorithm, Progress, infeasible, parse_budget
from rotor.chain import Chain


class CandidateAlgorithm(DynamicAlgorithm):
    """A `DynamicAlgorithm` over a list of schedules that does not depend on the budget."""

    @abstractmethod
    def candidates(self, chain: Chain) -> Iterator[Sequence]:
        """All schedules that the algorithm has of a chain, priced on it."""

    @abstractmethod
    def count(self, chain: Chain) -> int:
        """How many candidates there are."""

    def solve(
        self,
        chain: Chain,
        budget_bytes: int | str,
        *,
        mem_slots: int | None = None,
        progress: Progress | None = None,
    ) -> Sequence:
        """The fastest of the candidates that fit; of equals the one of least memory.

        See Also
        --------
        rotor.algorithms.utils.DynamicAlgorithm.solve : Parameters and errors.
        """
        budget = parse_budget(budget_bytes)
        best: Sequence | None = None
        minimum = None
        total = self.count(chain)
        for done, sequence in enumerate(self.candidates(chain), start=1):
            peak = sequence.peak_bytes
            minimum = peak if minimum is None else min(minimum, peak)
            if peak <= budget and (
                best is None or (sequence.makespan, peak) < (best.makespan, best.peak_bytes)
            ):
                best = sequence
            if progress is not None:
                progress(done, total)
        assert minimum is not None
        if best is None:
            raise infeasible(type(self).__name__, budget, minimum)
        return best

    def curve(self, chain: Chain, *, progress: Progress | None = None) -> Curve:
        """Peak and time of the candidates that no other one beats."""
        points = []
        total = self.count(chain)
        for done, sequence in enumerate(self.candidates(chain), start=1):
            points.append((sequence.peak_bytes, sequence.makespan))
            if progress is not None:
                progress(done, total)
        return Curve.from_points(points)
