"""Live bytes along a step: measured by a meter, and predicted by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_POINTS", "PredictedTimeline", "Timeline", "thinned", "timeline_of"]

MOST_POINTS = 4000
"""Largest number of moments of a timeline; longer ones are thinned."""

_NS = 1e9


@dataclass(frozen=True, eq=False)
class Timeline:
    """Measured live bytes, a step function of time.

    Attributes
    ----------
    seconds
        Moments since the start, ascending, float64 [k].
    live_bytes
        Bytes allocated from each moment to the next, above the level at the start, int64 [k].
    allocated_bytes
        Bytes given out between the start and each moment, freed or not, int64 [k].
    marks
        Names of moments, each with its seconds, in order.
    """

    seconds: npt.NDArray[np.float64]
    live_bytes: npt.NDArray[np.int64]
    allocated_bytes: npt.NDArray[np.int64]
    marks: tuple[tuple[str, float], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Maximum of the live bytes."""
        return int(self.live_bytes.max())

    def __len__(self) -> int:
        """Return the number of moments."""
        return len(self.seconds)

    def on_clock_of(self, predicted: PredictedTimeline) -> npt.NDArray[np.float64]:
        """Return the moments of a measured step on the clock of its prediction.

        Forward, loss and backward are each stretched to their predicted length: a metered
        step is slower than others, and the time of the caller's loss is unknown to plans. If
        the plan knows what each operation allocates, the bytes given out so far measure the
        progress of the step; else its time does.

        Parameters
        ----------
        predicted
            Prediction of the step, with the marks "loss" (end of the forward) and "backward".

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
    """Live bytes predicted by a plan, above the level at which the step begins.

    Attributes
    ----------
    seconds
        Start of each run of an operation, and end of the last, float64 [k + 1].
    live_bytes
        Maximum of the live bytes during each run, int64 [k].
    forward_end, backward_begin
        Seconds at which the forward ends, and at which the backward begins.
    allocated_bytes
        Bytes given out before each run, and at the end, int64 [k + 1]; ``None`` if
        unknown.
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
        """Return the timeline of k consecutive runs, where `loss` is the index of the loss.

        Each array has a value for each run; `new_bytes` are the bytes that it allocates.
        """
        seconds = np.concatenate([[0.0], np.cumsum(np.asarray(cost_ns, dtype=np.float64))]) / _NS
        live = np.asarray(live_bytes, dtype=np.int64)
        allocated = None
        if new_bytes is not None:
            allocated = np.concatenate([[0], np.cumsum(np.asarray(new_bytes, dtype=np.int64))])
        return cls(seconds, live, float(seconds[loss]), float(seconds[loss + 1]), allocated)


def timeline_of(
    times: npt.NDArray[np.int64],
    levels: npt.NDArray[np.int64],
    allocated: npt.NDArray[np.int64],
    marks: Sequence[tuple[str, int]],
) -> Timeline:
    """Return the timeline of levels, thinned and starting at zero.

    `times` are in ns, `levels` follow them, and `allocated` are the bytes given out until then: [k]
    each, in order, at least one. The moments of `marks`, (name, ns), are kept.
    """
    is_kept = np.zeros(len(times), dtype=np.bool_)
    is_kept[thinned(levels, max(MOST_POINTS - len(marks), MOST_POINTS // 2))] = True
    marked = np.searchsorted(times, [ns for _, ns in marks])
    is_kept[marked[marked < len(times)]] = True
    kept = np.flatnonzero(is_kept)
    return Timeline(
        (times[kept] - times[0]) / _NS,
        levels[kept],
        allocated[kept],
        tuple((name, (ns - int(times[0])) / _NS) for name, ns in marks),
    )


def thinned(levels: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.intp]:
    """Return the moments of a timeline to keep, in order: highs and lows of every stretch.

    They are `most` at most, which is at least 4; the first, the last and the highest are kept.
    """
    if len(levels) <= most:
        return np.arange(len(levels))
    size = -(-len(levels) // (most // 2 - 1))
    firsts = np.arange(0, len(levels), size)
    filled = np.pad(levels, (0, len(firsts) * size - len(levels)), mode="edge")
    stretches = filled.reshape(-1, size)
    highs, lows = firsts + stretches.argmax(1), firsts + stretches.argmin(1)
    # np.unique would do, but takes milliseconds when it is first called.
    is_kept = np.zeros(len(levels), dtype=np.bool_)
    for moments in ([0, len(levels) - 1], highs, lows):
        is_kept[moments] = True
    return np.flatnonzero(is_kept)
