"""Parts that figures share: formats, style, files without dates. Needs matplotlib.

The same data gives the same bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from rotor.chain import new_file

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
COLORS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#222222"),
    *("#cc7711", "#5533aa", "#119988", "#bb88cc"),
)
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<", ">", "p", "h")
DASHES = ("--", ":", "-.")
_COLUMNS = 4
P = ParamSpec("P")
Grid = Callable[..., list[Path]]


def check_formats(formats: Iterable[str]) -> None:
    """Raise ValueError for an unknown format of figures, ImportError if matplotlib is missing."""
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"no figure format is named {name!r}, expected {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib: `pip install matplotlib`, or in a clone of rotor "
            '`pip install ".[plot]"`; or ask for no formats'
        ) from error


def styled(draw: Callable[P, list[Path]]) -> Callable[P, list[Path]]:
    """Wrap a function to draw with our settings of matplotlib instead of the user's."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> list[Path]:
        from matplotlib import rc_context, rcdefaults, rcParams

        with rc_context():
            rcdefaults()
            rcParams.update(_SETTINGS)
            return draw(*args, **kwargs)

    return drawn


def save(figure: Any, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write a figure in each format, completely or not at all; return the files."""
    show_dollars(figure)
    written = []
    for name in formats:
        path = stem.with_name(f"{stem.name}.{name}")
        with new_file(path) as file:
            figure.savefig(file, format=name, metadata=_METADATA[name])
        written.append(path)
    return written


def show_dollars(figure: Any) -> None:
    """Have each "$" in a figure be one, not begin a formula, but in the numbers of its axes."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math("$" not in text.get_text() or "\\mathdefault" in text.get_text())


def panel_grid(count: int, width: float = 3.2, height: float = 2.6) -> tuple[Any, list[Any]]:
    """Return a figure of `count` panels, of these inches each, and their axes."""
    from matplotlib.figure import Figure

    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns + 0.4, height * rows + 0.7), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def grid(
    draw: Callable[..., Any], single: float = 3.2, height: float = 2.6, title: str = "large"
) -> Grid:
    """Return a function that draws panels side by side to files, with a legend.

    `draw` is called with axes, a panel, and the keywords. A panel has a "title", of letters of the
    size `title`, and is 3.2 inches wide, one alone `single`. The function takes the panels, the
    file without the ending of its format, the formats out of `FORMATS`, and the keywords, and
    returns the files.
    """

    @functools.wraps(draw)
    def drawn(
        panels: Sequence[Mapping[str, Any]], stem: Path, formats: Sequence[str], **given: Any
    ) -> list[Path]:
        figure, axes = panel_grid(len(panels), 3.2 if len(panels) > 1 else single, height)
        for ax, panel in zip(axes, panels, strict=True):
            ax.set_title(panel["title"], fontsize=title)
            draw(ax, panel, **given)
        _add_legend(figure, axes)
        return save(figure, stem, formats)

    return styled(drawn)


def curve_style(index: int) -> dict[str, Any]:
    """Return colour, mark and width of a curve by its number; later ones are drawn thinner."""
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": max(2.5, 5.5 - 0.5 * index),
        "linewidth": max(0.8, 2.4 - 0.25 * index),  # keeps curves below visible
    }


def gaps(values: Iterable[float | None]) -> list[float]:
    """Return values with NaN, at which curves break, for None."""
    return [math.nan if value is None else value for value in values]


def _add_legend(figure: Any, axes: Sequence[Any]) -> None:
    """Add one legend below all panels, each label once."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=max(1, min(7, len(entries), int(figure.get_figwidth() / 1.4))),
        frameon=False,
    )
