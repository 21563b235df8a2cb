"""Pictures of rk-GB's graphs: a node for each layer, blocks as groups, alike ones in one colour."""

from __future__ import annotations

import math
import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotor.report.dot import DotEdge, DotNode, dot_source
from rotor.report.drawing import FORMATS, render, write_source
from rotor.rkgb.backward import K_C_node, K_graph
from rotor.rkgb.blocks import cut
from rotor.rkgb.forward import D_graph, Var_info
from rotor.rkgb.simplified import S_graph, S_node
from rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rotor.graph.graph import Graph
    from rotor.rkgb import Result

_CLASSES = (
    ("#cfe3f7", "#3b6ea8"),
    ("#fbdcc0", "#b8651b"),
    ("#cdeccf", "#2f7d3a"),
    ("#f6cfd5", "#ad3a4c"),
    ("#ddd3f2", "#6a4fa0"),
    ("#f5ebae", "#94780f"),
    ("#c6ebe8", "#20807a"),
    ("#f1d0ea", "#9a3d88"),
)
"""Fill and outline of classes with several blocks, again from the first after the last."""

_SINGLE = ("#f2f4f6", "#6b7680")
_UNSAID = ("clone", "to_copy", "scalar_tensor", "ones", "zeros", "full", "arange", "detach")


def print_all_graphs(
    result: Result,
    name: str | os.PathLike[str] = "graphs",
    open: bool = False,
    render_format: str = "pdf",
) -> list[Path]:
    """Draw the graphs of a result, each to a file.

    Parameters
    ----------
    result
        Result of `make_all_graphs`.
    name
        Beginning of the files' names, a folder included; it is made if missing.
    open
        Show the files in the browser as well.
    render_format
        "pdf", "svg" or "png", which need Graphviz; "html" or "dot", which need no other program.

    Returns
    -------
    list of Path
        The files: ``<name>_D_graph.pdf``, then ``S_graph``, ``K_graph``, ``S_graph_list`` and
        ``K_graph_list``, which show one block of each class.

    Raises
    ------
    ValueError
        The format is unknown.
    ImportError, RuntimeError
        Graphviz is not installed; the message says how to get it.
    """
    firsts = [members[0] for members in result.equivalent_classes]
    titles = [
        _class_title(number, members, result.block_names)
        for number, members in enumerate(result.equivalent_classes)
    ]
    s_blocks = [result.S_graph_list[k] for k in firsts]
    k_blocks = [result.K_graph_list[k] for k in firsts]
    drawn = {
        "D_graph": (None, result.raw),
        "S_graph": (_simplified_dot(result.S_graph, result), result.simplified),
        "K_graph": (_backward_dot([result.K_graph], [""]), result.K_graph.graph),
        "S_graph_list": (_blocks_dot(s_blocks, titles), result.simplified),
        "K_graph_list": (_backward_dot(k_blocks, titles), result.partitioned),
    }
    return [
        _write(source, graph, name, f"_{key}", open, render_format)
        for key, (source, graph) in drawn.items()
    ]


def print_graph(
    g: D_graph | S_graph | K_graph,
    name: str | os.PathLike[str] = "graph",
    open: bool = False,
    render_format: str = "svg",
) -> Path:
    """Draw one graph to a file.

    Parameters
    ----------
    g
        The graph.
    name
        Name of the file without its ending, a folder included; it is made if missing.
    open, render_format
        As for `print_all_graphs`.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    TypeError
        It is a list of operations (a B graph), or no graph of rk-GB.
    """
    if isinstance(g, D_graph):
        return _write(None, g.graph, name, "", open, render_format)
    if isinstance(g, S_graph):
        return _write(_simplified_dot(g), g.graph, name, "", open, render_format)
    if isinstance(g, K_graph):
        return _write(_backward_dot([g], [""]), g.graph, name, "", open, render_format)
    raise TypeError(
        f"{type(g).__name__} cannot be drawn, expected a D_graph, an S_graph or a K_graph"
    )


