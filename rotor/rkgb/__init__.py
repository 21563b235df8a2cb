"""rk-GB's published names: graphs of a captured step, from raw to simplified, cut into blocks.

``make_all_graphs(model, sample)`` captures; ``print_all_graphs(result)`` draws the result.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rotor.common.calls import sample_call
from rotor.graph.contraction import forward_part
from rotor.graph.graph import Graph
from rotor.rkgb import backward as _backward
from rotor.rkgb import forward as _forward
from rotor.rkgb import simplified as _simplified
from rotor.rkgb.backward import K_C_node, K_D_node, K_graph, build_k
from rotor.rkgb.blocks import (
    anonymous,
    block_names,
    block_of_k,
    block_of_s,
    classes,
    cut,
)
from rotor.rkgb.figures import print_all_graphs, print_graph, print_graph_list
from rotor.rkgb.forward import B_graph, B_node, D_graph, D_node, Var_info, build_b, build_d
from rotor.rkgb.grouping import group
from rotor.rkgb.simplified import S_graph, S_node, build_s
from rotor.rkgb.source import Trace, argument_names
from rotor.rkgb.units import Unit, contracted, units_of
from rotor.units import format_bytes, format_seconds
from rotor.wrapper.building import capture_inputs, step_graph

__all__ = [
    "B_graph",
    "B_node",
    "D_graph",
    "D_node",
    "K_C_node",
    "K_D_node",
    "K_graph",
    "Result",
    "S_graph",
    "S_node",
    "Var_info",
    "all_graphs",
    "make_all_graphs",
    "make_inputs",
    "print_all_graphs",
    "print_graph",
    "print_graph_list",
    "print_inputs",
    "test_rkgb",
]


@dataclass(frozen=True, eq=False)
class Result:
    """The graphs of a captured training step.

    Attributes
    ----------
    B_graph
        The list of operations of the forward, as captured.
    D_graph
        The data-flow graph of the forward: one node for every assignment.
    S_graph
        The simplified forward: about one node for each layer.
    K_graph
        Forward, loss and backward: computations and data.
    S_graph_list, K_graph_list
        The blocks of `S_graph`, cut at articulation points, and the computations of each.
    equivalent_classes
        Numbers of blocks that do the same work, forward and backward, together.
    list_ano_S
        The text without names of the first block of each class.
    block_names
        For each block the common beginning of the paths of its modules.
    raw
        `D_graph` as a `Graph`: every node of the forward as it was captured, views and single
        outputs included, which make a storage of 0 bytes each.
    forward
        The operations of the forward.
    simplified
        `S_graph` as a `Graph`.
    forward_and_backward
        The operations of forward, loss and backward, in order: the graph that engines plan.
    partitioned
        One operation for the forward of each block, one for the loss, one for the backward of each
        block.

    Notes
    -----
    `R`, `F`, `S`, `FB` and `P` are the published short names of the last five.
    """

    B_graph: _forward.B_graph = field(repr=False)
    D_graph: _forward.D_graph = field(repr=False)
    S_graph: _simplified.S_graph = field(repr=False)
    K_graph: _backward.K_graph = field(repr=False)
    S_graph_list: list[_simplified.S_graph] = field(repr=False)
    K_graph_list: list[_backward.K_graph] = field(repr=False)
    equivalent_classes: list[list[int]]
    list_ano_S: list[str] = field(repr=False)
    block_names: list[str]
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
        """The simplified graph of the forward."""
        return self.simplified

    @property
    def FB(self) -> Graph:
        """The graph of forward and backward."""
        return self.forward_and_backward

    @property
    def P(self) -> Graph:
        """The partitioned graph."""
        return self.partitioned

    def summary(self) -> str:
        """Return the result as text: graphs, classes of blocks, sizes and times."""
        return "\n".join(_summary(self)) + "\n"


all_graphs = Result
"""The published name of `Result`."""


def make_inputs(
    model: nn.Module, model_inputs: Any, model_kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of a call by the names that the model's forward has for them.

    Parameters
    ----------
    model
        Any module.
    model_inputs
        A tensor, a list or tuple of positional arguments, or a dictionary of keyword arguments.
    model_kwargs
        Further keyword arguments.

    Returns
    -------
    dict
        Arguments by name.

    Raises
    ------
    TypeError
        The model cannot be called so.
    """
    args, kwargs = _arguments(model_inputs, model_kwargs)
    try:
        return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(
            f"{type(model).__name__} cannot be called with these inputs: {error}; give a list of "
            "positional arguments, or a dictionary of keyword arguments"
        ) from None


