"""The forward as it was captured: a list of operations (B), and the graph that they make (D)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from rotor.graph.graph import Graph, Operation, Storage
from rotor.rkgb.source import Trace


@dataclass(frozen=True)
class Var_info:
    """Properties of one value of the forward.

    Attributes
    ----------
    ttype
        Its class: ``torch.Tensor``, or ``tuple`` for the results of an operation that has several.
    dtype
        Type of its elements; ``None`` for a tuple.
    tsize
        Its shape; for a tuple the shapes of its tensors.
    memsize
        Bytes of the storages that its operation makes; 0 for views and inputs.
    requires_grad
        True if it is of floating point and computed from something that gets a gradient.
    is_view
        True if it lies on the storage of another value.
    is_inplace
        True for the new value of an input that the forward changes in place.
    data_owner_name
        The value that its storage was made for.
    data_direct_parent_name
        The value that it is a view of; its own name where it is no view.
    """

    ttype: type
    dtype: torch.dtype | None
    tsize: Any
    memsize: int
    requires_grad: bool
    is_view: bool
    is_inplace: bool
    data_owner_name: str
    data_direct_parent_name: str


@dataclass(eq=False)
class B_node:
    """One operation of the captured forward.

    Attributes
    ----------
    target
        The name that it assigns.
    fct
        Text of the function that it calls; empty for an input.
    code
        The statement; empty for an input.
    deps
        Nodes that it reads.
    is_input
        True if it is a tensor among the arguments.
    is_rand
        True if it draws random numbers.
    deps_rand
        Names of random values that it reads besides `deps`: none, since every drawing is a node.
    module
        Path of the module that it belongs to.
    """

    target: str
    fct: str = ""
    code: str = ""
    deps: set[Any] = field(default_factory=set, repr=False)
    is_input: bool = False
    is_rand: bool = False
    deps_rand: set[str] = field(default_factory=set)
    module: str = ""

    @property
    def main_target(self) -> str:
        """The name that it assigns: `target`."""
        return self.target

    def get_code(self) -> str:
        """Return the statement."""
        return self.code


@dataclass(eq=False)
class B_graph:
    """The list of operations of the forward, in the order of the capture.

    Attributes
    ----------
    nodes
        Inputs, then operations.
    outputs
        Names of the forward's results.
    dict_constants
        Values of the names ``_cst_0_`` and so on that statements read.
    dict_rand
        Statements of random values outside of `nodes`: none, since every drawing is a node.
    """

    nodes: list[B_node]
    outputs: list[str]
    dict_constants: dict[str, Any] = field(repr=False)
    dict_rand: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """Name of the last value that the forward returns."""
        return self.outputs[-1]


@dataclass(eq=False)
class D_node(B_node):
    """One operation of the data-flow graph.

    Attributes
    ----------
    target, fct, code, deps, is_input, is_rand, deps_rand, module
        As of `B_node`.
    users
        Nodes that read it.
    protected
        True for inputs and outputs.
    info
        Properties of its value.
    """

    users: set[Any] = field(default_factory=set, repr=False)
    protected: bool = False
    info: Var_info | None = field(default=None, repr=False)


@dataclass(eq=False)
class D_graph:
    """The data-flow graph of the forward: one node for every assignment, views included.

    Attributes
    ----------
    nodes
        In the order in which they run; the inputs first.
    inputs
        Names of the inputs.
    outputs
        Names of the forward's results.
    output_node
        The node of the last of them.
    dict_info
        Properties of every value, by name.
    dict_constants, dict_rand
        As of `B_graph`.
    graph
        The same as operations and storages, which `rotor.graph` simulates, draws and saves.
    """

    nodes: list[D_node]
    inputs: list[str]
    outputs: list[str]
    output_node: D_node
    dict_info: dict[str, Var_info] = field(repr=False)
    dict_constants: dict[str, Any] = field(repr=False)
    graph: Graph = field(repr=False)
    dict_rand: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """Name of the last value that the forward returns."""
        return self.outputs[-1]


def input_nodes(trace: Trace) -> list[fx.Node]:
    """Return the inputs that are tensors among the arguments."""
    return [
        node
        for node in trace.lowered.primals
        if not trace.names[node].startswith(("self.get_", "_cst_"))
    ]


def build_b(trace: Trace) -> B_graph:
    """Return the list of operations of a captured forward."""
    made: dict[fx.Node, B_node] = {}
    for node in input_nodes(trace):
        made[node] = B_node(trace.name(node), is_input=True)
    for node in trace.forward:
        made[node] = B_node(**_fields(trace, node, made))
    outputs = [trace.name(node) for node in trace.outputs]
    return B_graph(list(made.values()), outputs, trace.constants)


def build_d(trace: Trace, step: Graph) -> D_graph:
    """Return the data-flow graph of a captured forward, whose step has the graph `step`."""
    infos = value_infos(trace, step)
    made: dict[fx.Node, D_node] = {}
    for node in input_nodes(trace):
        made[node] = D_node(trace.name(node), is_input=True, protected=True, info=infos[node])
    for node in trace.forward:
        made[node] = D_node(
            **_fields(trace, node, made), protected=node in trace.outputs, info=infos[node]
        )
    for d_node in made.values():
        for read in d_node.deps:
            read.users.add(d_node)
    outputs = [trace.name(node) for node in trace.outputs]
    last = next((made[node] for node in reversed(trace.outputs) if node in made), None)
    return D_graph(
        nodes=list(made.values()),
        inputs=[d_node.target for d_node in made.values() if d_node.is_input],
        outputs=outputs,
        output_node=last or list(made.values())[-1],
        dict_info={trace.name(node): info for node, info in infos.items()},
        dict_constants=trace.constants,
        graph=raw_graph(trace, step),
    )


def _fields(trace: Trace, node: fx.Node, made: dict[fx.Node, Any]) -> dict[str, Any]:
    return {
        "target": trace.targets[node],
        "fct": trace.function(node),
        "code": trace.statement(node),
        "deps": {made[read] for read in node.all_input_nodes if read in made},
        "is_rand": trace.is_operation(node) and trace.task(node).random,
        "module": maker_module(trace, node),
    }


def maker_module(trace: Trace, node: fx.Node) -> str:
    """Return the module of the operation that made the storage of a node; "" for inputs."""
    root = trace.root(node)
    return trace.module_of(root) if trace.is_operation(root) else ""


def value_infos(trace: Trace, step: Graph) -> dict[fx.Node, Var_info]:
    """Return the properties of inputs and of all values of the forward."""
    given = zip(trace.lowered.primals, trace.lowered.gradients, strict=True)
    needs = {node: gradient is not None for node, gradient in given}
    changed = {node for _, node in trace.mutations}
    infos: dict[fx.Node, Var_info] = {}
    for node in [*trace.lowered.primals, *trace.forward]:
        value: Any = node.meta.get("val")
        is_tensor = isinstance(value, torch.Tensor)
        is_float = not is_tensor or value.dtype.is_floating_point or value.dtype.is_complex
        flows = needs.get(node, False) or any(needs.get(read) for read in node.all_input_nodes)
        stops = getattr(node.target, "__name__", "").startswith("detach")
        needs[node] = flows and is_float and not stops
        root = trace.root(node) if node in trace.targets else node
        is_view = node is not root and trace.lowered.values[node].kind == "view"
        parent = trace.lowered.values[node].base if is_view else None
        made = trace.task(node).made.values() if trace.is_operation(node) else ()
        infos[node] = Var_info(
            ttype=torch.Tensor if is_tensor else tuple,
            dtype=value.dtype if is_tensor else None,
            tsize=value.shape if is_tensor else _shapes(value),
            memsize=sum(step.storages[s].bytes for s in made),
            requires_grad=needs[node],
            is_view=is_view,
            is_inplace=node in changed,
            data_owner_name=trace.name(root),
            data_direct_parent_name=trace.name(parent.node if parent is not None else node),
        )
    return infos


def _shapes(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_shapes(item) for item in value)
    return value.shape if isinstance(value, torch.Tensor) else ()


def raw_graph(trace: Trace, step: Graph) -> Graph:
    """Return the forward with its views: a storage of 0 bytes for each."""
    lowered = trace.lowered
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

    for node in trace.forward:
        value = lowered.values[node]
        if trace.is_operation(node):
            direct = reads(node.all_input_nodes)
            op = step.operations[trace.task_of[node]]
            for s in op.outputs:
                real[s] = len(storages)
                storages.append(step.storages[s])
            inputs = tuple(dict.fromkeys([*direct, *(real[s] for s in op.inputs)]))
            made = replace(
                op,
                name=node.name,
                inputs=inputs,
                outputs=tuple(real[s] for s in op.outputs),
                extra={"reads": direct},
            )
        else:
            lies_on = [real[s] for s in value.storages]
            base = value.base.node if value.base is not None else None
            direct = [own[base]] if base in own else lies_on
            own[node] = len(storages)
            storages.append(Storage(0))
            inputs = tuple(dict.fromkeys([*direct, *lies_on]))
            extra = {"reads": direct, "view": True}
            module = maker_module(trace, node)
            made = Operation(node.name, 0, inputs, (own[node],), module=module, extra=extra)
        operations.append(made)
    return Graph(storages, None, operations, name=step.name)
