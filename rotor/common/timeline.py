"""Live bytes along a step: as a meter saw them, and as a plan predicts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_POINTS", "PredictedTimeline", "Timeline", "thinned", "timeline_of"]

MOST_POINTS = 4000
"""A timeline of more moments is thinned to at most so many."""

_NS = 1e9


@dataclass(frozen=True, eq=False)
class Timeline:
    """Live bytes as they were measured: a step function of time.

    Attributes
    ----------
    seconds
        Moments since the start, ascending, float64 [k].
    live_bytes
        What is allocated from each of them to the next, above the level at the start, int64 [k].
    allocated_bytes
        What was given out from the start to then, freed or not, int64 [k].
    marks
        The names that were given to moments, with these, in order.
    """

    seconds: npt.NDArray[np.float64]
    live_bytes: npt.NDArray[np.int64]
    allocated_bytes: npt.NDArray[np.int64]
    marks: tuple[tuple[str, float], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most of them."""
        return int(self.live_bytes.max())

    def __len__(self) -> int:
        """Number of moments."""
        return len(self.seconds)

    def on_clock_of(self, predicted: PredictedTimeline) -> npt.NDArray[np.float64]:
        """The moments of a measured step on the clock of its prediction.

        Forward, loss and backward are each stretched to the length that was predicted: a metered
        step is slower than others, and the caller's loss takes a time that no plan knows. Where
        the plan knows what each operation allocates, the bytes given out so far tell how far the
        step has come; else the time does.

        Parameters
        ----------
        predicted
            Of the plan of the step, which has the marks "loss" (the forward ended) and "backward".

        Returns
        -------
        ndarray
            Seconds, float64 [moments].
        """
        marks = dict(self.marks)
        end = float(self.seconds[-1])
        begin = marks.get("backward", end)
        measured = [0.0, min(marks.get("loss", begin), begin), begin, end]
        known = [0.0, predicted.forward_end, predicted.backward_begin, predicted.seconds[-1]]
        moments: npt.NDArray[np.float64]
        if predicted.allocated_bytes is None:
            moments = np.interp(self.seconds, measured, known)
            return moments
        given = np.interp(measured, self.seconds, self.allocated_bytes)
        planned = np.interp(known, predicted.seconds, predicted.allocated_bytes)
        progress = np.interp(self.allocated_bytes, given, planned)
        moments = np.interp(progress, predicted.allocated_bytes, predicted.seconds)
        return moments


@dataclass(frozen=True, eq=False)
class PredictedTimeline:
    """Live bytes as a plan predicts them, above the level at which the step begins.

    Attributes
    ----------
    seconds
        When each run of an operation begins, and the end of the last, float64 [k + 1].
    live_bytes
        The most that is live while it runs, int64 [k].
    forward_end, backward_begin
        Seconds at which the forward ends, and at which the backward begins.
    allocated_bytes
        What was given out when each run begins, and at the end, int64 [k + 1]; ``None`` where that
        is not known.
    """

    seconds: npt.NDArray[np.float64]
    live_bytes: npt.NDArray[np.int64]
    forward_end: float
    backward_begin: float
    allocated_bytes: npt.NDArray[np.int64] | None = None

    @classmethod
    def of_runs(
        cls,
        cost_ns: npt.ArrayLike,
        live_bytes: npt.ArrayLike,
        loss: int,
        new_bytes: npt.ArrayLike | None = None,
    ) -> PredictedTimeline:
        """The timeline of runs one after the other.

        Parameters
        ----------
        cost_ns
            Nanoseconds of each run, [k].
        live_bytes
            Live while it runs, [k].
        loss
            Which of them is the loss.
        new_bytes
            What each allocates, [k], where that is known.
        """
        seconds = np.concatenate([[0.0], np.cumsum(np.asarray(cost_ns, dtype=np.float64))]) / _NS
        live = np.asarray(live_bytes, dtype=np.int64)
        allocated = None
        if new_bytes is not None:
            allocated = np.concatenate([[0], np.cumsum(np.asarray(new_bytes, dtype=np.int64))])
        return cls(seconds, live, float(seconds[loss]), float(seconds[loss + 1]), allocated)


def timeline_of(
    moments: Sequence[tuple[int, int, int]], marks: Sequence[tuple[str, int]]
) -> Timeline:
    """The timeline of levels, thinned; its first moment is zero.

    Parameters
    ----------
    moments
        Nanoseconds, level from then on, bytes given out until then: in order, at least one.
    marks
        Pairs (name, nanoseconds); their moments are kept.
    """
    times, levels, allocated = np.array(moments, dtype=np.int64).T
    kept = thinned(levels, max(MOST_POINTS - len(marks), MOST_POINTS // 2))
    marked = np.searchsorted(times, [ns for _, ns in marks])
    kept = np.union1d(kept, marked[marked < len(times)]).astype(np.intp)
    return Timeline(
        (times[kept] - times[0]) / _NS,
        levels[kept],
        allocated[kept],
        tuple((name, (ns - int(times[0])) / _NS) for name, ns in marks),
    )


def thinned(levels: npt.NDArray[np.int64], most: int = MOST_POINTS) -> npt.NDArray[np.intp]:
    """Which of a timeline's moments to keep: at most `most`, highs and lows of every stretch.

    Parameters
    ----------
    levels
        Levels in the order of time, [k].
    most
        How many are kept, at least 4; the first and the last are among them, and the highest.
    """
    if len(levels) <= most:
        return np.arange(len(levels))
    kept = {0, len(levels) - 1}
    for stretch in np.array_split(np.arange(len(levels)), most // 2 - 1):
        part = levels[stretch]
        kept.update((int(stretch[part.argmax()]), int(stretch[part.argmin()])))
    return np.array(sorted(kept))
