"""Segments between the marks of a meter, from the events that an allocator reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rotor._pytorch import profiler as _profiler
from rotor.meter.blocks import Blocks

__all__ = [
    "END",
    "FREED",
    "MARK",
    "START",
    "Segment",
    "counted_levels",
    "levels_of",
    "marks_of",
]

MARK = "rotor.mark."
FREED = "rotor.freed."
END = "rotor.end"
START = "rotor.start"


@dataclass(frozen=True, slots=True)
class Segment:
    """Levels between two marks of a meter, in bytes above the level at its start.

    Attributes
    ----------
    name
        The name given to `Meter.mark`.
    start_bytes
        Bytes allocated at the mark.
    peak_bytes
        Maximum from the mark to the next one; at least `start_bytes`.
    end_bytes
        Bytes allocated at the next mark, or at the end.
    """

    name: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int


def levels_of(
    events: Iterable[_profiler.Allocation | str],
    moments: list[tuple[int, int, int]] | None = None,
    resident: Collection[int] = (),
) -> tuple[list[Segment], int, int]:
    """Return the segments, the peak and the last level of allocations and marks.

    A list of moments, if given, receives (nanoseconds, level, bytes given out so far) for
    each moment.
    """
    segments: list[Segment] = []
    blocks = Blocks(resident)
    name: str | None = None
    freed = live = level = start = peak = highest = given = 0
    for event in events:
        if isinstance(event, _profiler.Allocation):
            live = blocks.add(event)
            level = live - freed
            if event.nbytes > 0:
                given += event.nbytes
                peak = max(peak, level)
        elif event.startswith(FREED):
            freed += int(event.removeprefix(FREED))
            level = live - freed
        elif event == END or event.startswith(MARK):
            highest = max(highest, peak)
            if name is not None:
                segments.append(Segment(name, start, peak, level))
            if event == END:
                _note(moments, event, level, given)
                break
            name = event.removeprefix(MARK)
            start = peak = level
        _note(moments, event, level, given)
    return segments, highest, level


def _note(
    moments: list[tuple[int, int, int]] | None,
    event: _profiler.Allocation | str,
    level: int,
    given: int,
) -> None:
    if moments is not None:
        assert isinstance(event, _profiler.Allocation | _profiler.Mark)
        moments.append((event.ns, level, given))


def counted_levels(
    events: Iterable[_profiler.Allocation | str],
    levels: Sequence[int],
    moments: list[tuple[int, int, int]],
) -> tuple[list[Segment], int]:
    """Return the segments and the peak of an accelerator's events.

    Parameters
    ----------
    events
        Allocations and marks. What another thread frees may be missing.
    levels
        Bytes by the counters at each mark, and at the end.
    moments
        List that receives (nanoseconds, level, bytes given out so far) for each moment.
    """
    segments: list[Segment] = []
    name: str | None = None
    start = level = peak = highest = given = 0
    ends = iter(levels)
    for event in events:
        if isinstance(event, _profiler.Allocation):
            level += event.nbytes
            given += max(event.nbytes, 0)
            peak = max(peak, level)
        elif event == END:
            break
        elif event.startswith(MARK):
            level = next(ends)
            highest = max(highest, peak)
            if name is not None:
                segments.append(Segment(name, start, peak, level))
            name = event.removeprefix(MARK)
            start = peak = level
        _note(moments, event, level, given)
    highest = max(highest, peak)
    if name is not None:
        segments.append(Segment(name, start, peak, next(ends)))
    return segments, highest


def marks_of(events: Iterable[_profiler.Allocation | str]) -> list[tuple[str, int]]:
    """Return the names of marks, and their times."""
    return [
        (event.removeprefix(MARK), event.ns)
        for event in events
        if isinstance(event, _profiler.Mark) and event.startswith(MARK)
    ]