def print_graph_list(
    gl: Sequence[S_graph] | Sequence[K_graph],
    name: str | os.PathLike[str] = "graphs",
    open: bool = False,
    render_format: str = "svg",
) -> Path:
    """Draw the blocks of a model in one file.

    Parameters
    ----------
    gl
        Graphs of the blocks.
    name
        Name of the file without its ending, a folder included; it is made if missing.
    open, render_format
        As for `print_all_graphs`.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        The list is empty.
    """
    if not gl:
        raise ValueError("no blocks to draw: the list is empty")
    titles = [f"block {number}" for number in range(len(gl))]
    s_graphs = [g for g in gl if isinstance(g, S_graph)]
    k_graphs = [g for g in gl if isinstance(g, K_graph)]
    source = _blocks_dot(s_graphs, titles) if s_graphs else _backward_dot(k_graphs, titles)
    return _write(source, gl[0].graph, name, "", open, render_format)


def _write(
    source: str | None,
    graph: Graph,
    name: str | os.PathLike[str],
    suffix: str,
    is_shown: bool,
    render_format: str,
) -> Path:
    if render_format not in FORMATS:
        raise ValueError(
            f"no format is named {render_format!r}, expected one of {', '.join(FORMATS)}"
        )
    stem = Path(name)
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(f"{stem.name}{suffix}.{render_format}")
    if source is None or render_format == "html":
        render(graph, path, format=render_format, level="operations")
    else:
        write_source(source, path, render_format)
    if is_shown:
        webbrowser.open(path.resolve().as_uri())
    return path


def _class_title(number: int, members: Sequence[int], names: Sequence[str]) -> str:
    alike = f", {len(members)} alike" if len(members) > 1 else ""
    return f"class {number}: block {members[0]}, {names[members[0]] or 'the model'}{alike}"


def _simplified_dot(sg: S_graph, result: Result | None = None) -> str:
    """Draw the whole forward, blocks of several nodes as groups in the colours of their classes."""
    blocks = cut(sg)
    titles = [""] * len(blocks)
    colors = [_SINGLE] * len(blocks)
    if result is not None:
        several = [members for members in result.equivalent_classes if len(members) > 1]
        for number, members in enumerate(several):
            for block in members:
                colors[block] = _CLASSES[number % len(_CLASSES)]
                titles[block] = f", {len(members)} alike"
        titles = [
            f"block {k}: {name or 'the model'}{alike}"
            for k, (name, alike) in enumerate(zip(result.block_names, titles, strict=True))
        ]
    else:
        titles = [f"block {k}" for k in range(len(blocks))]
    home = {number: k for k, block in enumerate(blocks) for number in block}
    nodes = [_input_node(sg)]
    for node in sg.nodes:
        k = home[node.number]
        path = [titles[k]] if 1 < len(blocks[k]) < len(sg.nodes) else []
        nodes.append(_layer_node(node, path, colors[k], titles[k]))
    return dot_source(nodes, _layer_edges(sg, 0))


def _blocks_dot(graphs: Sequence[S_graph], titles: Sequence[str]) -> str:
    """Draw blocks beside each other, each a group."""
    nodes: list[DotNode] = []
    edges: list[DotEdge] = []
    for number, (sg, title) in enumerate(zip(graphs, titles, strict=True)):
        edges += _layer_edges(sg, len(nodes))
        source = _input_node(sg)
        nodes.append(DotNode(source.label, source.kind, "", [title], "", _SINGLE, "ellipse"))
        colors = _CLASSES[number % len(_CLASSES)]
        nodes += [_layer_node(node, [title], colors, title) for node in sg.nodes]
    return dot_source(nodes, edges)


def _input_node(sg: S_graph) -> DotNode:
    label = []
    for name in sg.direct_inputs:
        info = sg.dict_info.get(name)
        shape = "" if info is None else _shape(info)
        label.append(shape if name.startswith("__") else f"{name}: {shape}")
    more = ["..."] if len(label) > 4 else []
    text = [*label[:4], *more] or ["inputs"]
    return DotNode(text, "view", "", (), sg.init_node.get_code(), _SINGLE, "ellipse")


def _layer_node(node: S_node, path: Sequence[str], colors: tuple[str, str], title: str) -> DotNode:
    label = [node.module or "(the model)", described(node), _result(node)]
    tips = [*([title] if title else []), node.main_target, *node.merged]
    return DotNode(label, "forward", "", path, "\n".join(tips), colors)