def _arguments(
    model_inputs: Any, model_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = sample_call(model_inputs, takes_lists=True)
    return args, {**kwargs, **(model_kwargs or {})}


def print_inputs(model: nn.Module) -> None:
    """Write the names of the arguments of a module's forward to standard output, one a line."""
    names = inspect.signature(model.forward).parameters
    sys.stdout.write("".join(f"{name}\n" for name in names))


def make_all_graphs(
    model: nn.Module,
    model_inputs: Any,
    model_kwargs: Mapping[str, Any] | None = None,
    verbose: bool = False,
    impose_device: bool = True,
    bool_bg: bool = True,
    bool_dg: bool = True,
    bool_sg: bool = True,
    bool_kg: bool = True,
    bool_list_sg: bool = True,
    bool_list_kg: bool = True,
    check_device_is_gpu: bool = True,
) -> Result:
    """Capture and measure a training step of a module, which stays as it is.

    Parameters
    ----------
    model
        Any module.
    model_inputs
        A sample of its input: a tensor, a list or tuple of positional arguments, a dictionary of
        keyword arguments.
    model_kwargs
        Further keyword arguments.
    verbose
        Write a summary to standard output.
    impose_device, check_device_is_gpu
        Accepted as published: the step is captured on the device of the model and its input.
    bool_bg, bool_dg, bool_sg, bool_kg, bool_list_sg, bool_list_kg
        Accepted as published: all graphs are views of one capture, and all are built.

    Returns
    -------
    Result
        The graphs that rk-GB has, from raw to partitioned.

    Raises
    ------
    CaptureError
        The model has no single graph; the message has the reason and the line of code.
    TypeError
        The model cannot be called so.
    """
    make_inputs(model, model_inputs, model_kwargs)
    args, kwargs = _arguments(model_inputs, model_kwargs)
    step, primals = capture_inputs(model, args, kwargs)
    _, names = argument_names(model, args, kwargs)
    result = _built(Trace(step, model, primals, names), step_graph(step))
    if verbose:
        sys.stdout.write(result.summary())
    return result


def _built(trace: Trace, step: Graph) -> Result:
    grouped = group(trace, step)
    sg = build_s(trace, step, grouped)
    units = units_of(trace, grouped)
    kg = build_k(trace, step, grouped, units, sg)
    dg = build_d(trace, step)
    blocks = cut(sg)
    texts = anonymous(trace, grouped, kg, blocks)
    alike = classes(texts)
    parts = [block_of_s(sg, block) for block in blocks]
    names = block_names(sg, blocks)
    return Result(
        B_graph=build_b(trace),
        D_graph=dg,
        S_graph=sg,
        K_graph=kg,
        S_graph_list=parts,
        K_graph_list=[block_of_k(kg, part) for part in parts],
        equivalent_classes=alike,
        list_ano_S=[texts[members[0]] for members in alike],
        block_names=names,
        raw=dg.graph,
        forward=forward_part(step),
        simplified=sg.graph,
        forward_and_backward=step,
        partitioned=_partitioned(step, units, blocks, names),
    )


def _partitioned(
    step: Graph, units: Sequence[Unit], blocks: Sequence[Sequence[int]], names: Sequence[str]
) -> Graph:
    """Merge consecutive computations of a block and a phase to one operation."""
    home = {number: k for k, block in enumerate(blocks) for number in block}
    groups: list[list[Unit]] = []
    places: list[tuple[str, int]] = []
    for unit in units:
        place = (unit.phase, home.get(unit.owner, -1))
        if not places or places[-1] != place:
            places.append(place)
            groups.append([])
        groups[-1].append(unit)
    prefix = {"forward": "fwd", "backward": "bwd"}
    labels = [f"{prefix.get(phase, phase)}_block{k}" if k >= 0 else phase for phase, k in places]
    modules = [names[k] if k >= 0 else "" for _, k in places]
    return contracted(step, groups, labels, modules)


def test_rkgb(model: nn.Module, model_inputs: Any, **kwargs: Any) -> Result:
    """Build the graphs of a module, and write a summary to standard output, as published.

    Parameters
    ----------
    model, model_inputs, **kwargs
        As of `make_all_graphs`.

    Returns
    -------
    Result
        The graphs; `Result.summary` is the text that was written.
    """
    return make_all_graphs(model, model_inputs, **{**kwargs, "verbose": True})


test_rkgb.__test__ = False  # type: ignore[attr-defined]


def _summary(result: Result) -> list[str]:
    kg, blocks = result.K_graph, result.K_graph_list
    program = kg.simulate()
    lines = [
        f"B_graph: {len(result.B_graph.nodes)} operations as captured",
        f"D_graph: {len(result.D_graph.nodes)} nodes, one for each assignment",
        f"S_graph: {len(result.S_graph.nodes)} nodes, about one for each layer",
        f"K_graph: {len(kg.list_kcn)} computations, {len(kg.list_kdn)} data, "
        f"{format_seconds(program.makespan)} and {format_bytes(program.peak_bytes)} without "
        "recomputation",
        f"{len(blocks)} blocks, cut at articulation points, in "
        f"{len(result.equivalent_classes)} classes:",
    ]
    for number, members in enumerate(result.equivalent_classes):
        first = blocks[members[0]]
        once = first.simulate()
        kept = sum(kdn.mem for kdn in first.list_kdn if kdn.kdn_type in ("data", "phantoms"))
        computed = "+".join(str(len(blocks[k].list_kcn) - 1) for k in members[:4])
        more = "+..." if len(members) > 4 else ""
        places = ", ".join(result.block_names[k] or "(the model)" for k in members[:4])
        lines.append(
            f"  class {number}: {len(members)} alike, blocks {_ranges(members)} ({places}"
            f"{', ...' if len(members) > 4 else ''}): {len(result.S_graph_list[members[0]].nodes)} "
            f"nodes, {computed}{more} computations, {format_seconds(once.makespan)}, makes "
            f"{format_bytes(kept)} in the forward"
        )
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text; consecutive ones are written as ranges."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in found)
