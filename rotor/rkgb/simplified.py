"""The simplified forward (S): its nodes, their statements and the values that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rotor.graph.contraction import forward_part
from rotor.graph.graph import Graph
from rotor.rkgb.forward import Var_info, input_nodes, value_infos
from rotor.rkgb.grouping import Grouped
from rotor.rkgb.source import Trace
from rotor.rkgb.units import Unit, contracted

SOURCES = "__sources__"
"""Name of the node of the inputs."""


@dataclass(eq=False, kw_only=True)
class Coded:
    """Statements of a node, and the names that they assign."""

    main_code: str = field(default="", repr=False)
    inplace_code: str = field(default="", repr=False)
    body_code: str = field(default="", repr=False)
    all_targets: list[str] = field(default_factory=list, repr=False)
    tensor_targets: list[str] = field(default_factory=list, repr=False)
    container_targets: list[str] = field(default_factory=list, repr=False)
    inplace_targets: list[str] = field(default_factory=list, repr=False)

    def get_code(self) -> str:
        """Return all of its statements, one a line: main, body, in place."""
        return "\n".join(filter(None, [self.main_code, self.body_code, self.inplace_code]))

    def full_code(self) -> str:
        """Return all of its statements: `get_code`."""
        return self.get_code()


@dataclass(eq=False)
class S_node(Coded):
    """One operation of the simplified forward, with all operations merged into it.

    Attributes
    ----------
    main_target
        Name of its result.
    main_fct
        Text of the function that computes it.
    main_code
        Statements up to the one of the result: operations merged into it come first.
    body_code
        Statements of views and further results.
    inplace_code
        Statements that compute new values of buffers or inputs, and write them in place.
    all_targets
        Every name that its statements assign.
    tensor_targets, container_targets, inplace_targets
        Names of tensors other than temporaries, of tuples of results, and of new values of tensors
        that are changed in place.
    deps, users
        Nodes that it reads or that read it, each with the names that are read.
    is_artefact
        False: nodes that exist for sizes only do not occur, since sizes are numbers in a capture.
    is_rand
        True if it draws random numbers.
    deps_rand
        Names of random values that it reads besides `deps`: none, since every drawing is a node.
    protected
        True if it is an output of the forward.
    module
        Path of the module of its main operation.
    layer
        Class of that module, such as "Conv2d"; empty where the module has children.
    merged
        Names of the operations merged into it and of the main one, in order.
    info
        Properties of its result.
    number
        Its position in the graph; -1 for the node of the inputs.
    """

    main_target: str
    main_fct: str = ""
    deps: dict[S_node, set[str]] = field(default_factory=dict, repr=False)
    users: dict[S_node, set[str]] = field(default_factory=dict, repr=False)
    is_artefact: bool = False
    is_rand: bool = False
    deps_rand: set[str] = field(default_factory=set, repr=False)
    protected: bool = False
    module: str = ""
    layer: str = ""
    merged: list[str] = field(default_factory=list)
    info: Var_info | None = field(default=None, repr=False)
    number: int = -1

    @property
    def target(self) -> str:
        """Name of its result: `main_target`."""
        return self.main_target


@dataclass(eq=False)
class S_graph:
    """The simplified forward, or one block of it.

    Attributes
    ----------
    nodes
        In the order in which they run.
    init_node
        The node of the inputs: values that exist before the first node runs.
    output_node
        The node of the last output.
    direct_inputs
        Names that nodes read of `init_node`.
    hidden_inputs
        Nodes that make what a block reads: the main targets of earlier nodes, or `SOURCES`.
    direct_outputs
        Names of the forward's results, or of values that later blocks read.
    hidden_output
        The main target of `output_node`.
    dict_info
        Properties of every value, by name.
    dict_constants
        Values of the names ``_cst_0_`` and so on that statements read.
    dict_rand
        Statements of random values outside of `nodes`: none, since every drawing is a node.
    end_code
        Statements that change buffers or inputs in place and have to wait for the end.
    graph
        The same as operations and storages, which `rotor.graph` simulates, draws and saves.
    """

    nodes: list[S_node]
    init_node: S_node
    output_node: S_node
    direct_inputs: list[str]
    hidden_inputs: list[str]
    direct_outputs: list[str]
    hidden_output: str
    dict_info: dict[str, Var_info] = field(repr=False)
    dict_constants: dict[str, Any] = field(repr=False)
    graph: Graph = field(repr=False)
    dict_rand: dict[str, str] = field(default_factory=dict, repr=False)
    end_code: str = field(default="", repr=False)

    @property
    def outputs(self) -> list[str]:
        """Names of the forward's results, or of values that later blocks read."""
        return self.direct_outputs

    @property
    def inputs(self) -> list[str]:
        """Names that nodes read of `init_node`."""
        return self.direct_inputs

    def get_code(self) -> str:
        """Return the statements of the whole graph, in order.

        They run unchanged, without gradients, if ``torch``, ``self`` (the module), the
        constants and the arguments of the forward are defined.
        """
        parts = [self.init_node.get_code(), *(node.get_code() for node in self.nodes)]
        return "\n".join(part for part in [*parts, self.end_code] if part)


