"""Costs of operations at sizes at which they were not measured, from a few at which they were.

Times are fitted by least squares, and workspaces are bounded from above: a wrong time only makes a
plan slower, a wrong byte breaks the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rotor.engines.graph.profile import Cost

__all__ = ["Fits", "Point"]

_LAUNCH_NS = 3_000
"""Time of an operation on almost nothing, assumed if only one size was measured."""

Numbers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """Costs of all operations at one shape, and their amounts of work there."""

    values: tuple[int, ...]
    """Values of the symbols."""
    ns: Reals
    workspace: Numbers
    """Bytes of each operation's workspace."""
    work: Reals
    """Amount of work of each operation, to which its time is about proportional."""
    moved: Reals
    """Bytes that each operation reads and writes."""

    @classmethod
    def of(
        cls, values: Sequence[int], costs: Sequence[Cost], moved: Numbers, flops: Numbers
    ) -> Point:
        """Return the point of measured costs."""
        return cls(
            tuple(values),
            np.array([cost.ns for cost in costs], dtype=np.float64),
            np.array([cost.workspace_bytes for cost in costs], dtype=np.int64),
            work_of(moved, flops),
            np.maximum(moved, 1).astype(np.float64),
        )


def work_of(moved: Numbers, flops: Numbers) -> Reals:
    """Return amounts of work: the flops where they outweigh the bytes, else the bytes."""
    return np.maximum(np.maximum(moved, flops), 1).astype(np.float64)


class Fits:
    """Costs as functions of the symbols, by the shapes at which operations were measured."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point) -> None:
        """Add a measured shape."""
        self.points = [known for known in self.points if known.values != point.values]
        self.points.append(point)

    def ns(self, work: Reals) -> Numbers:
        """Return the times of operations with these amounts of work."""
        works = np.stack([point.work for point in self.points])
        times = np.stack([point.ns for point in self.points])
        # Relative errors count: a small shape is as important as a large one.
        weights = 1 / np.maximum(times, 1) ** 2
        total = weights.sum(axis=0)
        mean_work = (weights * works).sum(axis=0) / total
        mean_time = (weights * times).sum(axis=0) / total
        spread = (weights * (works - mean_work) ** 2).sum(axis=0)
        product = (weights * (works - mean_work) * (times - mean_time)).sum(axis=0)
        one = mean_time - np.minimum(mean_time, _LAUNCH_NS)
        is_spread = spread > 1e-6 * total * mean_work**2
        slope = np.where(is_spread, product / np.maximum(spread, 1e-300), one / mean_work)
        # Neither the slope nor the time without any work is negative.
        slope = np.clip(slope, 0, mean_time / mean_work)
        found: Numbers = np.maximum(mean_time + slope * (work - mean_work), 0).astype(np.int64)
        return found

    def workspaces(self, values: Sequence[int], moved: Reals) -> Numbers:
        """Return upper bounds of workspaces at a shape where operations move `moved` bytes.

        Where a measured shape covers this one, the workspace is at most the one measured there.
        Beyond, it grows from the largest one as the bytes that are moved, or with the exponent by
        which it grew between the measured shapes, if that is larger.
        """
        measured = np.stack([point.workspace for point in self.points])
        sizes = np.stack([point.moved for point in self.points])
        exact = [p for p in self.points if p.values == tuple(values)]
        if exact:
            return exact[0].workspace
        covering = [
            point.workspace
            for point in self.points
            if all(here <= there for here, there in zip(values, point.values, strict=True))
        ]
        if covering:
            bound: Numbers = np.max(np.stack(covering), axis=0)
            return bound
        growth = np.ones(measured.shape[1])
        for first in range(len(measured)):
            for second in range(len(measured)):
                more = (sizes[second] > 1.05 * sizes[first]) & (measured[first] > 0)
                ratio = np.log(np.maximum(measured[second], 1) / np.maximum(measured[first], 1))
                span = np.log(np.where(more, sizes[second] / sizes[first], np.e))
                growth = np.where(more, np.maximum(growth, ratio / span), growth)
        columns = np.arange(measured.shape[1])
        largest = sizes.argmax(axis=0)
        ratio = np.maximum(moved / sizes[largest, columns], 1.0)
        scaled = measured[largest, columns] * ratio ** np.minimum(growth, _MOST_GROWTH)
        beyond: Numbers = np.ceil(np.maximum(scaled, measured.max(axis=0))).astype(np.int64)
        return beyond


_MOST_GROWTH = 3.0
