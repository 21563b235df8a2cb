"""One choice for several captured parts of a step, under one limit.

A model that cannot be captured whole runs as *pieces*: captured children, each with its own forward
and backward, and eager code between them. Each piece offers several ways to run. This module
chooses one for each, so that the whole step is fastest and never passes the limit.

Forwards run in order, backwards in the reverse order. While piece ``i`` runs, forward or backward,
three parts are in memory: what the eager code keeps, what the pieces before ``i`` keep, and the
piece's own bytes. Between pieces ``i - 1`` and ``i`` only the first two are. Only `simulate` adds
them up.

Pieces may keep values in a second tier of memory. Every piece has its place there from its forward
to its backward, so that the places of all add up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rotor.algorithms.peaks import Peak
from rotor.common.joining import joined
from rotor.errors import InfeasibleError
from rotor.units import exact_bytes

MOST_POINTS = 20_000
"""States kept for one piece; beyond that the choice may miss the optimum, never the limit."""

_TIER_CLASSES = 64
"""Classes of states, by their bytes in a tier that is limited."""

_LEAST_POINTS = 2_000
"""States where only the least bytes in a tier are asked for."""

_LINK_SHARE = 50
"""Divisor of the time of transfers in costs, so that none is made without a gain."""

_PRECISION = 1 << 10
"""Divisor of the least limit that gives its uncertainty where the tier is limited too."""


@dataclass(frozen=True)
class Option:
    """One way to run a piece."""

    kept_bytes: int
    """Bytes between its forward and its backward, its inputs not counted."""
    forward_bytes: int
    """The most that is live while its forward runs, above the level before it."""
    backward_bytes: int
    """The same of its backward, with the kept bytes."""
    time_ns: int
    """Forward and backward, recomputation and waits for a second tier included."""
    tier_bytes: int = 0
    link_ns: int = 0
    """Time of its transfers to the tier and back, most of them beside the computation."""

    @property
    def cost_ns(self) -> int:
        """Time, and a part of the link's time: of equally fast ways, the one that moves less."""
        return self.time_ns + self.link_ns // _LINK_SHARE


@dataclass(frozen=True)
class Bases:
    """Bytes that are resident under every choice, above the level at which the step begins."""

    forward: tuple[int, ...]
    """Bytes while the forward of each piece runs."""
    backward: tuple[int, ...]
    """Bytes while the backward of each piece runs."""
    between: tuple[int, ...]
    """The most while the eager code before each piece runs, forward or backward; the last entry is
    for the code after the last piece, and the loss.
    """

    def __post_init__(self) -> None:
        if len(self.backward) != len(self.forward) or len(self.between) != len(self.forward) + 1:
            raise ValueError(
                f"bases of {len(self.forward)} forwards need as many backwards and one more "
                f"between, got {len(self.backward)} and {len(self.between)}"
            )

    def peak_of(self, option: Option, piece: int) -> int:
        """Return the most bytes of a piece, beside those that earlier ones keep."""
        return max(
            self.forward[piece] + option.forward_bytes,
            self.backward[piece] + option.backward_bytes,
            self.between[piece + 1] + option.kept_bytes,
        )


def largest_bases(found: Sequence[Bases]) -> Bases:
    """Return the largest value of any bases at each place."""
    return joined(found)


