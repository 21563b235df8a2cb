"""Graphs in the DOT language, from plain data. The same data gives the same text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

COLORS = {
    "kept": ("#c7e3c9", "#2f7d3a"),
    "offloaded": ("#bfe3e6", "#1f7480"),
    "dropped": ("#e4e7eb", "#7b8794"),
    "recomputed": ("#fbd3a5", "#c05d0a"),
    "forward": ("#d3e3f6", "#3b6ea8"),
    "loss": ("#f3e3a3", "#9a7b10"),
    "backward": ("#dcd4ee", "#6a4fa0"),
    "view": ("#ffffff", "#a5afba"),
}
"""Fill and outline for each kind of node."""

_LARGE = 150
"""Number of boxes above which the layout is quicker, and sizes on arrows are in tooltips only."""


@dataclass(frozen=True)
class DotNode:
    """A box."""

    label: Sequence[str]
    kind: str
    """One of `COLORS`."""
    phase: str
    path: Sequence[str] = ()
    """Names of the path of its module: the groups that contain it, within that of its phase."""
    tooltip: str = ""
    """Text that is shown under the pointer."""
    colors: tuple[str, str] | None = None
    """Fill and outline instead of those of its kind."""
    shape: str = ""
    """Another shape than a box, by Graphviz's name."""


@dataclass(frozen=True)
class DotEdge:
    """An arrow between two boxes, by their numbers."""

    source: int
    target: int
    label: str = ""
    tooltip: str = ""
    """Text that is shown where the pointer is on it."""
    style: str = ""
    """"solid", or one of Graphviz's styles of lines."""
    upward: bool = False
    sideways: bool = False
    """True if it does not affect which box is above the other."""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _attributes(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={_quoted(value)}" for name, value in pairs if value)


@dataclass
class _Cluster:
    title: str
    nodes: list[int] = field(default_factory=list)
    inside: dict[str, _Cluster] = field(default_factory=dict)


def _clusters(nodes: Sequence[DotNode]) -> _Cluster:
    root = _Cluster("")
    for number, node in enumerate(nodes):
        cluster = root
        for name in (*([node.phase] if node.phase else []), *node.path):
            cluster = cluster.inside.setdefault(name, _Cluster(name))
        cluster.nodes.append(number)
    return root


def dot_source(
    nodes: Sequence[DotNode],
    edges: Sequence[DotEdge],
    *,
    title: str = "",
    legend: bool = False,
    rows: Sequence[Sequence[int]] = (),
    across: bool = False,
) -> str:
    """Return a graph in the DOT language, boxes grouped by phase and module.

    With `legend` it explains the colours of kept, dropped and recomputed values, and of offloaded
    ones if it has any. `rows` are boxes, by their numbers, that are laid out beside each other.
    With `across` it goes from left to right, where "above" is on the left, and "beside" is below.
    """
    lines = [
        "digraph rotor {",
        f"  graph [{_attributes(_graph_attributes(title, len(nodes) > _LARGE, across))}];",
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10, '
        'margin="0.12,0.05", penwidth=1];',
        '  edge [color="#66707a", fontname="Helvetica", fontsize=8, fontcolor="#66707a", '
        "arrowsize=0.6];",
    ]
    counter = itertools.count()

    def write(cluster: _Cluster, depth: int) -> None:
        pad = "  " * (depth + 1)
        for number in cluster.nodes:
            lines.append(f"{pad}n{number} [{_node(nodes[number])}];")
        for inner in cluster.inside.values():
            style = [("label", inner.title), ("fontsize", "11")]
            style += [("color", "#c3cad2"), ("fontcolor", "#46505a"), ("style", "rounded")]
            lines.append(f"{pad}subgraph cluster_{next(counter)} {{")
            lines.append(f"{pad}  graph [{_attributes(style)}];")
            write(inner, depth + 1)
            lines.append(f"{pad}}}")

    write(_clusters(nodes), 0)
    for edge in edges:
        pairs = [
            ("label", edge.label if len(nodes) <= _LARGE else ""),
            ("tooltip", edge.tooltip),
            ("labeltooltip", edge.tooltip),
            ("style", edge.style),
            ("dir", "back" if edge.upward else ""),
            ("constraint", "false" if edge.sideways else ""),
        ]
        ends = (edge.target, edge.source) if edge.upward else (edge.source, edge.target)
        text = _attributes(pairs)
        lines.append(f"  n{ends[0]} -> n{ends[1]}" + (f" [{text}];" if text else ";"))
    for row in rows:
        lines.append("  { rank=same; " + " ".join(f"n{number};" for number in row) + " }")
    if legend:
        lines += _legend(any(node.kind == "offloaded" for node in nodes))
    return "\n".join([*lines, "}"]) + "\n"


def _graph_attributes(title: str, is_large: bool, across: bool) -> list[tuple[str, str]]:
    ranks, between = ("LR", "0.35") if across else ("TB", "0.18")
    shape = [("rankdir", ranks), ("nodesep", between), ("ranksep", "0.3"), ("newrank", "true")]
    text = [("fontname", "Helvetica"), ("label", title), ("labelloc", "t" if title else "")]
    limits = [("nslimit", "2"), ("mclimit", "0.3")] if is_large else []
    return [*shape, *text, *limits]


def _node(node: DotNode) -> str:
    fill, line = node.colors or COLORS[node.kind]
    pairs: list[tuple[str, Any]] = [("label", "\n".join(node.label)), ("fillcolor", fill)]
    return _attributes([*pairs, ("color", line), ("shape", node.shape), ("tooltip", node.tooltip)])


def _legend(offloads: bool) -> list[str]:
    moved = ["offloaded"] if offloads else []
    kinds = ["kept", *moved, "dropped", "recomputed", "loss", "backward"]
    lines = ["  subgraph cluster_legend {", '    graph [label="legend", color="#c3cad2"];']
    for kind in kinds:
        fill, line = COLORS[kind]
        pairs = [("label", kind), ("fillcolor", fill), ("color", line)]
        lines.append(f"    legend_{kind} [{_attributes(pairs)}];")
    chain = " -> ".join(f"legend_{kind}" for kind in kinds)
    return [*lines, f'    {chain} [style="invis"];', "  }"]
