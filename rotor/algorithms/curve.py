"""Time against memory: the best time of a solver in every budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rotor.chain import Saved, check_header
from rotor.errors import InfeasibleError
from rotor.units import exact_bytes, format_bytes, parse_bytes

FORMAT = "rotor.curve"
VERSION = 1

_STYLES = (":", "--", "-.")
_FAR = 2


def new_axes(asked: str) -> Any:
    """Return the axes of a new figure; without matplotlib, ImportError for what asks for them."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{asked} needs matplotlib: `pip install matplotlib`, or in a clone of rotor "
            '`pip install ".[plot]"`'
        ) from error
    return Figure(layout="constrained").subplots()


class Curve(Saved):
    """The best time for each budget: a falling step function of bytes.

    Between two points the time is that of the point on the left.

    Parameters
    ----------
    bytes
        Budgets, strictly ascending, [k] with k >= 1.
    seconds
        Time of one step within each of them, strictly descending, [k].

    Attributes
    ----------
    marks
        Names and bytes of what `plot` marks beside the points, such as a limit; not part of JSON.
    lower_bound_bytes
        Bytes below which provably no schedule exists; 0 if unknown, and after JSON.

    Raises
    ------
    ValueError
        No points, lengths that differ, or points out of order.
    """

    def __init__(self, bytes: npt.ArrayLike, seconds: npt.ArrayLike) -> None:
        self.bytes: npt.NDArray[np.int64] = np.array(bytes, dtype=np.int64)
        self.seconds: npt.NDArray[np.float64] = np.array(seconds, dtype=np.float64)
        if self.bytes.ndim != 1 or self.bytes.shape != self.seconds.shape:
            raise ValueError(
                f"bytes and seconds must be two lists of one length, got shapes "
                f"{self.bytes.shape} and {self.seconds.shape}"
            )
        if len(self.bytes) == 0:
            raise ValueError("a curve needs at least one point")
        if not np.all(np.isfinite(self.seconds)):
            raise ValueError("the seconds of a curve must be finite")
        if np.any(np.diff(self.bytes) <= 0) or np.any(np.diff(self.seconds) >= 0):
            raise ValueError("the points of a curve must have ascending bytes, descending seconds")
        self.marks: tuple[tuple[str, int], ...] = ()
        self.lower_bound_bytes = 0
        self.bytes.flags.writeable = False
        self.seconds.flags.writeable = False

    @classmethod
    def from_points(cls, points: Iterable[tuple[int, float]]) -> Curve:
        """Return the curve through the points (bytes, seconds) that no other point beats."""
        kept: list[tuple[int, float]] = []
        for size, seconds in sorted(points):
            if not kept or seconds < kept[-1][1]:
                kept.append((size, seconds))
        return cls([size for size, _ in kept], [seconds for _, seconds in kept])

    @property
    def minimum_bytes(self) -> int:
        """The least budget that has a schedule."""
        return int(self.bytes[0])

    def at(self, budget_bytes: int | str) -> float:
        """Return seconds of one step within a budget.

        Raises
        ------
        InfeasibleError
            The budget is below `minimum_bytes`.
        """
        budget = parse_bytes(budget_bytes, name="budget_bytes")
        index = int(np.searchsorted(self.bytes, budget, side="right")) - 1
        if index < 0:
            raise InfeasibleError(
                f"a budget of {exact_bytes(budget)} is below the "
                f"{exact_bytes(self.minimum_bytes)} at which "
                "this curve begins",
                self.minimum_bytes,
            )
        return float(self.seconds[index])

    def plot(self, ax: Any = None) -> Any:
        """Draw the curve with matplotlib, and its `marks` as lines.

        A mark far to the right of the curve appears in the legend only.

        Parameters
        ----------
        ax
            The axes to draw on; by default those of a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            The axes that were drawn on.

        Raises
        ------
        ImportError
            matplotlib is not installed; the message names the extra that brings it.
        """
        ax = new_axes("Curve.plot") if ax is None else ax
        ax.step(self.bytes / 2**20, self.seconds * 1e3, where="post")
        ax.set_xlabel("memory limit (MiB)")
        ax.set_ylabel("time of one step (ms)")
        near = _FAR * int(self.bytes[-1])
        for index, (name, size) in enumerate(self.marks):
            if size <= near:
                style = _STYLES[index % len(_STYLES)]
                ax.axvline(size / 2**20, color=f"C{index + 1}", linestyle=style, label=name)
            else:
                ax.plot([], [], " ", label=f"{name}: {format_bytes(size)}")
        if self.marks:
            ax.legend()
        return ax

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.bytes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Curve):
            return NotImplemented
        return np.array_equal(self.bytes, other.bytes) and np.array_equal(
            self.seconds, other.seconds
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Curve of {len(self)} points, {self.bytes[0]} to {self.bytes[-1]} bytes, "
            f"{self.seconds[0]:.6g} to {self.seconds[-1]:.6g} s>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as plain lists, for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "bytes": self.bytes.tolist(),
            "seconds": self.seconds.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Curve:
        """Return the curve that `to_dict` wrote.

        Raises
        ------
        ValueError
            Another format or version, or a field missing, unknown or wrong.
        """
        fields = check_header(data, FORMAT, VERSION)
        if set(fields) != {"bytes", "seconds"}:
            raise ValueError(f"a curve has the fields 'bytes' and 'seconds', got {sorted(fields)}")
        for name, kind in (("bytes", int), ("seconds", int | float)):
            values = fields[name]
            if not isinstance(values, list) or not all(
                isinstance(value, kind) and not isinstance(value, bool) for value in values
            ):
                raise ValueError(f"malformed curve: {name} must be a list of numbers")
        try:
            return cls(fields["bytes"], fields["seconds"])
        except OverflowError as error:
            raise ValueError(f"malformed curve: {error}") from error
