"""Graphs, programs and plans as self-contained pages: no network, no other files."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rotor.algorithms.no_checkpoint import NoCheckpoint
from rotor.graph.program import simulate
from rotor.graph.transfers import transfers_of
from rotor.report.about import About
from rotor.report.text import aside_rows, loss_rows, offload_rows
from rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rotor.algorithms.sequence import Operation
    from rotor.algorithms.sequence import Sequence as Schedule
    from rotor.chain import Chain
    from rotor.common.timeline import PredictedTimeline, Timeline
    from rotor.engines.chain.plan import Plan
    from rotor.engines.graph.planned import GraphPlan
    from rotor.graph.graph import Graph
    from rotor.graph.program import Program
    from rotor.graph.summaries import Summary


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_MOST_RECOMPUTED = 25
_PHASES = ("forward", "loss", "backward")
_SCRIPTS = ("page_data.js", "page_timeline.js", "page_graph.js", "page_table.js")
_TEXT = frozenset({"operation", "module", "phase", "stage", "how", "part", "step"})


def graph_page(
    graph: Graph,
    places: Sequence[str],
    program: Program | None = None,
    summary: Summary | None = None,
    limit_bytes: int | None = None,
    measured_bytes: int | Sequence[int] | None = None,
) -> str:
    """Return a page on a graph, and on a program of it, which comes with its summary.

    `places` are the modules that each operation is shown in. The limit is drawn as a line in the
    timeline. `measured_bytes` is the measured peak, or a level for each run of the program.
    """
    _check_levels(program, measured_bytes)
    rows = [
        ("operations", str(len(graph))),
        ("storages", str(len(graph.storages))),
        ("every operation once", format_seconds(graph.total_time)),
    ]
    if program is not None and summary is not None:
        rows += _program_rows(program, summary)
    if limit_bytes is not None:
        rows.append(("limit", format_bytes(limit_bytes)))
    data = _data(graph, places, program, summary)
    data |= {"limit": limit_bytes, "measured": _levels(measured_bytes), "own": 0, "traced": None}
    data["plain"] = None if program is None else _plain_graph(program)
    tables = [("Recomputed most", _again_table(graph, summary))]
    return _page(About(model=graph.name or "graph"), rows, tables, data)


def plan_page(
    plan: GraphPlan, places: Sequence[str], summary: Summary, about: About | None = None
) -> str:
    """Return a page on the plan of a captured model: limit, peaks, timeline, operations."""
    graph, program = plan.graph, plan.program
    measured = plan.measured_bytes
    rows = [
        ("limit", format_bytes(plan.limit_bytes)),
        ("peak, predicted", format_bytes(plan.predicted_bytes)),
        ("peak, measured", "not yet" if measured is None else format_bytes(measured)),
        ("peak without recomputation", format_bytes(plan.unlimited_bytes)),
        *_loss_rows(plan),
        *((name, value) for name, value in offload_rows(plan)),
        ("set aside after metering", format_bytes(plan.reserve_bytes)),
        ("bytes beside the graph", format_bytes(plan.executor_bytes)),
        *_program_rows(program, summary),
        ("operations", str(len(graph))),
    ]
    data = _data(graph, places, program, summary)
    data |= {"limit": plan.limit_bytes, "measured": _levels(measured), "own": plan.executor_bytes}
    data["traced"] = _traced(plan.measured_timeline, plan.predicted_timeline)
    data["plain"] = _plain_graph(program)
    tables = [("Recomputed most", _again_table(graph, summary))]
    return _page(about or About(), rows, tables, data)


def chain_page(plan: Plan, stages: Sequence[Sequence[str]], about: About | None = None) -> str:
    """Return a page on the plan of a chain: figures, timeline, operations, stages."""
    ideal, measured = plan.chain.ideal_time, plan.measured_bytes
    slower = f"{plan.sequence.makespan / ideal - 1:+.1%}" if ideal else "none"
    recomputed = f"{len(plan.schedule.recomputed)} of {len(plan.chain)}"
    rows = [
        ("limit", format_bytes(plan.limit_bytes)),
        ("peak, predicted", format_bytes(plan.predicted_bytes)),
        ("peak, measured", "not yet" if measured is None else format_bytes(measured)),
        ("peak without recomputation", format_bytes(plan.unlimited_bytes)),
        *_loss_rows(plan),
        ("set aside after metering", format_bytes(plan.reserve_bytes)),
        ("bytes beside the stages", format_bytes(plan.executor_bytes)),
        ("step, predicted", format_seconds(plan.makespan)),
        ("recomputation", slower),
        ("stages recomputed", recomputed),
    ]
    data = _chain_data(plan)
    data["traced"] = _traced(plan.measured_timeline, plan.predicted_timeline)
    return _page(about or About(), rows, [("All stages", stages)], data)


def measured_page(
    plan: Any,
    figures: Sequence[Sequence[str]],
    table: tuple[str, Sequence[Sequence[str]]],
    about: About | None = None,
) -> str:
    """Return a page on a model without a single plan: figures, last metered step, a table.

    `plan` is a plan of parts, or the record of steps whose memory is decided while they run.
    `figures` are rows of name and value. `table` is a title, and a table, its head first.
    """
    timeline: Timeline | None = plan.measured_timeline
    data: dict[str, Any] = {"ops": [], "storages": [], "program": [], "before": [], "peak": []}
    data |= {"boundary": 0, "own": 0, "lanes": [], "planned": timeline is not None, "plain": None}
    data |= {"limit": plan.limit_bytes, "measured": plan.measured_bytes, "traced": None}
    if timeline is not None:
        moments = (timeline.seconds * 1e9).round().astype(int).tolist()
        levels = timeline.live_bytes.tolist()
        # The time before the first allocation of a first step would take most of the picture.
        first = next((k for k, level in enumerate(levels) if level > max(levels) / 100), 0)
        begin = moments[first]
        known = zip(moments[first:], levels[first:], strict=True)
        data["traced"] = [(0, levels[0]), *((moment - begin, level) for moment, level in known)]
        data["marks"] = [max(round(seconds * 1e9) - begin, 0) for _, seconds in timeline.marks]
        data["plain"] = _plain_parts(plan.unplanned_timeline, begin)
    rows = [(name, value) for name, value in figures]
    return _page(about or About(), rows, [table], data)


def sequence_page(
    sequence: Schedule,
    figures: Sequence[tuple[str, str]],
    stages: Sequence[Sequence[str]],
    limit_bytes: int | None = None,
) -> str:
    """Return a page on a schedule of a chain: figures, timeline, operations, stages.

    `figures` are rows of name and value; `stages` is a table, its head first.
    """
    assert sequence.chain is not None
    names = sequence.chain.names or [str(i) for i in range(len(sequence.chain))]
    data = _sequence_data(sequence, sequence.chain, names, 0)
    data |= {"limit": limit_bytes, "measured": None, "own": 0, "traced": None}
    return _page(About(), figures, [("All stages", stages)], data)


def _chain_data(plan: Plan) -> dict[str, Any]:
    names = [measure.name for measure in plan.inspection.measures]
    data = _sequence_data(plan.sequence, plan.chain, names, plan.inspection.loss_ns or 0)
    figures = {"measured": plan.measured_bytes, "own": plan.executor_bytes}
    return data | {"limit": plan.limit_bytes, **figures}


def _sequence_data(
    sequence: Schedule, chain: Chain, names: Sequence[str], loss_ns: int
) -> dict[str, Any]:
    """Return operations of a sequence as operations of a graph, each once with its count."""
    resident = chain.x_bytes[0]
    ops = list(sequence)
    order = {"L": 1, "B": 2}
    distinct = sorted(
        set(ops),
        key=lambda op: (order.get(op.kind, 0), op.stage * (op.kind != "B"), ops.index(op)),
    )
    numbers = {op: index for index, op in enumerate(distinct)}
    forwards = sequence.count_forwards()
    rows, storages = [], []
    for index, op in enumerate(distinct):
        phase = {"L": 1, "B": 2}.get(op.kind, 0)
        seconds = _seconds_of(op, chain, loss_ns)
        if phase == 0:
            kind = "kept"
            made = chain.xbar_bytes[op.stage] if op.kind == "Fe" else chain.x_bytes[op.stage + 1]
            if forwards[op.stage] > 1:
                kind = "recomputed"
        else:
            kind, made = _PHASES[phase], chain.grad_bytes[op.stage]
        module = "" if phase == 1 else names[op.stage]
        runs = ops.count(op)
        cost = round(seconds * 1e9)
        rows.append(
            [
                *(str(op), module, phase, cost, 0, [], [index], 0, runs, kind),
                *(module.replace(" ", ""), ""),
            ]
        )
        storages.append([made, 0, index, kind if phase == 0 else ""])
    timeline = sequence.timeline
    before = [resident, *timeline.live_bytes.tolist()[:-1]]
    return {
        "ops": rows,
        "storages": storages,
        "planned": True,
        "program": [numbers[op] for op in ops],
        "before": [level - resident for level in before],
        "peak": (timeline.peak_bytes - resident).tolist(),
        "boundary": next(k for k, op in enumerate(ops) if op.kind == "L"),
        "plain": _plain_chain(sequence, loss_ns),
        "kinds": _run_kinds(ops),
        "lanes": [op.stage for op in distinct],
    }


def _run_kinds(ops: Sequence[Operation]) -> list[str]:
    """Return the purpose of each run: a stage's first forward is "kept" or "dropped"."""
    seen: set[int] = set()
    kinds = []
    for op in ops:
        kind = {"L": "loss", "B": "backward", "Fe": "kept"}.get(op.kind, "dropped")
        if kind in ("kept", "dropped"):
            kind = "recomputed" if op.stage in seen else kind
            seen.add(op.stage)
        kinds.append(kind)
    return kinds


