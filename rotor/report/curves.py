"""Curves of time against memory as pictures: percent of a plain step on both axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rotor.algorithms.curve import Curve
from rotor.report.figures import show_dollars, styled
from rotor.units import format_bytes

_FAR = 2
_MARKERS = ("s", "^", "D", "v")
_COLORS = ("#ee6677", "#228833", "#ccbb44", "#aa3377")


class Point(NamedTuple):
    """Another method beside a curve: its name, its peak, and the time of its step."""

    name: str
    bytes: int
    seconds: float


@styled
def write_curve(
    curve: Curve,
    path: Path,
    *,
    plain: Point,
    limit_bytes: int | None = None,
    points: Sequence[Point] = (),
    title: str = "",
) -> list[Path]:
    """Draw a curve to a file, in percent of a plain step; return the path in a list.

    `plain` is the step that is 100 % on both axes, and the point of the limit is marked. `points`
    are other methods, with seconds on the clock of `plain`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    ax = figure.subplots()
    share = curve.bytes / plain.bytes * 100
    times = curve.seconds / plain.seconds * 100
    right = max(105.0, float(share[-1]) * 1.05)
    ax.step(
        [*share, right], [*times, times[-1]], where="post", label="rotor", color="#4477aa", lw=2
    )
    ax.plot([100], [100], "o", color="0.35", label=f"{plain.name}: {format_bytes(plain.bytes)}")
    for index, point in enumerate(points):
        at = point.bytes / plain.bytes * 100, point.seconds / plain.seconds * 100
        color = _COLORS[index % len(_COLORS)]
        ax.plot(*at, _MARKERS[index % len(_MARKERS)], color=color, label=point.name, linestyle="")
        right = max(right, at[0] * 1.05)
    right = _mark_limit(ax, curve, plain, limit_bytes, right)
    ax.set_xlim(0, right)
    ax.set_ylim(min(95.0, float(times[-1]) - 5))
    ax.set_xlabel(f"memory of a training step (% of {plain.name})")
    ax.set_ylabel("time of a step (%)")
    if title:
        ax.set_title(title)
    ax.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.removeprefix(".").lower()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    show_dollars(figure)
    figure.savefig(path, format=kind, metadata=metadata)
    return [path]


def _mark_limit(
    ax: Any, curve: Curve, plain: Point, limit_bytes: int | None, right: float
) -> float:
    """Mark the point of a limit; return the right end of the axis."""
    if limit_bytes is None:
        return right
    share = limit_bytes / plain.bytes * 100
    text = f"limit: {format_bytes(limit_bytes)}"
    if limit_bytes > _FAR * plain.bytes:
        ax.plot([], [], " ", label=f"{text}, far to the right")
        return right
    if limit_bytes < curve.minimum_bytes:
        ax.axvline(share, color="#cc3311", linestyle="--", label=f"{text}: nothing fits")
        return right
    time = curve.at(limit_bytes) / plain.seconds * 100
    ax.axvline(share, color="#cc3311", linestyle="--", lw=1)
    ax.plot([share], [time], "o", color="#cc3311", ms=8, label=f"{text}, {time:.0f} % of the time")
    return max(right, share * 1.05)
