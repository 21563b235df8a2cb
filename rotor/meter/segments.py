"""Segments between the marks of a meter, from the events that an allocator reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from rotor import _core
from rotor._pytorch.profiler import Column, Events, Mark
from rotor.common.timeline import Timeline, timeline_of

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

    def shifted(self, more: int) -> Segment:
        """Return the levels above one that lies lower by so many bytes."""
        levels = self.start_bytes, self.peak_bytes, self.end_bytes
        return Segment(self.name, *(level + more for level in levels))


@dataclass(frozen=True, eq=False)
class Levels:
    """Bytes allocated along the events of a meter, above the level at its start."""

    events: Events
    after: Column
    """Level after each allocation and release, int64 [k]."""
    at_marks: list[int]
    """Level at each mark of the events."""

    @property
    def end_bytes(self) -> int:
        """Level at the end."""
        return self.at_marks[-1]

    @property
    def peak_bytes(self) -> int:
        """Maximum; at least the level at the start."""
        starts = [level for mark, level in self._bounds() if mark.name != END]
        return max([self._peak(0, len(self.after), 0), *starts])

    def _bounds(self) -> list[tuple[Mark, int]]:
        """Return the marks of segments, and the one of the end, with the levels there."""
        marks = zip(self.events.marks, self.at_marks, strict=True)
        return [(mark, level) for mark, level in marks if _is_bound(mark)]

    def _peak(self, begin: int, end: int, start: int) -> int:
        grown = self.after[begin:end][self.events.nbytes[begin:end] > 0]
        return int(grown.max(initial=start))

    def segments(self) -> list[Segment]:
        """Return the segments in the order of their marks."""
        return [
            Segment(
                mark.name.removeprefix(MARK),
                level,
                self._peak(mark.position, following.position, level),
                end,
            )
            for (mark, level), (following, end) in pairwise(self._bounds())
        ]

    def timeline(self) -> Timeline:
        """Return the levels over time, thinned, with the marks of the segments."""
        events = self.events
        positions = [mark.position for mark in events.marks]
        given = np.cumsum(np.maximum(events.nbytes, 0))
        return timeline_of(
            np.insert(events.ns, positions, [mark.ns for mark in events.marks]),
            np.insert(self.after, positions, self.at_marks),
            np.insert(given, positions, [_before(given, k) for k in positions]),
            [
                (mark.name.removeprefix(MARK), mark.ns)
                for mark in events.marks
                if mark.name.startswith(MARK)
            ],
        )


def _is_bound(mark: Mark) -> bool:
    return mark.name == END or mark.name.startswith(MARK)


def _before(sums: Column, position: int) -> int:
    """Return a running sum before an event."""
    return int(sums[position - 1]) if position else 0


def _until_end(events: Events) -> Events:
    names = [mark.name for mark in events.marks]
    count = names.index(END) + 1
    last = events.marks[count - 1].position
    total = events.total_bytes
    return Events(
        events.address[:last],
        events.nbytes[:last],
        events.ns[:last],
        events.marks[:count],
        None if total is None else total[:last],
    )


def _shifted(events: Events, running: Column, shifts: Sequence[int]) -> Levels:
    """Return levels that differ from running sums: from each mark to the next by its shift."""
    positions = [mark.position for mark in events.marks]
    passed = np.searchsorted(positions, np.arange(len(running)), side="right")
    at_marks = [_before(running, k) + shift for k, shift in zip(positions, shifts, strict=True)]
    return Levels(events, running + np.array([0, *shifts], dtype=np.int64)[passed], at_marks)


def levels_of(events: Events, resident: Collection[int] = ()) -> Levels:
    """Return the levels along the events of the CPU's allocator, among whose marks is `END`.

    `resident` are addresses of blocks from before the start; marks (`FREED`) tell their release.
    """
    events = _until_end(events)
    known = np.array(sorted(resident), dtype=np.int64)
    live = _core.live_bytes(events.address, events.nbytes, known, events.total_bytes)
    names = [mark.name for mark in events.marks]
    freed = [int(name.removeprefix(FREED)) if name.startswith(FREED) else 0 for name in names]
    shifts = [-gone for gone in accumulate(freed)]
    return _shifted(events, np.frombuffer(live, dtype=np.int64), shifts)


def counted_levels(events: Events, counted: Sequence[int]) -> Levels:
    """Return the levels along the events of an accelerator, among whose marks is `END`.

    Events may lack what another thread frees. `counted` are the bytes by the counters at each mark
    of a segment, and at the end.
    """
    events = _until_end(events)
    running = np.cumsum(events.nbytes)
    known = iter(counted)
    shifts: list[int] = []
    for mark in events.marks:
        if _is_bound(mark):
            shifts.append(next(known) - _before(running, mark.position))
        else:
            shifts.append(shifts[-1] if shifts else 0)
    return _shifted(events, running, shifts)
