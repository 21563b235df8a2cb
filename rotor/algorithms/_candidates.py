"""Algorithms that have few schedules of a chain: price them all, take the fastest that fits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import BuiltInAlgorithm, ProgressCallback, infeasible
from rotor.chain import Chain
from rotor.errors import InvalidSequenceError


class CandidateAlgorithm(BuiltInAlgorithm):
    """A `DynamicAlgorithm` over a list of schedules that does not depend on the budget."""

    @abstractmethod
    def schedules(self, chain: Chain) -> list[Callable[[], Sequence]]:
        """Return functions that make and price the schedules that the algorithm has of a chain."""

    def candidates(
        self, chain: Chain, progress: ProgressCallback | None = None
    ) -> Iterator[Sequence]:
        """Yield the schedules of a chain, but for those that repeat what may run only once."""
        schedules = self.schedules(chain)
        found = False
        for done, make in enumerate(schedules, start=1):
            try:
                sequence = make()
            except InvalidSequenceError:
                if not any(chain.once):
                    raise
            else:
                found = True
                yield sequence
            if progress is not None:
                progress(done, len(schedules))
        if not found:
            raise self._runs_again(chain)

    def _best(
        self, chain: Chain, budget: int, mem_slots: int | None, progress: ProgressCallback | None
    ) -> Sequence:
        """Return the fastest of the candidates that fit; of equals the one of least memory."""
        best: Sequence | None = None
        peaks = []
        for sequence in self.candidates(chain, progress):
            peak = sequence.peak_bytes
            peaks.append(peak)
            if peak <= budget and (
                best is None or (sequence.makespan, peak) < (best.makespan, best.peak_bytes)
            ):
                best = sequence
        if best is None:
            raise infeasible(type(self).__name__, budget, min(peaks))
        return best

    def curve(self, chain: Chain, *, progress: ProgressCallback | None = None) -> Curve:
        """Return peak and time of the candidates that no other one beats."""
        found = self.candidates(chain, progress)
        return Curve.from_points((one.peak_bytes, one.makespan) for one in found)

    def _runs_again(self, chain: Chain) -> ValueError:
        stages = [i for i, flag in enumerate(chain.once) if flag]
        names = [str(i) if chain.names is None else chain.names[i] for i in stages]
        return ValueError(
            f"{type(self).__name__} has no schedule of this chain: all of them run stage "
            f"{', '.join(names)} again, which may run only once. Use Persistent"
        )
