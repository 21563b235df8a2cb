"""Figures of experiments on the simulator, from plain data. Needs matplotlib.

Files have no dates in them: the same data gives the same bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

__all__ = [
    "FORMATS",
    "access_grid",
    "check_formats",
    "heat_map",
    "line_figure",
    "overhead_grid",
    "static_grid",
]

FORMATS = ("pdf", "png", "svg")
"""Formats of figures."""

_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "ModDate": None},
    "png": {"Software": None},
    "svg": {"Date": None},
}
_SETTINGS: Any = {
    "svg.hashsalt": "rotor",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "savefig.dpi": 150,
}
_COLORS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#222222"),
    *("#cc7711", "#5533aa", "#119988", "#bb88cc"),
)
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<", ">", "p", "h")
_DASHES = ("--", ":", "-.")
_COLUMNS = 4
P = ParamSpec("P")


def check_formats(formats: Iterable[str]) -> None:
    """Raise unless figures of these formats can be written.

    Raises
    ------
    ValueError
        A format is unknown.
    ImportError
        matplotlib is not installed; the message names the extra that brings it.
    """
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"no figure format is named {name!r}, expected {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib: install it with `pip install rotor[plot]`, or ask for no "
            "formats"
        ) from error


def _styled(draw: Callable[P, list[Path]]) -> Callable[P, list[Path]]:
    """Draw with our settings of matplotlib, whatever those of the user are."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> list[Path]:
        from matplotlib import rc_context, rcdefaults, rcParams

        with rc_context():
            rcdefaults()
            rcParams.update(_SETTINGS)
            return draw(*args, **kwargs)

    return styled


def _save(figure: Any, stem: Path, formats: Sequence[str]) -> list[Path]:
    written = []
    for name in formats:
        path = stem.with_name(f"{stem.name}.{name}")
        partial = stem.with_name(f".{stem.name}.partial.{name}")
        try:
            figure.savefig(partial, format=name, metadata=_METADATA[name])
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        written.append(path)
    return written


def _grid(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.2 * columns + 0.4, 2.6 * rows + 0.7), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": max(2.5, 5.5 - 0.5 * index),
        "linewidth": max(0.8, 2.4 - 0.25 * index),  # what lies below shows
    }