def described(node: S_node) -> str:
    """Return the work of a node in a few words: what was merged into it, and its layer."""
    said = [name for name in node.merged if name not in _UNSAID]
    if node.layer and said:
        said[-1] = node.layer
    short = list(dict.fromkeys(said)) or node.merged[-1:]
    if len(short) > 4:
        short = [*short[:2], "...", short[-1]]
    return " + ".join(short)


def _result(node: S_node) -> str:
    if node.info is None or node.info.dtype is None:
        return ""
    size = math.prod([int(length) for length in node.info.tsize]) * node.info.dtype.itemsize
    return f"{_shape(node.info)}, {format_bytes(size)}"


def _shape(info: Var_info) -> str:
    if info.dtype is None:
        return ""
    return "x".join(str(int(size)) for size in info.tsize) or "scalar"


def _layer_edges(sg: S_graph, base: int) -> list[DotEdge]:
    place = {sg.init_node: base} | {node: base + 1 + k for k, node in enumerate(sg.nodes)}
    return [
        DotEdge(place[made], place[node], tooltip=", ".join(sorted(names)))
        for node in sg.nodes
        for made, names in sorted(node.deps.items(), key=lambda item: place[item[0]])
    ]


def _backward_dot(graphs: Sequence[K_graph], titles: Sequence[str]) -> str:
    """Draw the forward from top to bottom, and each backward beside its forward."""
    nodes: list[DotNode] = []
    edges: list[DotEdge] = []
    rows: list[list[int]] = []
    for kg, title in zip(graphs, titles, strict=True):
        place = {kcn: len(nodes) + k for k, kcn in enumerate(kg.list_kcn)}
        path = [title] if title else []
        nodes += [_computation_node(kg, kcn, path) for kcn in kg.list_kcn]
        beside: dict[str, list[int]] = {}
        for kcn in kg.list_kcn:
            beside.setdefault(kcn.main_target, []).append(place[kcn])
        rows += [row for row in beside.values() if len(row) > 1]
        edges += _data_edges(kg, place)
    return dot_source(nodes, edges, rows=rows)


def _computation_node(kg: K_graph, kcn: K_C_node, path: Sequence[str]) -> DotNode:
    if kcn is kg.loss_kcn:
        return DotNode(["loss" if not path else "what follows"], "loss", "", path)
    node = next((n for n in kg.sg.nodes if n.main_target == kcn.main_target), None)
    label = ["inputs" if node is None else node.module or described(node)]
    if node is not None and node.module and kcn.is_fwd:
        label.append(described(node))
    made = sum(kdn.mem for kdn in kcn.users)
    label.append(f"{format_seconds(kcn.time)}, {format_bytes(made)}")
    tips = [kcn.name, *(f"{kdn.kdn_type}: {format_bytes(kdn.mem)}" for kdn in kcn.users)]
    tips.append(f"overhead: {format_bytes(kcn.overhead)}")
    kind = "forward" if kcn.is_fwd else "backward"
    return DotNode(label, kind, "", path, "\n".join([tips[0], *sorted(tips[1:])]))


def _data_edges(kg: K_graph, place: dict[K_C_node, int]) -> list[DotEdge]:
    """Draw data as arrows from maker to reader; dashed where it waits for the backward."""
    found: dict[tuple[int, int], Any] = {}
    for kdn in kg.list_kdn:
        for maker in kdn.deps:
            for user in kdn.users_real:
                is_written = kdn.kdn_type == "phantoms" and user is kg.loss_kcn
                if maker is not user and not is_written:
                    found.setdefault((place[maker], place[user]), []).append(kdn)
    by_number = {number: kcn for kcn, number in place.items()}
    edges = []
    for (source, target), kdns in sorted(found.items()):
        maker, user = by_number[source], by_number[target]
        waits = maker.is_fwd and not user.is_fwd and maker is not kg.loss_kcn
        tip = ", ".join(f"{kdn.name}: {format_bytes(kdn.mem)}" for kdn in kdns)
        upward = not user.is_fwd and not waits
        style = "dashed" if waits else ""
        edges.append(DotEdge(source, target, "", tip, style, upward, waits))
    return edges