def _traced(
    measured: Timeline | None, predicted: PredictedTimeline
) -> list[tuple[int, int]] | None:
    """Return (nanoseconds on the clock of the prediction, bytes) of a metered step."""
    if measured is None:
        return None
    moments = (measured.on_clock_of(predicted) * 1e9).round().astype(int)
    return list(zip(moments.tolist(), measured.live_bytes.tolist(), strict=True))


def _plain_graph(program: Program) -> list[tuple[int, int]] | None:
    """Return (nanoseconds, bytes) of a step without recomputation; ``None`` if this is one."""
    graph = program.graph
    if len(program.actions) == len(graph):
        return None
    peaks = simulate(graph, range(len(graph))).timeline().peak_bytes.tolist()
    return _steps([op.cost_ns for op in graph.operations], peaks)


def _plain_chain(sequence: Schedule, loss_ns: int) -> list[tuple[int, int]] | None:
    """Return (nanoseconds, bytes) of a step without recomputation; ``None`` if this is one."""
    chain = sequence.chain
    assert chain is not None
    (kept,) = NoCheckpoint().candidates(chain)
    if len(kept) == len(sequence):
        return None
    costs = [round(_seconds_of(op, chain, loss_ns) * 1e9) for op in kept]
    return _steps(costs, (kept.timeline.peak_bytes - chain.x_bytes[0]).tolist())