@dataclass(frozen=True)
class Simulation:
    """A choice, priced; peaks are bytes above the level at which the step begins."""

    forward: npt.NDArray[np.int64]
    backward: npt.NDArray[np.int64]
    between: npt.NDArray[np.int64]
    time_ns: int
    tier_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any moment."""
        return int(max(part.max(initial=0) for part in (self.forward, self.backward, self.between)))


def undominated(options: Sequence[Option]) -> list[Option]:
    """Return the options that no other equals or beats in everything, fastest first."""
    kept: list[Option] = []
    for option in sorted(
        set(options),
        key=lambda o: (o.cost_ns, o.kept_bytes, o.backward_bytes, o.forward_bytes, o.tier_bytes),
    ):
        if not any(
            other.kept_bytes <= option.kept_bytes
            and other.forward_bytes <= option.forward_bytes
            and other.backward_bytes <= option.backward_bytes
            and other.tier_bytes <= option.tier_bytes
            for other in kept
        ):
            kept.append(option)
    return kept


def simulate(pieces: Sequence[Sequence[Option]], bases: Bases, choice: Sequence[int]) -> Simulation:
    """Return peaks and time of a choice, which is the number of an option for each piece."""
    chosen = [options[k] for options, k in zip(pieces, choice, strict=True)]
    kept = np.cumsum([0, *(option.kept_bytes for option in chosen)], dtype=np.int64)

    def whole(values: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    return Simulation(
        kept[:-1] + whole(bases.forward) + whole([o.forward_bytes for o in chosen]),
        kept[:-1] + whole(bases.backward) + whole([o.backward_bytes for o in chosen]),
        kept + whole(bases.between),
        sum(option.time_ns for option in chosen),
        sum(option.tier_bytes for option in chosen),
    )


def peak_of(
    pieces: Sequence[Sequence[Option]], bases: Bases, choice: Sequence[int], names: Sequence[str]
) -> Peak:
    """Return the piece at the peak of a choice, and its bytes in parts."""
    found = simulate(pieces, bases, choice)
    kept = np.cumsum(
        [0, *(options[k].kept_bytes for options, k in zip(pieces, choice, strict=True))]
    )
    peaks = {"forward": found.forward, "backward": found.backward, "code before": found.between}
    phase = max(peaks, key=lambda name: int(peaks[name].max(initial=0)))
    place = int(np.argmax(peaks[phase]))
    base = {"forward": bases.forward, "backward": bases.backward}.get(phase, bases.between)[place]
    parts = {"kept by the code between the parts": base, "kept by earlier parts": int(kept[place])}
    own = int(peaks[phase][place]) - sum(parts.values())
    module = names[place] if place < len(names) else ""
    return Peak(phase if module else "code after the parts", module, {**parts, Peak.PASSING: own})


def fastest_of(options: Sequence[Option]) -> int:
    """Return the number of the fastest option; of several, of one that moves least."""
    return min(range(len(options)), key=lambda k: (options[k].time_ns, options[k].link_ns))


def choose(
    pieces: Sequence[Sequence[Option]],
    bases: Bases,
    limit_bytes: int,
    tier_limit_bytes: int | None = None,
) -> list[int]:
    """Return the fastest choice that never passes the limit: an option's number for each piece.

    What later pieces can do depends on the past only through the sum of what is kept, and less is
    never worse: states are the Pareto frontier of kept bytes and time. Under a limit of the second
    tier, on the bytes of all pieces there, they are in classes by these bytes, and such a frontier
    is kept of each class. Raises InfeasibleError if no choice fits; its ``minimum_bytes`` is the
    least limit that has one.
    """
    found, most = None, tier_limit_bytes
    if bases.between[0] <= limit_bytes:
        costs = [[option.cost_ns for option in options] for options in pieces]
        found = _search(pieces, bases, limit_bytes, costs)
        if found is not None and most is not None and _tier_bytes(pieces, found) > most:
            found = _search(pieces, bases, limit_bytes, costs, most)
            found = found or _with_least_tier(pieces, bases, limit_bytes, most)
    if found is None:
        least = least_bytes(pieces, bases, tier_limit_bytes)
        raise InfeasibleError(
            f"the captured parts and the code between them do not fit in "
            f"{exact_bytes(limit_bytes)}; the least limit for which a choice exists is "
            f"{exact_bytes(least)}",
            least,
        )
    return found


def _tier_bytes(pieces: Sequence[Sequence[Option]], choice: Sequence[int]) -> int:
    return sum(options[k].tier_bytes for options, k in zip(pieces, choice, strict=True))


def _with_least_tier(
    pieces: Sequence[Sequence[Option]], bases: Bases, limit_bytes: int, tier_limit_bytes: int
) -> list[int] | None:
    """Return the choice with the fewest bytes in the tier, if they are not too many."""
    costs = [[option.tier_bytes for option in options] for options in pieces]
    found = _search(pieces, bases, limit_bytes, costs, most_points=_LEAST_POINTS)
    if found is None or _tier_bytes(pieces, found) > tier_limit_bytes:
        return None
    return found


def _search(
    pieces: Sequence[Sequence[Option]],
    bases: Bases,
    limit_bytes: int,
    costs: Sequence[Sequence[int]],
    tier_limit_bytes: int | None = None,
    most_points: int = MOST_POINTS,
) -> list[int] | None:
    """Return the choice of the least cost under limits; ``None`` if none was found."""
    kept = np.zeros(1, dtype=np.int64)
    cost = np.zeros(1, dtype=np.int64)
    tier = np.zeros(1, dtype=np.int64)
    links: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    class_bytes = None if tier_limit_bytes is None else max(tier_limit_bytes // _TIER_CLASSES, 1)
    for i, options in enumerate(pieces):
        parts = []
        for k, option in enumerate(options):
            is_within = kept + bases.peak_of(option, i) <= limit_bytes
            if tier_limit_bytes is not None:
                is_within &= tier + option.tier_bytes <= tier_limit_bytes
            (fits,) = np.nonzero(is_within)
            parts.append(
                (
                    kept[fits] + option.kept_bytes,
                    cost[fits] + costs[i][k],
                    tier[fits] + option.tier_bytes,
                    fits,
                    np.full(fits.size, k),
                )
            )
        kept, cost, tier, parents, numbers = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        if not kept.size:
            return None
        if class_bytes is None:
            best = _frontier(kept, cost, most_points)
        else:
            best = _frontiers(kept, cost, tier // class_bytes, most_points)
        kept, cost, tier = kept[best], cost[best], tier[best]
        links.append((parents[best], numbers[best]))
    state = int(cost.argmin())
    choice = []
    for parents, numbers in reversed(links):
        choice.append(int(numbers[state]))
        state = int(parents[state])
    return choice[::-1]


def _frontier(
    kept: npt.NDArray[np.int64], cost: npt.NDArray[np.int64], most_points: int
) -> npt.NDArray[np.int64]:
    """Return the positions of states that no other beats, by rising bytes and falling cost."""
    order = np.lexsort((cost, kept))
    sorted_cost = cost[order]
    earlier = np.minimum.accumulate(sorted_cost)
    is_better = np.ones(order.size, dtype=bool)
    is_better[1:] = sorted_cost[1:] < earlier[:-1]
    best: npt.NDArray[np.int64] = order[is_better]
    if best.size > most_points:
        best = best[np.linspace(0, best.size - 1, most_points).astype(np.int64)]
    return best


def _frontiers(
    kept: npt.NDArray[np.int64],
    cost: npt.NDArray[np.int64],
    classes: npt.NDArray[np.int64],
    most_points: int,
) -> npt.NDArray[np.int64]:
    """Return the positions of states that no other of their class beats."""
    found = []
    for number in np.unique(classes):
        (members,) = np.nonzero(classes == number)
        most = max(most_points // _TIER_CLASSES, 1)
        found.append(members[_frontier(kept[members], cost[members], most)])
    return np.concatenate(found)


def least_bytes(
    pieces: Sequence[Sequence[Option]], bases: Bases, tier_limit_bytes: int | None = None
) -> int:
    """Return the least limit for which `choose` finds a choice.

    With a limit of the second tier it may be a thousandth more.
    """
    least = _least_bytes(pieces, bases)
    if tier_limit_bytes is None or _with_least_tier(pieces, bases, least, tier_limit_bytes):
        return least
    without = [[option for option in options if not option.tier_bytes] for options in pieces]
    low, high = least, _least_bytes(without, bases)
    while high - low > max(high // _PRECISION, 1):
        middle = (low + high) // 2
        if _with_least_tier(pieces, bases, middle, tier_limit_bytes):
            high = middle
        else:
            low = middle
    return high


def _least_bytes(pieces: Sequence[Sequence[Option]], bases: Bases) -> int:
    """Return the least limit of any choice, however much of the tier it takes."""

    def fits(limit: int) -> bool:
        # If earlier pieces keep the least they can, every later piece has the most room.
        kept = 0
        for i, options in enumerate(pieces):
            possible = [
                option.kept_bytes for option in options if kept + bases.peak_of(option, i) <= limit
            ]
            if not possible:
                return False
            kept += min(possible)
        return bases.between[0] <= limit

    high = simulate(pieces, bases, [0] * len(pieces)).peak_bytes
    return bisect_left(range(high), True, key=fits)