def build_s(trace: Trace, step: Graph, grouped: Grouped) -> S_graph:
    """Return the simplified forward of a captured step, from its groups of operations."""
    infos = value_infos(trace, step)
    given = input_nodes(trace)
    init = _node(trace, SOURCES, grouped.init, None, grouped.effects, infos, -1)
    init.all_targets = [trace.name(node) for node in given] + init.all_targets
    init.tensor_targets = [trace.name(node) for node in given] + init.tensor_targets
    nodes = [
        _node(trace, None, members, root, grouped.effects, infos, number)
        for number, (members, root) in enumerate(zip(grouped.members, grouped.roots, strict=True))
    ]
    home: dict[fx.Node, S_node] = dict.fromkeys(given, init)
    for fx_node, number in grouped.home.items():
        home[fx_node] = nodes[number] if number >= 0 else init
    for number, members in enumerate(grouped.members):
        for member in members:
            for read in member.all_input_nodes:
                made = home.get(read)
                if made is not None and made is not nodes[number]:
                    name = trace.name(read)
                    made.users.setdefault(nodes[number], set()).add(name)
                    nodes[number].deps.setdefault(made, set()).add(name)
    outputs = [node for node in trace.outputs if node in home]
    for fx_node in outputs:
        home[fx_node].protected = True
    end = _mutate(trace, grouped, nodes)
    last = next((home[n] for n in reversed(outputs) if home[n] is not init), nodes[-1])
    return S_graph(
        nodes=nodes,
        init_node=init,
        output_node=last,
        direct_inputs=sorted({name for names in init.users.values() for name in names}),
        hidden_inputs=[SOURCES],
        direct_outputs=[trace.name(node) for node in trace.outputs],
        hidden_output=last.main_target,
        dict_info={trace.name(node): info for node, info in infos.items()},
        dict_constants=trace.constants,
        graph=_costs(trace, step, grouped, nodes),
        end_code="\n".join(end),
    )


def _costs(trace: Trace, step: Graph, grouped: Grouped, nodes: Sequence[S_node]) -> Graph:
    """Merge the operations of each node to one, and those of the node of the inputs."""
    groups = {SOURCES: grouped.init}
    groups |= {node.main_target: m for node, m in zip(nodes, grouped.members, strict=True)}
    found = {
        name: sorted(trace.task_of[node] for node in members if trace.is_operation(node))
        for name, members in groups.items()
    }
    units = {name: [Unit("forward", -1, ops)] for name, ops in found.items() if ops}
    modules = [node.module for node in nodes]
    if SOURCES in units:
        modules.insert(0, "")
    return contracted(forward_part(step), list(units.values()), list(units), modules)


def _node(
    trace: Trace,
    name: str | None,
    members: Sequence[fx.Node],
    root: fx.Node | None,
    effects: set[fx.Node],
    infos: dict[fx.Node, Var_info],
    number: int,
) -> S_node:
    main = _main(root, members)
    leading = trace.ancestors([main]) if main is not None else set()
    operations = [node for node in members if trace.is_operation(node)]
    lines: dict[str, list[str]] = {"main": [], "body": [], "inplace": []}
    for member in members:
        part = "main" if member in leading else "inplace" if member in effects else "body"
        lines[part].append(trace.statement(member))
    return S_node(
        main_target=name or trace.name(main or members[0]),
        main_fct=trace.function(root) if root is not None else "",
        main_code="\n".join(lines["main"]),
        body_code="\n".join(lines["body"]),
        inplace_code="\n".join(lines["inplace"]),
        all_targets=[trace.targets[n] for n in members],
        tensor_targets=[
            trace.targets[n]
            for n in members
            if isinstance(n.meta.get("val"), torch.Tensor) and (n is main or n not in leading)
        ],
        container_targets=[trace.targets[n] for n in members if infos[n].ttype is tuple],
        is_rand=any(trace.task(n).random for n in operations),
        module=trace.module_of(root) if root is not None else "",
        merged=[_short(n) for n in operations if root is None or n in leading],
        info=infos[main] if main is not None else None,
        number=number,
        layer=_layer(root),
    )


def _main(root: fx.Node | None, members: Sequence[fx.Node]) -> fx.Node | None:
    """Return the first tensor that an operation gives."""
    if root is None or isinstance(root.meta.get("val"), torch.Tensor):
        return root
    within = set(members)
    items = [user for user in root.users if user in within]
    tensors = [item for item in items if isinstance(item.meta.get("val"), torch.Tensor)]
    indices = {item: item.args[1] for item in tensors}
    places = {item: index if isinstance(index, int) else 0 for item, index in indices.items()}
    return min(tensors, key=places.__getitem__, default=root)


def _short(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.name)).split(".")[0].strip("_")


def _layer(root: fx.Node | None) -> str:
    """Return the class of the innermost module of an operation; "" unless it is PyTorch's own."""
    stack = root.meta.get("nn_module_stack") if root is not None else None
    if not stack:
        return ""
    kind = next(reversed(stack.values()))[1]
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return name.rpartition(".")[2] if name.startswith("torch.nn.") else ""


def _mutate(trace: Trace, grouped: Grouped, nodes: Sequence[S_node]) -> list[str]:
    """Give each change in place to its node; return the changes that have to wait for the end."""
    end = []
    for primal, value in trace.mutations:
        number = grouped.home.get(value, -1)
        statement = f"{trace.name(primal)}.copy_({trace.name(value)})"
        inside = set(grouped.members[number]) if number >= 0 else set()
        if number < 0 or trace.readers_beside(primal, inside):
            end.append(statement)
            continue
        node = nodes[number]
        node.inplace_targets.append(trace.name(value))
        node.inplace_code = "\n".join(filter(None, [node.inplace_code, statement]))
    return end
