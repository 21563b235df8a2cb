"""Plans as pictures, with matplotlib."""

from __future__ import annotations

from typing import Any

from rotor.algorithms.curve import new_axes

_MIB = 2**20
_MS = 1e3


def plot_timeline(plan: Any, ax: Any = None) -> Any:
    """Draw the live bytes of a step, predicted, measured, and the limit; return the axes.

    Raises ImportError without matplotlib, and ValueError for a plan without any timeline.
    """
    predicted = plan.predicted_timeline
    measured = plan.measured_timeline
    if predicted is None and measured is None:
        raise ValueError("no timeline to draw: nothing is predicted, and no step was metered yet")
    ax = new_axes("plot_timeline") if ax is None else ax
    if predicted is not None:
        live = predicted.live_bytes / _MIB
        x = predicted.seconds * _MS
        ax.fill_between(x, [*live, live[-1]], step="post", alpha=0.3)
        ax.step(x, [*live, live[-1]], where="post", label="predicted")
    if measured is not None:
        seconds = measured.seconds if predicted is None else measured.on_clock_of(predicted)
        ax.step(
            seconds * _MS, measured.live_bytes / _MIB, where="post", label="measured", linewidth=1
        )
    elif plan.measured_bytes is not None:
        ax.axhline(
            plan.measured_bytes / _MIB, label="measured peak", linestyle=":", color="tab:green"
        )
    ax.axhline(plan.limit_bytes / _MIB, label="limit", linestyle="--", color="tab:red")
    ax.set_xlabel("time of the step (ms)")
    ax.set_ylabel("live bytes (MiB)")
    ax.set_ylim(bottom=0)
    ax.legend()
    return ax
