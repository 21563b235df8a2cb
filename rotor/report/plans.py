"""Plans of every kind, as text, pages and traces."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rotor.report.about import About
from rotor.report.drawing import write_plan
from rotor.report.html import chain_page, measured_page
from rotor.report.text import (
    Text,
    dynamic_figures,
    dynamic_report,
    dynamic_table,
    graph_report,
    operation_table,
    part_rows,
    pieces_figures,
    pieces_report,
    pieces_table,
    plain_figures,
    plain_report,
    plan_report,
    stage_rows,
    stage_table,
    step_rows,
    why_rows,
)
from rotor.report.tracing import is_trace, write_plan_trace


def _write_chain(plan: Any, path: Path, about: About) -> None:
    path.write_text(chain_page(plan, stage_rows(plan), about), encoding="utf-8")


def _write_parts(plan: Any, path: Path, about: About) -> None:
    text = measured_page(plan, pieces_figures(plan), ("Parts", part_rows(plan)), about)
    path.write_text(text, encoding="utf-8")


def _write_steps(plan: Any, path: Path, about: About) -> None:
    text = measured_page(plan, dynamic_figures(plan), ("Last steps", step_rows(plan)), about)
    path.write_text(text, encoding="utf-8")


def _write_plain(plan: Any, path: Path, about: About) -> None:
    text = measured_page(plan, plain_figures(plan), ("Engines", why_rows(plan)), about)
    path.write_text(text, encoding="utf-8")


class View(NamedTuple):
    """Functions of a plan: its text, its table, and the writer of its page."""

    report: Callable[[Any], Text]
    table: Callable[[Any], Text]
    write_page: Callable[[Any, Path, About], Any]


VIEWS = {
    "chain": View(plan_report, stage_table, _write_chain),
    "graph": View(graph_report, operation_table, write_plan),
    "parts": View(pieces_report, pieces_table, _write_parts),
    "dynamic": View(dynamic_report, dynamic_table, _write_steps),
    "plain": View(plain_report, plain_report, _write_plain),
}
"""Functions by `rotor.meter.step_meter.Metered.engine`."""


def describe(plan: Any) -> Text:
    """Return limit, predicted and measured peak, and time of a plan."""
    return VIEWS[plan.engine].report(plan)


def tabulate(plan: Any) -> Text:
    """Return a table of the parts of the model, and the plan's choice for each."""
    return VIEWS[plan.engine].table(plan)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a report; ValueError: it is neither a page nor a trace."""
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
        VIEWS[plan.engine].write_page(plan, file, about or About())
    else:
        write_plan_trace(plan, file)


def _is_page(file: Path) -> bool:
    return file.suffix.lower() in (".html", ".htm")
