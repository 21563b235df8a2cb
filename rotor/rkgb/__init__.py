"""rk-GB's published names: graphs of a captured step, from raw to simplified, cut into blocks.

``make_all_graphs(model, sample)`` captures; ``print_all_graphs(result)`` draws the result.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import nn

from rotor.common.calls import sample_call
from rotor.graph.contraction import forward_part
from rotor.graph.graph import Graph
from rotor.rkgb import backward as _backward
from rotor.rkgb import forward as _forward
from rotor.rkgb import simplified as _simplified
from rotor.rkgb.backward import Builder, K_C_node, K_D_node, K_graph
from rotor.rkgb.blocks import anonymous, block_names, block_of_k, block_of_s, classes, cut
from rotor.rkgb.figures import print_all_graphs, print_graph, print_graph_list
from rotor.rkgb.forward import B_graph, B_node, D_graph, D_node, Var_info, build_b, build_d
from rotor.rkgb.grouping import Grouping
from rotor.rkgb.partitioned import Partitioner, PartitionerSequence
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


WANTED = frozenset({"R", "F", "S", "FB", "P", "H"})
"""Published short names of graphs."""

_LONG_NAMES = {
    "raw_graph": "R",
    "forward_graph": "F",
    "simplified_graph": "S",
    "forward_and_backward_graph": "FB",
    "Pc": "P",
}
_WITHOUT_COUNTERPART = {
    "Ps": "P is one graph, and K_graph_list has the computations of each block",
    "H": "P has one operation for each block and phase, K_graph_list the computations of each",
}
_WITHOUT_COUNTERPART |= {
    "partitioned_structure": _WITHOUT_COUNTERPART["Ps"],
    **dict.fromkeys(("Hs", "Hc", "hierarchical_structure"), _WITHOUT_COUNTERPART["H"]),
}


@dataclass(frozen=True, eq=False, init=False)
class Result:
    """The graphs of a captured and measured training step of a module, which stays as it is.

    Parameters
    ----------
    model
        Any module.
    model_args
        A sample of its input: a tensor, a list or tuple of positional arguments, a dictionary of
        keyword arguments.
    model_kwargs
        Further keyword arguments.
    wanted_graphs
        Short names of graphs: "R", "F", "S", "FB", "P", "H"; the others are ``None`` by their short
        and long published names. All are views of one capture.
    partitioners
        Of `rotor.rkgb.partitioned`; the first one makes `P`. By default ``PartitionerSequence()``.
    inspection_device, use_jit_instead_of_dynamo, jit_impose_device, print_time_in_each_stage
        Accepted as published: the step is captured on the device of the model and its input.
    do_inspection, dynamic_batch_dim, small_memsize_fine_to_simplify
        Accepted as published: every step is measured, with the sizes of its input.

    Raises
    ------
    CaptureError
        The model has no single graph; the message has the reason and the line of code.
    TypeError
        The model cannot be called so, or a partitioner is none.
    ValueError
        A wanted graph has another name.

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
    wanted_graphs: frozenset[str] = field(repr=False)

    def __init__(
        self,
        model: nn.Module,
        model_args: Any,
        model_kwargs: Mapping[str, Any] | None = None,
        wanted_graphs: Iterable[str] = WANTED,
        inspection_device: Any = None,
        use_jit_instead_of_dynamo: bool = False,
        jit_impose_device: bool = True,
        partitioners: Sequence[Partitioner] | None = None,
        print_time_in_each_stage: bool = False,
        do_inspection: bool = True,
        dynamic_batch_dim: Any = None,
        small_memsize_fine_to_simplify: int = 1 << 20,
    ) -> None:
        del inspection_device, use_jit_instead_of_dynamo, jit_impose_device, do_inspection
        del print_time_in_each_stage, dynamic_batch_dim, small_memsize_fine_to_simplify
        wanted = frozenset(wanted_graphs)
        unknown = sorted(wanted - WANTED)
        if unknown:
            raise ValueError(
                f"wanted_graphs has {unknown[0]!r}, expected some of {', '.join(sorted(WANTED))}"
            )
        partitioner = _partitioner(partitioners)
        make_inputs(model, model_args, model_kwargs)
        args, kwargs = _arguments(model_args, model_kwargs)
        step, primals = capture_inputs(model, args, kwargs)
        trace = Trace(step, model, primals, argument_names(model, args, kwargs))
        found = _built(trace, step_graph(step), partitioner)
        vars(self).update(found, wanted_graphs=wanted)

    def _wanted(self, name: str, graph: Graph) -> Graph | None:
        return graph if name in self.wanted_graphs else None

    @property
    def R(self) -> Graph | None:
        """The raw graph."""
        return self._wanted("R", self.raw)

    @property
    def F(self) -> Graph | None:
        """The graph of the forward."""
        return self._wanted("F", self.forward)

    @property
    def S(self) -> Graph | None:
        """The simplified graph of the forward."""
        return self._wanted("S", self.simplified)

    @property
    def FB(self) -> Graph | None:
        """The graph of forward and backward."""
        return self._wanted("FB", self.forward_and_backward)

    @property
    def P(self) -> Graph | None:
        """The partitioned graph."""
        return self._wanted("P", self.partitioned)

    def __getattr__(self, name: str) -> Any:
        if name in _LONG_NAMES:
            return getattr(self, _LONG_NAMES[name])
        if name in _WITHOUT_COUNTERPART:
            raise AttributeError(
                f"rotor has no counterpart of rk-GB's {name}: {_WITHOUT_COUNTERPART[name]}"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    args, kwargs = _arguments(model_inputs, model_kwargs)
    if isinstance(model_inputs, int | float | str):
        raise TypeError(f"a sample of the model's input has tensors, not {model_inputs!r}")
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
    result = Result(model, model_inputs, model_kwargs)
    if verbose:
        sys.stdout.write(result.summary())
    return result


def _partitioner(given: Sequence[Partitioner] | None) -> Partitioner:
    found = list(given or [PartitionerSequence()])
    wrong = [one for one in found if not isinstance(one, Partitioner)]
    if wrong:
        raise TypeError(
            f"{wrong[0]!r} is no partitioner: expected Partitioner() or PartitionerSequence() of "
            "rotor.rkgb.partitioned"
        )
    return found[0]


def _built(trace: Trace, step: Graph, partitioner: Partitioner) -> dict[str, Any]:
    """Return the attributes of a result."""
    grouped = Grouping(trace, step).run()
    sg = build_s(trace, step, grouped)
    units = units_of(trace, grouped)
    kg = Builder(trace, step, grouped, units, sg).run()
    dg = build_d(trace, step)
    blocks = cut(sg)
    texts = anonymous(trace, grouped, kg, blocks)
    alike = classes(texts)
    parts = [block_of_s(sg, block) for block in blocks]
    names = block_names(sg, blocks)
    is_cut = isinstance(partitioner, PartitionerSequence)
    return {
        "B_graph": build_b(trace),
        "D_graph": dg,
        "S_graph": sg,
        "K_graph": kg,
        "S_graph_list": parts,
        "K_graph_list": [block_of_k(kg, part) for part in parts],
        "equivalent_classes": alike,
        "list_ano_S": [texts[members[0]] for members in alike],
        "block_names": names,
        "raw": dg.graph,
        "forward": forward_part(step),
        "simplified": sg.graph,
        "forward_and_backward": step,
        "partitioned": _partitioned(step, units, blocks, names) if is_cut else kg.graph,
    }


def _partitioned(
    step: Graph, units: Sequence[Unit], blocks: Sequence[Sequence[int]], names: Sequence[str]
) -> Graph:
    """Merge consecutive computations of a block and a phase to one operation."""
    home = {number: k for k, block in enumerate(blocks) for number in block}
    keyed = groupby(units, lambda unit: (unit.phase, home.get(unit.owner, -1)))
    places, groups = zip(*((place, list(group)) for place, group in keyed), strict=True)
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
