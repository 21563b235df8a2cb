"""Plans of every kind, as text, pages and traces."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rotor.report.about import About
from rotor.report.html import plan_page
from rotor.report.text import (
    Text,
    dynamic_figures,
    part_rows,
    pieces_figures,
    plain_figures,
    plan_figures,
    program_rows,
    stage_notes,
    stage_rows,
    step_rows,
    table,
    why_rows,
)
from rotor.report.trace import is_trace, write_plan_trace

Make = Callable[[Any], Any]


class View(NamedTuple):
    """Text, table and page of a plan."""

    head: str
    """First cell of the text."""
    figures: Make
    """Rows of name and value, of text and page."""
    rows: Make
    """Table of the model's parts, its head first."""
    title: str = ""
    """Heading of that table in the page; empty: a script draws one there."""
    notes: Make = lambda plan: []
    """Lines below the text."""


VIEWS = {
    "chain": View("plan", plan_figures, stage_rows, "All stages", stage_notes),
    "graph": View("plan", plan_figures, program_rows),
    "parts": View("plan", pieces_figures, part_rows, "Parts"),
    "dynamic": View("no plan: decided while it runs", dynamic_figures, step_rows, "Last steps"),
    "plain": View(
        "no plan: runs as plain PyTorch",
        plain_figures,
        why_rows,
        "Engines",
        lambda plan: ["", str(table(why_rows(plan)))],
    ),
}
"""By `rotor.meter.step_meter.Metered.engine`."""


def describe(plan: Any) -> Text:
    """Return limit, predicted and measured peak, and time of a plan."""
    view = VIEWS[plan.engine]
    figures = table([[view.head, ""], *view.figures(plan)])
    return Text("\n".join([figures, *view.notes(plan)]))


def tabulate(plan: Any) -> Text:
    """Return a table of the parts of the model, and the plan's choice for each."""
    return table(VIEWS[plan.engine].rows(plan))


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a report; ValueError: it is neither a page nor a trace."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a report is written to a path, such as report.html, not to {path!r}")
    file = Path(path)
    if not (_is_page(file) or is_trace(file)):
        raise ValueError(
            "a report is written as a page, to a .html file, or as a trace, to a .json or "
            f".json.gz file, not {file.name}"
        )
    return file


def write(plan: Any, file: Path, about: About | None = None) -> None:
    """Write a plan as a page, with a heading, or as a trace, by the name of the file."""
    if _is_page(file):
        write_page(plan, file, about)
    else:
        write_plan_trace(plan, file)


def write_page(plan: Any, file: Path, about: About | None = None) -> None:
    """Write a plan as a page, with a heading."""
    view = VIEWS[plan.engine]
    tables = [(view.title, view.rows(plan))] if view.title else []
    file.write_text(plan_page(plan, view.figures(plan), tables, about), encoding="utf-8")


def _is_page(file: Path) -> bool:
    return file.suffix.lower() in (".html", ".htm")
