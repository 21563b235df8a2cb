"""Stretches of a step in parts: from each mark of a metered step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rotor.common.timeline import Timeline
from rotor.graph.assembly import Option, Simulation

__all__ = ["place_of", "retimed"]


def place_of(mark: str, count: int) -> tuple[str, int]:
    """Return the field of `rotor.graph.assembly.Bases`, and the index, that a mark begins.

    The marks of `count` parts are "start", "forward k", "after k", "loss", "backward", "backward k"
    and "before k".
    """
    name, _, number = mark.partition(" ")
    if name == "start":
        return "between", 0
    k = int(number) if number else count
    if number and name in ("forward", "backward"):
        return name, k
    return "between", k + 1 if name == "after" else k


def retimed(
    measured: Timeline,
    options: Sequence[Sequence[Option]],
    choice: Sequence[int],
    other: Sequence[int],
    peaks: Simulation,
) -> Timeline:
    """Return the timeline of a step under another choice, from that of a metered step under this
    one.

    Each stretch of the step, between the marks of `place_of`, has the peak that is predicted for
    the other choice. A part's backward, which recomputes, is shorter or longer by the difference of
    the predicted times; everything else takes as long as it was measured to.
    """
    marks = [*measured.marks, ("end", float(measured.seconds[-1]))]
    moments, levels = [marks[0][1]], []
    spent = [0.0] * len(options)
    for (mark, begin), (_, end) in pairwise(marks):
        part, k = place_of(mark, len(options))
        seconds = end - begin
        if part != "between":
            spent[k] += seconds
        if part == "backward":
            now, then = options[k][choice[k]].time_ns, options[k][other[k]].time_ns
            seconds += spent[k] * (then / now - 1) if now else 0.0
        moments.append(moments[-1] + max(seconds, 0.0))
        levels.append(int(getattr(peaks, part)[k]))
    live = np.array([*levels, 0], dtype=np.int64)
    return Timeline(np.array(moments), live, np.zeros_like(live))
