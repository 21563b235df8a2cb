"""Graphs, and programs on them, as pictures and pages. Needs no PyTorch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rotor.graph.contraction import blocks, contract, places
from rotor.graph.graph import Graph, Operation
from rotor.graph.program import Program
from rotor.graph.summaries import Summary, summarise
from rotor.report.dot import DotEdge, DotNode, dot_source
from rotor.report.html import graph_page
from rotor.units import format_bytes, format_seconds

FORMATS = ("svg", "pdf", "png", "html", "dot")
"""Formats that `render` writes."""

LEVELS = ("operations", "modules")
_MOST_OPERATIONS = 400


def render(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    program: Program | None = None,
    format: str | None = None,
    level: str | None = None,
    limit_bytes: int | None = None,
    measured_bytes: int | Sequence[int] | None = None,
) -> Path:
    """Draw a graph, and what a program keeps, drops and recomputes, to a file.

    Parameters
    ----------
    graph
        The graph to draw.
    path
        The file to write.
    program
        A program of this graph; without one, colours tell phases.
    format
        One of `FORMATS`, by default the ending of `path`. "html" is one page that needs no other
        file: it zooms, folds groups, and has the timeline of live bytes. Graphviz draws "svg",
        "pdf" and "png"; "dot" is Graphviz's input.
    level
        "operations", from top to bottom; or "modules", from left to right: one box for consecutive
        operations of a module's block, the backward below the forward. By default operations up to
        400 of them, or if modules are not known. A page has both.
    limit_bytes
        A line in the timeline of a page.
    measured_bytes
        A measured peak, or the level measured during each run of the program: in the same timeline.

    Returns
    -------
    Path
        The file. The same arguments give the same bytes.

    Raises
    ------
    ValueError
        The format or the level is unknown; the program is one of another graph.
    ImportError
        The Python package ``graphviz`` is not installed; the message names the extra that brings
        it.
    RuntimeError
        Graphviz's program ``dot`` is not installed, or fails.
    """
    path = Path(path)
    kind = (path.suffix.removeprefix(".") if format is None else format).lower()
    if kind not in FORMATS:
        raise ValueError(f"no format is named {kind!r}, expected one of {', '.join(FORMATS)}")
    _check_program(graph, program)
    if kind == "html":
        text = graph_page(graph, program, limit_bytes, measured_bytes)
        path.write_text(text, encoding="utf-8")
        return path
    return write_source(to_dot(graph, program=program, level=level), path, kind)


def write_source(source: str, path: Path, kind: str) -> Path:
    """Write Graphviz's drawing of a text in its language; for "dot" the text itself."""
    if kind == "dot":
        path.write_text(source, encoding="utf-8")
    else:
        path.write_bytes(_drawn(source, kind))
    return path


def to_dot(graph: Graph, *, program: Program | None = None, level: str | None = None) -> str:
    """Return the graph in Graphviz's language; the arguments are those of `render`."""
    _check_program(graph, program)
    if level is None:
        is_large = len(graph) > _MOST_OPERATIONS and any(op.module for op in graph.operations)
        level = "modules" if is_large else "operations"
    if level not in LEVELS:
        raise ValueError(f"no level is named {level!r}, expected one of {', '.join(LEVELS)}")
    summary = None if program is None else summarise(program)
    if level == "operations":
        groups = [[index] for index in range(len(graph))]
        drawn = graph
    else:
        groups = _whole_blocks(graph)
        drawn = contract(graph, groups)
    nodes = [
        _node(graph, op, group, place, program, summary, level == "modules")
        for op, group, place in zip(drawn.operations, groups, places(drawn), strict=True)
    ]
    title, legend = graph.name, summary is not None
    if level == "operations":
        return dot_source(nodes, _edges(drawn), title=title, legend=legend)
    edges, rows = _in_columns(drawn, _edges(drawn))
    return dot_source(nodes, edges, title=title, legend=legend, rows=rows, across=True)


def _whole_blocks(graph: Graph) -> list[list[int]]:
    """Return `blocks`; operations of no module join the block after them, else the one before."""
    found: list[list[int]] = []
    waiting: list[int] = []
    for group in blocks(graph):
        members = [graph.operations[index] for index in group]
        if waiting and graph.operations[waiting[0]].phase != members[0].phase:
            found.append(waiting)
            waiting = []
        if not any(op.module for op in members) and members[0].phase != "loss":
            waiting += group
            continue
        found.append([*waiting, *group])
        waiting = []
    if not waiting:
        return found
    phase = graph.operations[waiting[0]].phase
    if found and graph.operations[found[-1][0]].phase == phase:
        found[-1] += waiting
    else:
        found.append(waiting)
    return found


