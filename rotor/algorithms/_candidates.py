"""Algorithms that have few schedules of a chain: price them all, take the fastest that fits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import DynamicAlgorithm, ProgressCallback, infeasible, parse_budget
from rotor.chain import Chain
from rotor.errors import InvalidSequenceError


class CandidateAlgorithm(DynamicAlgorithm):
    """A `DynamicAlgorithm` over a list of schedules that does not depend on the budget."""

    @abstractmethod
    def candidates(self, chain: Chain) -> Iterator[Sequence]:
        """Return the schedules that the algorithm has of a chain, priced on it; see `permitted`."""

    @abstractmethod
    def count(self, chain: Chain) -> int:
        """Return the number of candidates."""

    def solve(
        self,
        chain: Chain,
        budget_bytes: int | str,
        *,
        mem_slots: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> Sequence:
        """Return the fastest of the candidates that fit; of equals the one of least memory.

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
        if minimum is None:
            raise self._runs_again(chain)
        if best is None:
            raise infeasible(type(self).__name__, budget, minimum)
        return best

    def curve(self, chain: Chain, *, progress: ProgressCallback | None = None) -> Curve:
        """Return peak and time of the candidates that no other one beats."""
        points = []
        total = self.count(chain)
        for done, sequence in enumerate(self.candidates(chain), start=1):
            points.append((sequence.peak_bytes, sequence.makespan))
            if progress is not None:
                progress(done, total)
        if not points:
            raise self._runs_again(chain)
        return Curve.from_points(points)

    def _runs_again(self, chain: Chain) -> ValueError:
        stages = [i for i, flag in enumerate(chain.once) if flag]
        names = [str(i) if chain.names is None else chain.names[i] for i in stages]
        return ValueError(
            f"{type(self).__name__} has no schedule of this chain: all of them run stage "
            f"{', '.join(names)} again, which may run only once. Use Persistent"
        )


def permitted(make: Callable[[], Sequence], chain: Chain) -> Iterator[Sequence]:
    """Yield the schedule that `make` prices, unless it repeats a stage that may run only once."""
    try:
        sequence = make()
    except InvalidSequenceError:
        if not any(chain.once):
            raise
        return
    yield sequence
