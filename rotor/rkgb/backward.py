"""The graph of forward and backward (K): computations, and the data between them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import fx

from rotor.graph.graph import Graph
from rotor.graph.program import Program, simulate
from rotor.rkgb.forward import Var_info
from rotor.rkgb.grouping import Grouped
from rotor.rkgb.simplified import Coded, S_graph, S_node
from rotor.rkgb.source import Trace
from rotor.rkgb.units import Unit, contracted, is_repeatable

_NS = 1e9


@dataclass(eq=False)
class K_C_node(Coded):
    """One computation: an S node's work in the forward, or in the backward, or the loss.

    Attributes
    ----------
    name
        ``"fwd_"`` or ``"bwd_"`` and the main target; "loss".
    main_target
        The main target of its S node.
    is_fwd
        True in the forward, and for the loss.
    is_rand
        True if it draws random numbers.
    main_code, body_code, inplace_code
        In the forward as of `S_node`, where a repetition leaves `inplace_code` out; in the
        backward everything is main code, and the loss, which is not known, has none.
    all_targets
        Names that its statements assign; for the loss the names of its gradients.
    tensor_targets, container_targets, inplace_targets
        As of `S_node`.
    deps_real
        Data that it reads.
    deps_fake
        Data of which it needs only the shape: none.
    users
        Data that it makes.
    deps_global, users_global
        The same as `deps_real` and `users`.
    time
        Seconds of one run, measured.
    overhead
        Bytes that it needs beside its inputs and results, while it runs.
    operations
        Numbers of its operations in the graph of the step, in order.
    number
        Its operation in `K_graph.graph`.
    module
        Path of its module.
    """

    name: str
    main_target: str
    is_fwd: bool
    is_rand: bool = False
    deps_real: set[K_D_node] = field(default_factory=set, repr=False)
    deps_fake: set[K_D_node] = field(default_factory=set, repr=False)
    users: set[K_D_node] = field(default_factory=set, repr=False)
    time: float = 0.0
    overhead: int = 0
    operations: list[int] = field(default_factory=list, repr=False)
    number: int = 0
    module: str = ""

    @property
    def deps_global(self) -> set[K_D_node]:
        """Data that it reads."""
        return self.deps_real | self.deps_fake

    @property
    def users_global(self) -> set[K_D_node]:
        """Data that it makes."""
        return self.users

    def get_main_code(self) -> str:
        """Return the statements that compute its result."""
        return self.main_code


@dataclass(eq=False)
class K_D_node:
    """Data between computations.

    Attributes
    ----------
    kdn_type
        "data": results of the forward that the forward or the caller reads. "phantoms": other data
        that is kept for the backward, or until buffers are written. "grad": the gradient of
        the data. "pgrad", which is not among the published types: gradients of parameters.
    main_target
        The main target of the S node that it belongs to.
    name
        The main target and the type.
    all_targets
        Names of the S node's values, for data.
    info
        Properties of the main target.
    mem
        Bytes of its storages.
    deps
        Computations that make it.
    users_real
        Computations that read it.
    users_fake
        Computations that need only its shape: none.
    deps_global, users_global
        The same as `deps` and `users_real`.
    storages
        Numbers of its storages in the graph of the step.
    """

    kdn_type: str
    main_target: str
    all_targets: list[str] = field(default_factory=list, repr=False)
    info: Var_info | None = field(default=None, repr=False)
    mem: int = 0
    deps: set[K_C_node] = field(default_factory=set, repr=False)
    users_real: set[K_C_node] = field(default_factory=set, repr=False)
    users_fake: set[K_C_node] = field(default_factory=set, repr=False)
    storages: list[int] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        """The main target and the type."""
        return f"{self.main_target} {self.kdn_type}"

    @property
    def deps_global(self) -> set[K_C_node]:
        """Computations that make it."""
        return self.deps

    @property
    def users_global(self) -> set[K_C_node]:
        """Computations that read it."""
        return self.users_real | self.users_fake


@dataclass(eq=False)
class K_graph:
    """Forward, loss and backward, of the whole model or of one block.

    Attributes
    ----------
    list_kcn
        Computations in the order in which they run.
    list_kdn
        Data, in the order in which they are first made.
    dict_kn
        Both, by name.
    loss_kcn
        The loss; in the graph of a block, the backward of the blocks after it.
    input_kdn_data, input_kdn_grad
        Data that exists before the first node (constants; inputs take no bytes), and the gradients
        of inputs; ``None`` if no input needs one.
    output_kdn_data, output_kdn_grad
        Data of the last output, and its gradient.
    init_code
        Statements of the node of the inputs.
    end_code
        As of `S_graph`; they may run after the backward.
    gradients
        Names of the gradients, by the text of the parameter or input that they belong to.
    dict_info, dict_constants
        As of `S_graph`.
    sg
        The simplified graph of the same nodes.
    graph
        The same as operations and storages: one operation for each computation. It can be planned,
        drawn and saved.
    step
        The graph of the step, whose operations the computations consist of.

    Notes
    -----
    A node whose backward runs nothing (a sum hands its gradient on) has no computation for it.
    """

    list_kcn: list[K_C_node]
    list_kdn: list[K_D_node]
    dict_kn: dict[str, K_C_node | K_D_node] = field(init=False, repr=False)
    loss_kcn: K_C_node
    input_kdn_data: K_D_node
    input_kdn_grad: K_D_node | None
    output_kdn_data: K_D_node
    output_kdn_grad: K_D_node
    init_code: str = field(repr=False)
    end_code: str = field(repr=False)
    gradients: dict[str, str] = field(repr=False)
    dict_info: dict[str, Var_info] = field(repr=False)
    dict_constants: dict[str, Any] = field(repr=False)
    sg: S_graph = field(repr=False)
    graph: Graph = field(repr=False)
    step: Graph = field(repr=False)

    def __post_init__(self) -> None:
        nodes: list[K_C_node | K_D_node] = [*self.list_kcn, *self.list_kdn]
        self.dict_kn = {node.name: node for node in nodes}

    def simulate(self, nodes: Iterable[K_C_node] | None = None) -> Program:
        """Check and price computations in some order, operation by operation.

        Operations that run once, such as the update of a buffer, are left out of repetitions.

        Parameters
        ----------
        nodes
            Computations in the order in which they run, with repeats; by default `list_kcn`.

        Returns
        -------
        Program
            The equivalent program of `step`: its time and peak are the engine's own.

        Raises
        ------
        InvalidSequenceError
            A computation runs before its data is made, or again where it must not;
            ``position`` says where.
        """
        ops: list[int] = []
        done: set[K_C_node] = set()
        for node in self.list_kcn if nodes is None else nodes:
            again = node in done and is_repeatable(self.step, node.operations)
            done.add(node)
            ops += [k for k in node.operations if not (again and self.step.operations[k].once)]
        return simulate(self.step, ops)


class Builder:
    """Maker of the graph of forward and backward, from the captured step and its cost model."""

    def __init__(
        self, trace: Trace, step: Graph, grouped: Grouped, units: Sequence[Unit], sg: S_graph
    ) -> None:
        self.trace, self.step, self.grouped = trace, step, grouped
        self.units, self.sg = units, sg
        self.data: dict[tuple[str, S_node], K_D_node] = {}
        values = trace.lowered.values
        self.effects = {s for _, node in trace.mutations for s in values[node].storages}
        self.effects -= {s for node in trace.outputs for s in values[node].storages}

    def _node(self, owner: int) -> S_node:
        return self.sg.nodes[owner] if owner >= 0 else self.sg.init_node

    def run(self) -> K_graph:
        """Return the graph."""
        labels = [self._name(unit) for unit in self.units]
        modules = [self._node(unit.owner).module for unit in self.units]
        graph = contracted(self.step, [[unit] for unit in self.units], labels, modules)
        kcns = list(map(self._computation, self.units, labels))
        for number, (kcn, op) in enumerate(zip(kcns, graph.operations, strict=True)):
            kcn.number, kcn.time, kcn.overhead = number, op.cost_ns / _NS, op.workspace_bytes
        self._connect(graph, kcns)
        source = self._of("data", self.sg.init_node)
        last = self.sg.output_node
        loss = next(kcn for kcn, unit in zip(kcns, self.units, strict=True) if unit.phase == "loss")
        return K_graph(
            list_kcn=kcns,
            list_kdn=list(self.data.values()),
            loss_kcn=loss,
            input_kdn_data=source,
            input_kdn_grad=self.data.get(("grad", self.sg.init_node)),
            output_kdn_data=self._of("data", last),
            output_kdn_grad=self._of("grad", last),
            init_code=self.sg.init_node.get_code(),
            end_code=self.sg.end_code,
            gradients=self._gradients(),
            dict_info=self.sg.dict_info,
            dict_constants=self.trace.constants,
            sg=self.sg,
            graph=graph,
            step=self.step,
        )

    def _name(self, unit: Unit) -> str:
        if unit.phase == "loss":
            return "loss"
        prefix = "fwd" if unit.phase == "forward" else "bwd"
        suffix = f"_part{unit.part}" if unit.part else ""
        return f"{prefix}_{self._node(unit.owner).main_target}{suffix}"

    def _computation(self, unit: Unit, name: str) -> K_C_node:
        s_node = self._node(unit.owner)
        kcn = K_C_node(
            name=name,
            main_target="loss" if unit.phase == "loss" else s_node.main_target,
            is_fwd=unit.phase != "backward",
            is_rand=any(self.step.operations[k].random for k in unit.operations),
            operations=unit.operations,
            module="" if unit.phase == "loss" else s_node.module,
        )
        if unit.phase == "forward":
            for part in fields(Coded):
                setattr(kcn, part.name, copy.copy(getattr(s_node, part.name)))
        elif unit.phase == "loss":
            kcn.all_targets = [self.trace.name(node) for node in self.trace.lowered.tangents]
            kcn.tensor_targets = list(kcn.all_targets)
        else:
            nodes = self._backward_nodes(unit)
            kcn.main_code = "\n".join(self.trace.statement(node) for node in nodes)
            kcn.all_targets = [self.trace.targets[node] for node in nodes]
            kcn.tensor_targets = list(kcn.all_targets)
        return kcn

    def _backward_nodes(self, unit: Unit) -> list[fx.Node]:
        """Return the operations of a part of the backward, and the views that are read of them."""
        own = {self.trace.lowered.tasks[k].node for k in unit.operations}
        found: set[fx.Node] = set()
        waiting = [node for node in own if node is not None]
        for gradient in self.trace.lowered.gradients:
            is_made = isinstance(gradient, fx.Node) and gradient in self.trace.targets
            if is_made and self.trace.root(gradient) in own:
                waiting.append(gradient)
        late = set(self.trace.backward)
        while waiting:
            node = waiting.pop()
            if node in found or node not in late:
                continue
            if self.trace.is_operation(node) and node not in own:
                continue
            found.add(node)
            waiting.extend(node.all_input_nodes)
        return [node for node in self.trace.backward if node in found]

    def _gradients(self) -> dict[str, str]:
        lowered = self.trace.lowered
        return {
            self.trace.name(primal): self.trace.name(gradient)
            for primal, gradient in zip(lowered.primals, lowered.gradients, strict=True)
            if isinstance(gradient, fx.Node)
        }

    def _of(self, kind: str, s_node: S_node) -> K_D_node:
        key = (kind, s_node)
        if key not in self.data:
            names = list(s_node.tensor_targets) if kind == "data" else []
            self.data[key] = K_D_node(kind, s_node.main_target, names, s_node.info)
        return self.data[key]

    def _connect(self, graph: Graph, kcns: Sequence[K_C_node]) -> None:
        self._of("data", self.sg.init_node)
        readers: dict[int, list[int]] = {}
        for number, op in enumerate(graph.operations):
            for s in op.inputs:
                readers.setdefault(s, []).append(number)
        grads = self._gradient_storages()
        for number, op in enumerate(graph.operations):
            for s in op.outputs:
                storage = graph.storages[s].extra["storage"]
                kdn = self._kind(number, storage, readers.get(s, []), grads)
                kdn.mem += graph.storages[s].bytes
                kdn.storages.append(storage)
                kdn.deps.add(kcns[number])
                kcns[number].users.add(kdn)
                for reader in readers.get(s, []):
                    kdn.users_real.add(kcns[reader])
                    kcns[reader].deps_real.add(kdn)

    def _gradient_storages(self) -> dict[int, bool]:
        """Return the storages of a step's gradients, and whether each belongs to a parameter."""
        lowered = self.trace.lowered
        found: dict[int, bool] = {}
        for primal, gradient in zip(lowered.primals, lowered.gradients, strict=True):
            if isinstance(gradient, fx.Node):
                for s in lowered.values[gradient].storages:
                    found[s] = found.get(s, False) or primal in self.trace.parameters
        return found

    def _kind(
        self, maker: int, storage: int, readers: Sequence[int], grads: dict[int, bool]
    ) -> K_D_node:
        unit = self.units[maker]
        s_node = self._node(unit.owner)
        if unit.phase == "loss":
            return self._of("grad", self._output_of(storage))
        if unit.phase == "forward":
            read = any(self.units[k].phase != "backward" for k in readers) or not readers
            return self._of("data" if read and storage not in self.effects else "phantoms", s_node)
        if storage in grads:
            of_parameter = ("pgrad", s_node)
            return self._of(*(of_parameter if grads[storage] else ("grad", self.sg.init_node)))
        if not readers:
            return self._of("phantoms", s_node)
        reader = self._node(self.units[readers[0]].owner)
        return self._of("phantoms" if reader is s_node else "grad", self._hop(s_node, reader))

    def _output_of(self, storage: int) -> S_node:
        made = list(self.trace.lowered.tasks[self.trace.lowered.loss].made.values())
        order = self.trace.lowered.output_of_tangent
        index = made.index(storage)
        if index < len(order):
            node = self.trace.lowered.outputs[order[index]]
            if isinstance(node, fx.Node) and node in self.grouped.home:
                return self._node(self.grouped.home[node])
        return self.sg.output_node

    def _hop(self, s_node: S_node, reader: S_node) -> S_node:
        """Return the node, among a node's inputs, whose gradient `reader` continues."""
        if reader is s_node or reader in s_node.deps:
            return reader
        backs = {self._node(unit.owner) for unit in self.units if unit.phase == "backward"}
        for first in s_node.deps:
            waiting, seen = [first], {first}
            while waiting:
                current = waiting.pop()
                if current is reader:
                    return first
                if current not in backs:
                    more = [node for node in current.deps if node not in seen]
                    seen.update(more)
                    waiting.extend(more)
        return reader
