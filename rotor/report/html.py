"""Graphs, programs and plans as self-contained pages: no network, no other files."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rotor.graph.chains import ChainProgram
from rotor.graph.contraction import places
from rotor.graph.summaries import summarise
from rotor.graph.transfers import transfers_of
from rotor.report.about import About
from rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rotor.common.timeline import Timeline
    from rotor.graph.graph import Graph
    from rotor.graph.program import Program
    from rotor.graph.summaries import Summary


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_MOST_RECOMPUTED = 25
_PHASES = ("forward", "loss", "backward")
_SCRIPTS = ("page_data.js", "page_timeline.js", "page_graph.js", "page_table.js")
_TEXT = frozenset({"operation", "module", "phase", "stage", "how", "part", "step"})
_NO_DATA: dict[str, Any] = {name: [] for name in ("ops", "storages", "program", "before", "peak")}
_NO_DATA |= dict.fromkeys(("limit", "measured", "traced", "plain", "labels"))
_NO_DATA |= {"boundary": 0, "own": 0}
Rows = Sequence[Any]
"""Rows of text."""
Tables = Sequence[tuple[str, Rows]]


def graph_page(
    graph: Graph,
    program: Program | None = None,
    limit_bytes: int | None = None,
    measured_bytes: int | Sequence[int] | None = None,
) -> str:
    """Return a page on a graph, and on a program of it.

    The limit is drawn as a line in the timeline. `measured_bytes` is the measured peak, or a level
    for each run of the program.
    """
    measured = _levels(program, measured_bytes)
    rows = [
        ["operations", str(len(graph))],
        ["storages", str(len(graph.storages))],
        ["every operation once", format_seconds(graph.total_time)],
    ]
    summary = None if program is None else summarise(program)
    data = _data(graph, program, summary)
    data |= {"limit": limit_bytes, "measured": measured}
    if program is not None and summary is not None:
        rows += _program_rows(program, summary)
        rows.append(["recomputation", f"{_recomputation(program):+.1%}"])
    if limit_bytes is not None:
        rows.append(["limit", format_bytes(limit_bytes)])
    return _page(About(model=graph.name or "graph"), rows, _again_tables(graph, summary), data)


def program_page(
    program: Program, figures: Rows, tables: Tables = (), limit_bytes: int | None = None
) -> str:
    """Return a page on a program, or on a schedule as one: figures, timeline, operations.

    `figures` are rows of name and value. `tables` have a title, and a table, its head first; by
    default what is recomputed most.
    """
    summary = summarise(program)
    data = _data(program.graph, program, summary) | {"limit": limit_bytes}
    return _page(About(), figures, tables or _again_tables(program.graph, summary), data)


def plan_page(plan: Any, figures: Rows, tables: Tables = (), about: About | None = None) -> str:
    """Return a page on a plan: figures, timeline, operations.

    `figures` and `tables` are those of `program_page`. Without a program, as of a plan of parts and
    of steps whose memory is decided while they run, the timeline is that of the last metered step.
    """
    about, program = about or About(), getattr(plan, "program", None)
    if program is None:
        return _page(about, figures, tables, _measured_data(plan))
    rows, graph, summary = dict(figures), program.graph, summarise(program)
    rows[f"bytes beside the {_what(program)}"] = format_bytes(plan.executor_bytes)
    rows |= dict(_program_rows(program, summary))
    data = _data(graph, program, summary) | {"own": plan.executor_bytes}
    data |= {"limit": plan.limit_bytes, "measured": plan.measured_bytes}
    if (measured := plan.measured_timeline) is not None:
        moments = (measured.on_clock_of(plan.predicted_timeline) * 1e9).round().astype(int)
        data["traced"] = _points(moments.tolist(), measured.live_bytes.tolist())
    return _page(about, list(rows.items()), tables or _again_tables(graph, summary), data)


def _measured_data(plan: Any) -> dict[str, Any]:
    timeline: Timeline | None = plan.measured_timeline
    data = _NO_DATA | {"planned": timeline is not None}
    data |= {"limit": plan.limit_bytes, "measured": plan.measured_bytes}
    if timeline is None:
        return data
    moments = (timeline.seconds * 1e9).round().astype(int).tolist()
    levels = timeline.live_bytes.tolist()
    # The time before the first allocation of a first step would take most of the picture.
    first = next((k for k, level in enumerate(levels) if level > max(levels) / 100), 0)
    begin, plain = moments[first], plan.unplanned_timeline
    after = [moment - begin for moment in moments[first:]]
    data["traced"] = [(0, levels[0]), *_points(after, levels[first:])]
    data["marks"] = [max(round(seconds * 1e9) - begin, 0) for _, seconds in timeline.marks]
    if plain is not None:
        moments = [max(round(seconds * 1e9) - begin, 0) for seconds in plain.seconds.tolist()]
        data["plain"] = _points(moments, plain.live_bytes.tolist())
    return data


def _points(moments: Sequence[int], levels: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(moments, levels, strict=True))


def _plain(program: Program) -> list[tuple[int, int]] | None:
    """Return (nanoseconds, bytes) of a step without recomputation; ``None`` if this is one."""
    operations = program.graph.operations
    if len(program.actions) == len(operations):
        return None
    moments = [0, *accumulate(max(op.cost_ns, 1) for op in operations)]
    return _points(moments, [*program.unplanned.timeline().peak_bytes.tolist(), 0])


def _what(program: Program) -> str:
    return "stages" if isinstance(program, ChainProgram) else "graph"


def _program_rows(program: Program, summary: Summary) -> list[Any]:
    what = ("operations run again", len(program.graph))
    if isinstance(program, ChainProgram):
        what = ("stages recomputed", len(program.chain))
    again = sum(entry.runs - 1 for entry in summary.again)
    offloaded = [
        ["offloaded and fetched back", format_bytes(summary.offloaded_bytes)],
        ["waits for the tier, predicted", format_seconds(program.waited)],
    ]
    return [
        [f"peak of the {_what(program)}, predicted", format_bytes(program.peak_bytes)],
        ["step, predicted", format_seconds(program.makespan)],
        [what[0], f"{len(summary.again)} of {what[1]}, {again} runs"],
        ["kept for the backward", format_bytes(summary.kept_bytes)],
        *(offloaded if program.link is not None else []),
        ["dropped and recomputed", format_bytes(summary.recomputed_bytes)],
        ["dropped, not needed again", format_bytes(summary.dropped_bytes)],
    ]


def _recomputation(program: Program) -> float:
    """Return the time of recomputed operations, against that of a step without."""
    total = program.graph.total_time
    return (program.makespan - program.waited) / total - 1 if total else 0.0


def _again_tables(graph: Graph, summary: Summary | None) -> Tables:
    rows = [["operation", "module", "phase", "runs", "time of one", "extra time"]]
    for entry in () if summary is None else summary.again[:_MOST_RECOMPUTED]:
        op = graph.operations[entry.operation]
        cost, extra = format_seconds(op.cost_ns / 1e9), format_seconds(entry.extra_ns / 1e9)
        rows.append([op.name, op.module, op.phase, str(entry.runs), cost, extra])
    return [("Recomputed most", rows)] if len(rows) > 1 else []


def _levels(
    program: Program | None, measured: int | Sequence[int] | None
) -> int | list[int] | None:
    """Return a peak, or the level of each run; raise ValueError for another number of levels."""
    if measured is None or isinstance(measured, int):
        return measured
    expected = 0 if program is None else len(program)
    if len(measured) != expected:
        raise ValueError(
            f"measured_bytes has {len(measured)} levels, expected one number, or one for each of "
            f"the program's {expected} runs"
        )
    return [int(level) for level in measured]


def _data(graph: Graph, program: Program | None, summary: Summary | None) -> dict[str, Any]:
    """Return the data of the script; rows instead of objects keep large pages small."""
    runs = [1] * len(graph) if program is None else program.runs.tolist()
    kinds = [op.phase for op in graph.operations] if summary is None else summary.operations
    fates = [""] * len(graph.storages)
    if summary is not None:
        fates = [storage.fate for storage in summary.storages]
    # A stage is one operation, and needs no frame around it.
    shown = [""] * len(graph) if isinstance(program, ChainProgram) else places(graph)
    data = _NO_DATA | {
        "ops": [
            [
                op.name,
                op.module,
                _PHASES.index(op.phase),
                op.cost_ns,
                op.workspace_bytes,
                list(op.inputs),
                list(op.outputs),
                int(op.random) + 2 * int(op.once),
                runs[index],
                kinds[index],
                shown[index],
                str(op.extra.get("source", "")),
            ]
            for index, op in enumerate(graph.operations)
        ],
        "storages": [
            [storage.bytes, int(bool(storage.pinned)), graph.producers[s], fates[s]]
            for s, storage in enumerate(graph.storages)
        ],
        "planned": program is not None,
    }
    if program is None or summary is None:
        return data
    timeline = program.timeline(runs_only=True)
    data |= {"program": program.ops.tolist(), "boundary": summary.boundary}
    data |= {"before": timeline.before_bytes.tolist(), "peak": timeline.peak_bytes.tolist()}
    data["plain"] = _plain(program)
    if len(program.actions) > len(program.ops):
        data |= _moves(program)
    if isinstance(program, ChainProgram):
        data["labels"] = list(map(str, program.sequence))
    return data


def _moves(program: Program) -> dict[str, Any]:
    """Return the transfers of a program, and the waits before its runs, in nanoseconds."""
    found = transfers_of(program, 1)
    kinds = ("written", "fetched")
    rows = [
        [kinds.index(one.kind), one.storage, one.begin_ns, one.end_ns]
        for one in sorted(found.moved, key=lambda one: one.begin_ns)
    ]
    return {"moved": rows, "waits": found.waits_ns}


def _figures(rows: Rows) -> str:
    cells = [
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in rows
    ]
    return "\n".join(['<dl class="figures">', *cells, "</dl>"])


def _table(title: str, rows: Rows) -> list[str]:
    kinds = ["" if name in _TEXT else ' class="number"' for name in rows[0]]
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = zip(kinds, row, strict=True)
        text = "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in cells)
        lines.append(f"<tr>{text}</tr>")
    table = ['<div class="scroll"><table class="rows">', *lines, "</table></div>"]
    return [f"<h2>{html.escape(title)}</h2>", *table]


def _heading(about: About, limit: int | None) -> list[str]:
    title = about.title("" if limit is None else format_bytes(limit)) or "A training step"
    facts = html.escape(" \u00b7 ".join(about.facts))
    command = f"<code>{html.escape(about.command)}</code>" if about.command else ""
    lines = "<br>".join(part for part in (facts, command) if part)
    return [f"<h1>{html.escape(title)}</h1>", *([f'<p class="about">{lines}</p>'] if lines else [])]


def _page(about: About, rows: Rows, tables: Tables, data: dict[str, Any]) -> str:
    files = resources.files("rotor.report")
    style = (files / "page.css").read_text(encoding="utf-8")
    scripts = [(files / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    script = "\n".join(['"use strict";', "(function () {", *scripts, "})();"])
    # "</" would end the element, "<!--" would change how it is read.
    plain = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>rotor: {html.escape(about.model or 'training step')}</title>",
        f"<style>\n{style}</style></head><body>",
        *_heading(about, data["limit"]),
        _figures(rows),
    ]
    own_table = bool(data["ops"]) and data["labels"] is None
    what = "Stages" if data["labels"] else "Operations"
    if data["planned"]:
        schedule = " and schedule" if data["program"] else ""
        parts.append(f"<h2>Live bytes{schedule}</h2>")
        parts.append('<div id="timeline-tools" class="tools"></div><div id="timeline"></div>')
    parts += [
        "<section>" if data["ops"] else "<section hidden>",
        f"<h2>{what}</h2>",
        '<div id="tools" class="tools"></div><div id="graph"></div><div id="details"></div>',
        "</section>",
        *[line for name, table in tables for line in _table(name, table)],
        *(['<h2>Table</h2><div id="table-tools" class="tools"></div>'] if own_table else []),
        *(['<div id="table"></div>'] if own_table else []),
        "<noscript>The timeline and the graph are drawn by a script in this page.</noscript>",
        f'<script type="application/json" id="data">{plain}</script>',
        f"<script>\n{script}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"