def _plain_parts(plain: Timeline | None, begin_ns: int) -> list[tuple[int, int]] | None:
    """Return (nanoseconds, bytes) of a step whose parts recompute nothing, if it is known."""
    if plain is None:
        return None
    moments = [max(round(seconds * 1e9) - begin_ns, 0) for seconds in plain.seconds.tolist()]
    return list(zip(moments, plain.live_bytes.tolist(), strict=True))


def _steps(cost_ns: Sequence[int], levels: Sequence[int]) -> list[tuple[int, int]]:
    moments = [0, *accumulate(max(cost, 1) for cost in cost_ns)]
    return list(zip(moments, [*levels, 0], strict=True))


def _seconds_of(op: Operation, chain: Chain, loss_ns: int) -> float:
    if op.kind == "L":
        return loss_ns / 1e9
    return (chain.backward_time if op.kind == "B" else chain.forward_time)[op.stage]


def _loss_rows(plan: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in [*aside_rows(plan), *loss_rows(plan)]]


def _program_rows(program: Program, summary: Summary) -> list[tuple[str, str]]:
    again = sum(entry.runs - 1 for entry in summary.again)
    return [
        ("peak of the graph, predicted", format_bytes(program.peak_bytes)),
        ("step, predicted", format_seconds(program.makespan)),
        ("recomputation", f"{_recomputation(program):+.1%}"),
        ("operations run again", f"{len(summary.again)} of {len(program.graph)}, {again} runs"),
        ("kept for the backward", format_bytes(summary.kept_bytes)),
        *_offloaded_rows(program, summary),
        ("dropped and recomputed", format_bytes(summary.recomputed_bytes)),
        ("dropped, not needed again", format_bytes(summary.dropped_bytes)),
    ]


