"""Figures of experiments on the simulator, from plain data. Needs matplotlib.

Files contain no dates: the same data gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rotor.report.figures import DASHES, curve_style, gaps, grid, panel_grid, save, styled

_FAILURES = {"oom": (":", "out of memory below"), "thrash": ("--", "thrashes below")}


def _failure(ax: Any, curve: Mapping[str, Any], color: str) -> None:
    failure = curve["failure"]
    if failure is not None:
        dash, text = _FAILURES[failure["kind"]]
        ax.axvline(failure["ratio"], color=color, linestyle=dash, linewidth=0.9)
        ax.plot([], [], color="0.3", linestyle=dash, linewidth=0.9, label=text)


def _zones(ax: Any, panel: Mapping[str, Any]) -> None:
    """Shade the memory that no run can do without, with names for the legend."""
    constant, bottleneck = panel["constant_ratio"], panel["bottleneck_ratio"]
    ax.axvspan(0, constant, color="black", linewidth=0, label="constants")
    ax.axvspan(constant, constant + bottleneck, color="0.8", linewidth=0, label="largest operation")


@grid
def overhead_grid(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draw slow-down against memory, a panel for each log.

    A curve has a gap where a run failed. A vertical line marks its smallest successful ratio if it
    failed below that: dotted for out of memory, dashed for thrashing. The black area is the memory
    of constants, the grey one the additional memory of the largest operation.

    Each panel has "title", "constant_ratio", "bottleneck_ratio" and "curves"; a curve has "label",
    "ratios" ascending, "values", "least" and "most" (None where all trials failed), "has_band", and
    "failure" (None, or "ratio" and "kind", "oom" or "thrash").
    """
    _zones(ax, panel)
    for index, curve in enumerate(panel["curves"]):
        style = curve_style(index)
        ax.step(curve["ratios"], gaps(curve["values"]), where="post", label=curve["label"], **style)
        if curve["has_band"]:
            ax.fill_between(
                curve["ratios"],
                gaps(curve["least"]),
                gaps(curve["most"]),
                step="post",
                color=style["color"],
                alpha=0.2,
                linewidth=0,
            )
        _failure(ax, curve, style["color"])
    ax.set(xlim=(0, 1.1), ylim=(0.9, 2.0), xlabel="memory ratio", ylabel="overhead (x)")


@grid
def access_grid(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draw accesses to metadata against memory, on a logarithmic scale; see `overhead_grid`."""
    for index, curve in enumerate(panel["curves"]):
        style = curve_style(index)
        heights = [value if value else math.nan for value in curve["values"]]
        ax.plot(curve["ratios"], heights, label=curve["label"], **style)
        _failure(ax, curve, style["color"])
    ax.set_xlim(0, 1.1)
    ax.set_yscale("log")
    ax.set_xlabel("memory ratio")
    ax.set_ylabel("accesses to metadata")


@grid
def static_grid(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draw static plans and heuristics, a panel for each log.

    Each panel has "title", "constant_ratio", "bottleneck_ratio", and "curves": "label", "ratios",
    "values" (slow-downs, None for a failure), and "is_static" (drawn dashed).
    """
    _zones(ax, panel)
    for index, curve in enumerate(panel["curves"]):
        style = curve_style(index) | {"linestyle": "-", "linewidth": 1.8, "markersize": 3.5}
        if curve["is_static"]:
            style |= {"linestyle": "--", "linewidth": 1.0}
        ax.step(curve["ratios"], gaps(curve["values"]), where="post", label=curve["label"], **style)
    ax.set(xlim=(0, 1.1), ylim=(0.9, 2.0), xlabel="memory ratio", ylabel="overhead (x)")


@grid
def line_figure(ax: Any, panel: Mapping[str, Any], *, x_label: str, y_label: str) -> None:
    """Draw curves on logarithmic scales, a panel for each setting.

    Each panel has "title" and "curves": "label", "x", "y" (None or 0: not drawn), "is_reference"
    (drawn dashed, without marks).
    """
    plain = dashed = 0
    for curve in panel["curves"]:
        heights = [value if value else math.nan for value in curve["y"]]
        if curve["is_reference"]:
            dash = DASHES[dashed % len(DASHES)]
            ax.plot(curve["x"], heights, label=curve["label"], color="0.4", linestyle=dash, lw=0.9)
            dashed += 1
        else:
            ax.plot(curve["x"], heights, label=curve["label"], **curve_style(plain))
            plain += 1
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)


@styled
def heat_map(
    resident: Sequence[Sequence[bool]],
    stem: Path,
    formats: Sequence[str],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> list[Path]:
    """Draw which storages are in memory over time, as dark points; return the files.

    Rows of `resident` are storages, columns are moments.
    """
    figure, axes = panel_grid(1)
    figure.set_size_inches(7.0, 3.6)
    axes[0].imshow(
        [[1.0 if cell else 0.0 for cell in row] for row in resident],
        aspect="auto",
        cmap="Greys",
        interpolation="nearest",
        origin="lower",
        vmin=0.0,
        vmax=1.0,
    )
    axes[0].grid(False)
    axes[0].set_title(title)
    axes[0].set_xlabel(x_label)
    axes[0].set_ylabel(y_label)
    return save(figure, stem, formats)