def _gaps(values: Iterable[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _shared_legend(figure: Any, axes: Sequence[Any]) -> None:
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=min(7, max(1, len(entries))),
        frameon=False,
    )


def _failure(ax: Any, curve: Mapping[str, Any], color: str) -> None:
    failure = curve["failure"]
    if failure is not None:
        dash = ":" if failure["kind"] == "oom" else "--"
        ax.axvline(failure["ratio"], color=color, linestyle=dash, linewidth=0.9)


@_styled
def overhead_grid(
    panels: Sequence[Mapping[str, Any]], stem: Path, formats: Sequence[str]
) -> list[Path]:
    """Slow-down against memory, a panel for each log.

    A curve has a gap where a run failed. At its smallest successful ratio stands a vertical line
    where it failed below that: dotted for out of memory, dashed for thrashing. What constants take
    is black, what the largest operation takes beside them grey.

    Parameters
    ----------
    panels
        Each with "title", "constant_ratio", "bottleneck_ratio" and "curves"; a curve has "label",
        "ratios" ascending, "values", "least" and "most" (None where all trials failed), "has_band",
        and "failure" (None, or "ratio" and "kind", "oom" or "thrash").
    stem
        The file without the ending of its format.
    formats
        Out of `FORMATS`.

    Returns
    -------
    list of Path
        The files written.
    """
    figure, axes = _grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        constant = panel["constant_ratio"]
        ax.axvspan(0, constant, color="black", linewidth=0)
        ax.axvspan(constant, constant + panel["bottleneck_ratio"], color="0.8", linewidth=0)
        for index, curve in enumerate(panel["curves"]):
            style = _style(index)
            ax.step(
                curve["ratios"], _gaps(curve["values"]), where="post", label=curve["label"], **style
            )
            if curve["has_band"]:
                ax.fill_between(
                    curve["ratios"],
                    _gaps(curve["least"]),
                    _gaps(curve["most"]),
                    step="post",
                    color=style["color"],
                    alpha=0.2,
                    linewidth=0,
                )
            _failure(ax, curve, style["color"])
        ax.set_xlim(0, 1.1)
        ax.set_ylim(0.9, 2.0)
        ax.set_title(panel["title"])
        ax.set_xlabel("memory ratio")
        ax.set_ylabel("overhead (x)")
    _shared_legend(figure, axes)
    return _save(figure, stem, formats)


@_styled
def access_grid(
    panels: Sequence[Mapping[str, Any]], stem: Path, formats: Sequence[str]
) -> list[Path]:
    """Accesses to metadata against memory, on a logarithmic scale; see `overhead_grid`."""
    figure, axes = _grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        for index, curve in enumerate(panel["curves"]):
            style = _style(index)
            heights = [value if value else math.nan for value in curve["values"]]
            ax.plot(curve["ratios"], heights, label=curve["label"], **style)
            _failure(ax, curve, style["color"])
        ax.set_xlim(0, 1.1)
        ax.set_yscale("log")
        ax.set_title(panel["title"])
        ax.set_xlabel("memory ratio")
        ax.set_ylabel("accesses to metadata")
    _shared_legend(figure, axes)
    return _save(figure, stem, formats)


@_styled
def static_grid(
    panels: Sequence[Mapping[str, Any]], stem: Path, formats: Sequence[str]
) -> list[Path]:
    """Static plans and heuristics, a panel for each log.

    Parameters
    ----------
    panels
        Each with "title", "constant_ratio", "bottleneck_ratio", and "curves": "label", "ratios",
        "values" (slow-downs, None for a failure), and "is_static" (drawn dashed).
    stem, formats
        As for `overhead_grid`.
    """
    figure, axes = _grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        constant = panel["constant_ratio"]
        ax.axvspan(0, constant, color="black", linewidth=0)
        ax.axvspan(constant, constant + panel["bottleneck_ratio"], color="0.8", linewidth=0)
        for index, curve in enumerate(panel["curves"]):
            style = _style(index) | {"linestyle": "-", "linewidth": 1.8, "markersize": 3.5}
            if curve["is_static"]:
                style |= {"linestyle": "--", "linewidth": 1.0}
            ax.step(
                curve["ratios"], _gaps(curve["values"]), where="post", label=curve["label"], **style
            )
        ax.set_xlim(0, 1.1)
        ax.set_ylim(0.9, 2.0)
        ax.set_title(panel["title"])
        ax.set_xlabel("memory ratio")
        ax.set_ylabel("overhead (x)")
    _shared_legend(figure, axes)
    return _save(figure, stem, formats)


@_styled
def line_figure(
    panels: Sequence[Mapping[str, Any]],
    stem: Path,
    formats: Sequence[str],
    *,
    x_label: str,
    y_label: str,
) -> list[Path]:
    """Curves on logarithmic scales, a panel for each setting.

    Parameters
    ----------
    panels
        Each with "title" and "curves": "label", "x", "y" (None or 0: not drawn), "is_reference"
        (drawn dashed, without marks).
    stem, formats
        As for `overhead_grid`.
    x_label, y_label
        Of the axes.
    """
    figure, axes = _grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        plain = dashed = 0
        for curve in panel["curves"]:
            heights = [value if value else math.nan for value in curve["y"]]
            if curve["is_reference"]:
                dash = _DASHES[dashed % len(_DASHES)]
                ax.plot(
                    curve["x"], heights, label=curve["label"], color="0.4", linestyle=dash, lw=0.9
                )
                dashed += 1
            else:
                ax.plot(curve["x"], heights, label=curve["label"], **_style(plain))
                plain += 1
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(panel["title"])
        ax.set_xlabel(x_label)
        ax.set_ylabel(y_label)
    _shared_legend(figure, axes)
    return _save(figure, stem, formats)


@_styled
def heat_map(
    resident: Sequence[Sequence[bool]],
    stem: Path,
    formats: Sequence[str],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> list[Path]:
    """Which storages are in memory as time goes on: dark where they are.

    Parameters
    ----------
    resident
        Of each storage, of each moment.
    stem, formats
        As for `overhead_grid`.
    title, x_label, y_label
        Of the figure.
    """
    figure, axes = _grid(1)
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
    return _save(figure, stem, formats)
