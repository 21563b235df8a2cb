"""One choice for several captured parts of a step, under one limit.

A model that cannot be captured whole runs as *pieces*: captured children, each with its own forward
and backward, and eager code between them. Each piece offers several ways to run. This module
chooses one for each, so that the whole step is fastest and never passes the limit.

Forwards run in order, backwards in the reverse order. While piece ``i`` runs, forward or backward,
three parts are in memory: what the eager code keeps, what the pieces before ``i`` keep, and the
piece's own bytes. Between pieces ``i - 1`` and ``i`` only the first two are. Only `simulate` adds
them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rotor.errors import InfeasibleError
from rotor.units import exact_bytes

__all__ = ["Bases", "Option", "Simulation", "choose", "least_bytes", "simulate", "undominated"]

MOST_POINTS = 20_000
"""States kept for one piece; beyond that the choice may miss the optimum, never the limit."""


@dataclass(frozen=True)
class Option:
    """One way to run a piece.

    Attributes
    ----------
    kept_bytes
        Bytes between its forward and its backward, its inputs not counted.
    forward_bytes, backward_bytes
        The most that is live while it runs, above the level before it. The backward includes the
        kept bytes.
    time_ns
        Forward and backward, recomputation included.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    time_ns: int


@dataclass(frozen=True)
class Bases:
    """Bytes that are resident under every choice, above the level at which the step begins.

    Attributes
    ----------
    forward, backward
        While piece ``i`` runs.
    between
        The most while the eager code before piece ``i`` runs, forward or backward; the last entry
        is for the code after the last piece, and the loss.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    between: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.backward) != len(self.forward) or len(self.between) != len(self.forward) + 1:
            raise ValueError(
                f"bases of {len(self.forward)} forwards need as many backwards and one more "
                f"between, got {len(self.backward)} and {len(self.between)}"
            )


def largest_bases(found: Sequence[Bases]) -> Bases:
    """Return the largest value of any bases at each place."""

    def column(name: str) -> tuple[int, ...]:
        return tuple(map(max, zip(*(getattr(bases, name) for bases in found), strict=True)))

    return Bases(column("forward"), column("backward"), column("between"))


@dataclass(frozen=True)
class Simulation:
    """A choice, priced; peaks are bytes above the level at which the step begins.

    Attributes
    ----------
    forward, backward, between
        The peak in each part of the step, as in `Bases`.
    time_ns
        Of all pieces.
    """

    forward: npt.NDArray[np.int64]
    backward: npt.NDArray[np.int64]
    between: npt.NDArray[np.int64]
    time_ns: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any moment."""
        return int(max(part.max(initial=0) for part in (self.forward, self.backward, self.between)))


def undominated(options: Sequence[Option]) -> list[Option]:
    """Return the options that no other equals or beats in everything, fastest first."""
    kept: list[Option] = []
    for option in sorted(
        set(options), key=lambda o: (o.time_ns, o.kept_bytes, o.backward_bytes, o.forward_bytes)
    ):
        if not any(
            other.kept_bytes <= option.kept_bytes
            and other.forward_bytes <= option.forward_bytes
            and other.backward_bytes <= option.backward_bytes
            for other in kept
        ):
            kept.append(option)
    return kept


def simulate(pieces: Sequence[Sequence[Option]], bases: Bases, choice: Sequence[int]) -> Simulation:
    """Return peaks and time of a choice.

    Parameters
    ----------
    pieces
        The options of each piece, in the order of the forward.
    bases
        Bytes that are resident under every choice.
    choice
        The number of an option for each piece.
    """
    chosen = [options[k] for options, k in zip(pieces, choice, strict=True)]
    kept = np.cumsum([0, *(option.kept_bytes for option in chosen)], dtype=np.int64)

    def whole(values: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    return Simulation(
        kept[:-1] + whole(bases.forward) + whole([o.forward_bytes for o in chosen]),
        kept[:-1] + whole(bases.backward) + whole([o.backward_bytes for o in chosen]),
        kept + whole(bases.between),
        sum(option.time_ns for option in chosen),
    )


def choose(pieces: Sequence[Sequence[Option]], bases: Bases, limit_bytes: int) -> list[int]:
    """Return the fastest choice that never passes the limit.

    What later pieces can do depends on the past only through the sum of what is kept, and less is
    never worse: states are the Pareto frontier of kept bytes and time.

    Parameters
    ----------
    pieces, bases
        As for `simulate`.
    limit_bytes
        The most bytes that may be live at any moment.

    Returns
    -------
    list of int
        The number of an option for each piece.

    Raises
    ------
    InfeasibleError
        No choice fits; ``minimum_bytes`` is the least limit that has one.
    """
    kept = np.zeros(1, dtype=np.int64)
    time = np.zeros(1, dtype=np.int64)
    links: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    feasible = bases.between[0] <= limit_bytes
    for i, options in enumerate(pieces):
        if not feasible:
            break
        parts = []
        for k, option in enumerate(options):
            own = max(
                bases.forward[i] + option.forward_bytes,
                bases.backward[i] + option.backward_bytes,
                bases.between[i + 1] + option.kept_bytes,
            )
            (fits,) = np.nonzero(kept + own <= limit_bytes)
            parts.append(
                (
                    kept[fits] + option.kept_bytes,
                    time[fits] + option.time_ns,
                    fits,
                    np.full(fits.size, k),
                )
            )
        kept, time, parents, numbers = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        feasible = kept.size > 0
        if feasible:
            best = _frontier(kept, time)
            kept, time = kept[best], time[best]
            links.append((parents[best], numbers[best]))
    if not feasible:
        least = least_bytes(pieces, bases)
        raise InfeasibleError(
            f"the captured parts and the code between them do not fit in "
            f"{exact_bytes(limit_bytes)}; the least limit for which a choice exists is "
            f"{exact_bytes(least)}",
            least,
        )
    state = kept.size - 1
    choice = []
    for parents, numbers in reversed(links):
        choice.append(int(numbers[state]))
        state = int(parents[state])
    return choice[::-1]


def _frontier(kept: npt.NDArray[np.int64], time: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions of states that no other beats, by rising bytes and falling time."""
    order = np.lexsort((time, kept))
    sorted_time = time[order]
    earlier = np.minimum.accumulate(sorted_time)
    is_better = np.ones(order.size, dtype=bool)
    is_better[1:] = sorted_time[1:] < earlier[:-1]
    best: npt.NDArray[np.int64] = order[is_better]
    if best.size > MOST_POINTS:
        best = best[np.linspace(0, best.size - 1, MOST_POINTS).astype(np.int64)]
    return best


def least_bytes(pieces: Sequence[Sequence[Option]], bases: Bases) -> int:
    """Return the least limit for which `choose` finds a choice."""

    def fits(limit: int) -> bool:
        # If earlier pieces keep the least they can, every later piece has the most room.
        kept = 0
        for i, options in enumerate(pieces):
            possible = [
                option.kept_bytes
                for option in options
                if kept
                + max(
                    bases.forward[i] + option.forward_bytes,
                    bases.backward[i] + option.backward_bytes,
                    bases.between[i + 1] + option.kept_bytes,
                )
                <= limit
            ]
            if not possible:
                return False
            kept += min(possible)
        return bases.between[0] <= limit

    high = simulate(pieces, bases, [0] * len(pieces)).peak_bytes
    low = 0
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return high