def _in_columns(
    drawn: Graph, edges: Sequence[DotEdge]
) -> tuple[list[DotEdge], list[tuple[int, int]]]:
    """Return edges and rows that lay the forward out to the right, and the backward below it."""
    phases = [op.phase for op in drawn.operations]
    forward = {op.module: k for k, op in enumerate(drawn.operations) if op.phase == "forward"}
    rows = []
    for k, op in enumerate(drawn.operations):
        if op.phase == "backward" and op.module in forward:
            rows.append((forward.pop(op.module), k))
    laid = []
    for edge in edges:
        ends = phases[edge.source], phases[edge.target]
        is_back = ends == ("backward", "backward")
        is_across = ends == ("forward", "backward")
        laid.append(replace(edge, upward=is_back, sideways=is_across))
    return laid, rows


def _check_program(graph: Graph, program: Program | None) -> None:
    if program is not None and program.graph is not graph and program.graph != graph:
        raise ValueError("the program is one of another graph: give it the graph it was made for")


def _node(
    graph: Graph,
    op: Operation,
    group: Sequence[int],
    place: str,
    program: Program | None,
    summary: Summary | None,
    whole: bool,
) -> DotNode:
    members = [graph.operations[index] for index in group]
    made = sorted({s for member in members for s in member.outputs})
    size = sum(graph.storages[s].bytes for s in made)
    figures = f"{format_seconds(op.cost_ns / 1e9)}, {format_bytes(size)}"
    lines = [op.module or op.name if whole else op.name]
    tips = [op.name, f"module: {op.module or '(the model)'}", f"phase: {op.phase}"]
    tips += [f"time: {format_seconds(op.cost_ns / 1e9)}", f"makes: {format_bytes(size)}"]
    tips.append(f"workspace: {format_bytes(op.workspace_bytes)}")
    if len(group) > 1:
        lines.append(f"{len(group)} operations")
        tips.append(f"operations: {len(group)}")
    lines.append(figures)
    kind = op.phase
    if "view" in op.extra:
        kind, lines = "view", [op.name]
    if program is not None and summary is not None:
        kind = _kind(summary, group)
        extra = sum(int(program.runs[k] - 1) * graph.operations[k].cost_ns for k in group)
        if any(program.runs[k] > 1 for k in group):
            lines.append(_again(program, group) + f", +{format_seconds(extra / 1e9)}")
            tips.append(_again(program, group))
        for fate in ("kept", "offloaded", "dropped", "recomputed"):
            total = sum(graph.storages[s].bytes for s in made if summary.storages[s].fate == fate)
            if total:
                tips.append(f"{fate}: {format_bytes(total)}")
    flags = [name for name in ("random", "once") if getattr(op, name)]
    tips += [", ".join(flags)] if flags else []
    path = place.split(".") if place and not whole else []
    return DotNode(lines, kind, op.phase, path, "\n".join(tips))


def _again(program: Program, group: Sequence[int]) -> str:
    again = sum(program.runs[k] > 1 for k in group)
    if len(group) > 1:
        return f"{again} of them run again"
    return f"runs {program.runs[group[0]]} times"


def _kind(summary: Summary, group: Sequence[int]) -> str:
    kinds = [summary.operations[index] for index in group]
    order = ("recomputed", "offloaded", "kept", "dropped", "loss", "backward")
    return next(kind for kind in order if kind in kinds)


def _edges(graph: Graph) -> list[DotEdge]:
    edges = []
    for index, op in enumerate(graph.operations):
        read = op.extra.get("reads", op.inputs)
        sizes: dict[int, int] = {}
        for s in read:
            maker = graph.producers[s]
            sizes[maker] = sizes.get(maker, 0) + graph.storages[s].bytes
        for maker, size in sorted(sizes.items()):
            label = format_bytes(size) if size else ""
            tip = f"{graph.operations[maker].name} to {op.name}: {format_bytes(size)}"
            edges.append(DotEdge(maker, index, label, tip))
    return edges


def _drawn(source: str, format: str) -> bytes:
    try:
        import graphviz
    except ImportError as error:
        raise ImportError(
            "pictures need the Python package graphviz: `pip install graphviz`, or in a clone of "
            'rotor `pip install ".[draw]"`; or ask for format="html", which needs nothing'
        ) from error
    try:
        drawn: bytes = graphviz.Source(source).pipe(format=format)
    except graphviz.ExecutableNotFound as error:
        raise RuntimeError(
            "pictures need Graphviz's program dot, which is not installed: it is in the package "
            'graphviz of your system (such as `apt install graphviz`); or ask for format="html", '
            "which needs nothing"
        ) from error
    except graphviz.CalledProcessError as error:
        raise RuntimeError(f"Graphviz failed: {error}") from error
    # The same graph always gives the same bytes; the length stays, and with it the offsets.
    return re.sub(rb"/CreationDate \(D:\d{14}", b"/CreationDate (D:19700101000000", drawn)