def _offloaded_rows(program: Program, summary: Summary) -> list[tuple[str, str]]:
    if program.link is None:
        return []
    return [
        ("offloaded and fetched back", format_bytes(summary.offloaded_bytes)),
        ("waits for the tier, predicted", format_seconds(program.waited)),
    ]


def _recomputation(program: Program) -> float:
    """Return the time of recomputed operations, against that of a step without."""
    total = program.graph.total_time
    return (program.makespan - program.waited) / total - 1 if total else 0.0


def _again_table(graph: Graph, summary: Summary | None) -> list[list[str]]:
    if summary is None or not summary.again:
        return []
    rows = [["operation", "module", "phase", "runs", "time of one", "extra time"]]
    for entry in summary.again[:_MOST_RECOMPUTED]:
        op = graph.operations[entry.operation]
        cost, extra = format_seconds(op.cost_ns / 1e9), format_seconds(entry.extra_ns / 1e9)
        rows.append([op.name, op.module, op.phase, str(entry.runs), cost, extra])
    return rows


def _check_levels(program: Program | None, measured: int | Sequence[int] | None) -> None:
    if measured is None or isinstance(measured, int):
        return
    expected = 0 if program is None else len(program)
    if len(measured) != expected:
        raise ValueError(
            f"measured_bytes has {len(measured)} levels, expected one number, or one for each of "
            f"the program's {expected} runs"
        )


def _levels(measured: int | Sequence[int] | None) -> int | list[int] | None:
    if measured is None or isinstance(measured, int):
        return measured
    return [int(level) for level in measured]


def _data(
    graph: Graph, places: Sequence[str], program: Program | None, summary: Summary | None
) -> dict[str, Any]:
    """Return the data of the script; rows instead of objects keep large pages small."""
    runs = [1] * len(graph) if program is None else program.runs.tolist()
    kinds = [op.phase for op in graph.operations] if summary is None else summary.operations
    fates = [""] * len(graph.storages)
    if summary is not None:
        fates = [storage.fate for storage in summary.storages]
    data: dict[str, Any] = {
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
                places[index],
                str(op.extra.get("source", "")),
            ]
            for index, op in enumerate(graph.operations)
        ],
        "storages": [
            [storage.bytes, int(storage.pinned), graph.producers[s], fates[s]]
            for s, storage in enumerate(graph.storages)
        ],
        "planned": program is not None,
    }
    if program is not None:
        timeline = program.timeline(runs_only=True)
        data["program"] = program.ops.tolist()
        data["before"] = timeline.before_bytes.tolist()
        data["peak"] = timeline.peak_bytes.tolist()
        if len(program.actions) > len(program.ops):
            data |= _moves(program)
        data["boundary"] = 0 if summary is None else summary.boundary
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


def _figures(rows: Sequence[tuple[str, str]]) -> str:
    cells = [
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in rows
    ]
    return "\n".join(['<dl class="figures">', *cells, "</dl>"])


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
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


def _page(
    about: About,
    rows: Sequence[tuple[str, str]],
    tables: Sequence[tuple[str, Sequence[Sequence[str]]]],
    data: dict[str, Any],
) -> str:
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
    own_table = "lanes" not in data
    what = "Operations" if own_table else "Stages"
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
