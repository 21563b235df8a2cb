"""rk-GB's published names: views of the one graph that is captured of a module.

``make_all_graphs(model, sample)`` captures; ``print_all_graphs(result)`` draws what it gave.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx, nn

from rotor.graph.building import capture_step, step_graph
from rotor.graph.contraction import blocks, contract, followers, forward_part
from rotor.graph.drawing import FORMATS, render
from rotor.graph.graph import Graph, Operation, Storage
from rotor.graph.lowering import Lowered

__all__ = ["Result", "make_all_graphs", "print_all_graphs", "test_rkgb"]


@dataclass(frozen=True)
class Result:
    """The views of a captured training step; each is a `Graph`.

    Attributes
    ----------
    raw
        Every node of the forward as it was captured, views and single outputs included, which
        make a storage of 0 bytes each.
    forward
        The operations of the forward.
    simplified
        The operations of forward, loss and backward, cheap ones merged with those of the same
        module that they follow.
    forward_and_backward
        All operations, in order.
    partitioned
        One operation for what a block of the model does at a stretch.

    Notes
    -----
    `R`, `F`, `S`, `FB` and `P` are the published short names.
    """

    raw: Graph
    forward: Graph
    simplified: Graph
    forward_and_backward: Graph
    partitioned: Graph

    @property
    def R(self) -> Graph:
        """The raw graph."""
        return self.raw

    @property
    def F(self) -> Graph:
        """The graph of the forward."""
        return self.forward

    @property
    def S(self) -> Graph:
        """The simplified graph."""
        return self.simplified

    @property
    def FB(self) -> Graph:
        """The graph of forward and backward."""
        return self.forward_and_backward

    @property
    def P(self) -> Graph:
        """The partitioned graph."""
        return self.partitioned


def make_all_graphs(model: nn.Module, sample: Any) -> Result:
    """Capture and measure a training step of a module, which stays as it is.

    Parameters
    ----------
    model
        Any module.
    sample
        A sample of its input: a tensor, a tuple for several arguments, a dictionary for keyword
        arguments.

    Returns
    -------
    Result
        The views of the graph that rk-GB has, from raw to partitioned.

    Raises
    ------
    CaptureError
        There is no single graph of it; the message has the reason and the line of code.
    """
    args = sample if isinstance(sample, tuple) else (sample,)
    kwargs: dict[str, Any] = {}
    if isinstance(sample, dict):
        args, kwargs = (), sample
    step = capture_step(model, args, kwargs)
    graph = step_graph(step)
    return Result(
        raw=_raw(step.lowered, graph),
        forward=forward_part(graph),
        simplified=contract(graph, followers(graph)),
        forward_and_backward=graph,
        partitioned=contract(graph, blocks(graph)),
    )


def print_all_graphs(
    result: Result, name: str | os.PathLike[str] = "graphs", render_format: str = "pdf"
) -> list[Path]:
    """Draw the views of a result, each to a file.

    Parameters
    ----------
    result
        What `make_all_graphs` gave.
    name
        What the names of the files begin with, a folder included; it is made where missing.
    render_format
        "pdf", "svg" or "png", which need Graphviz; "html" or "dot", which need nothing.

    Returns
    -------
    list of Path
        The files: ``<name>_raw.pdf`` and so on.

    Raises
    ------
    ValueError
        The format is unknown.
    ImportError, RuntimeError
        Graphviz is not installed; the message says how to get it.
    """
    if render_format not in FORMATS:
        raise ValueError(
            f"no format is named {render_format!r}, expected one of {', '.join(FORMATS)}"
        )
    stem = Path(name)
    stem.parent.mkdir(parents=True, exist_ok=True)
    names = ("raw", "forward", "simplified", "forward_and_backward", "partitioned")
    return [
        render(
            getattr(result, view),
            stem.with_name(f"{stem.name}_{view}.{render_format}"),
            format=render_format,
            level="operations",
        )
        for view in names
    ]


def test_rkgb(model: nn.Module, sample: Any) -> Result:
    """Build the graphs of a module: `make_all_graphs` by its other published name."""
    return make_all_graphs(model, sample)


test_rkgb.__test__ = False  # type: ignore[attr-defined]


def _raw(lowered: Lowered, graph: Graph) -> Graph:
    """The forward with its views: a storage of 0 bytes stands for each."""
    tasks = {task.node: number for number, task in enumerate(lowered.tasks) if task.node}
    forward = _forward_nodes(lowered, tasks)
    storages: list[Storage] = []
    real: dict[int, int] = {}
    own: dict[fx.Node, int] = {}
    operations: list[Operation] = []

    def reads(nodes: Iterable[fx.Node]) -> list[int]:
        found = []
        for node in nodes:
            value = lowered.values[node]
            found += [own[node]] if node in own else [real[s] for s in value.storages]
        return list(dict.fromkeys(found))

    for node in lowered.module.graph.nodes:
        if node not in forward:
            continue
        value = lowered.values[node]
        if node in tasks:
            direct = reads(node.all_input_nodes)
            op = graph.operations[tasks[node]]
            for s in op.outputs:
                real[s] = len(storages)
                storages.append(graph.storages[s])
            inputs = dict.fromkeys([*direct, *(real[s] for s in op.inputs)])
            outputs = tuple(real[s] for s in op.outputs)
            cost, workspace = op.cost_ns, op.workspace_bytes
            extra: dict[str, Any] = {"reads": direct}
            flags, module = (op.random, op.once), op.module
        else:
            lies_on = [real[s] for s in value.storages]
            base = value.base.node if value.base is not None else None
            direct = [own[base]] if base in own else lies_on
            own[node] = len(storages)
            storages.append(Storage(0))
            inputs = dict.fromkeys([*direct, *lies_on])
            outputs, cost, workspace = (own[node],), 0, 0
            extra = {"reads": direct, "view": True}
            flags, module = (False, False), _maker_module(lowered, graph, tasks, node)
        operations.append(
            Operation(
                name=node.name,
                cost_ns=cost,
                inputs=tuple(inputs),
                outputs=outputs,
                workspace_bytes=workspace,
                random=flags[0],
                once=flags[1],
                module=module,
                extra=extra,
            )
        )
    return Graph(storages, None, operations, name=graph.name)


def _forward_nodes(lowered: Lowered, tasks: dict[fx.Node, int]) -> set[fx.Node]:
    """The nodes that the outputs are computed from, and what else the forward runs."""
    waiting = [node for node in lowered.outputs if isinstance(node, fx.Node)]
    waiting += [node for node, k in tasks.items() if lowered.tasks[k].phase == "forward"]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found and lowered.values[node].kind != "input":
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _maker_module(lowered: Lowered, graph: Graph, tasks: dict[fx.Node, int], node: fx.Node) -> str:
    """The module of the operation that made what a node views."""
    value = lowered.values[node]
    while value.base is not None and value.node not in tasks:
        value = value.base
    return graph.operations[tasks[value.node]].module if value.node in tasks else ""
