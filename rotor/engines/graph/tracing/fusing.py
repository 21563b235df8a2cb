"""Fusion before planning: the kernels that Inductor would run become operations of a joint graph.

Inductor cuts the joint graph in two, simplifies both halves, and says which results its kernels
store, and which operators they compute where they are read. Here both halves become one graph
again, in which a *group* stands for each kernel. Calls of libraries stay operators, and views stay
views, or are taken by the groups that read them. What follows, from lowering to running, needs to
know nothing of kernels.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core, inductor, symbols
from rotor._pytorch.symbols import symbols_in
from rotor.common.tensor_trees import result_tensors
from rotor.engines.graph.tracing import rewrite
from rotor.engines.graph.tracing.false_edges import changed_inputs, identities_of
from rotor.engines.graph.tracing.groups import group_of
from rotor.engines.graph.tracing.lowering import symbols_among

_ORIGINS = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace")
"""Facts on a node's place in the model."""


@dataclass
class _Merged:
    """Forward and backward as Inductor leaves them, in one graph with fake tensors of its own."""

    module: fx.GraphModule
    outputs: list[Any]
    gradients: list[Any]
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    """Nodes that the halves take as inputs, by name."""
    late: set[fx.Node] = field(default_factory=set)
    """Nodes of the backward."""
    seeds: set[fx.Node] = field(default_factory=set)
    """Seeds of random numbers, as views of all seeds."""
    libraries: set[fx.Node] = field(default_factory=set)
    """Nodes that a library runs."""
    kernels: dict[fx.Node, Hashable] = field(default_factory=dict)
    """Kernels that store results, by the nodes of the results."""
    saved: list[fx.Node] = field(default_factory=list)
    """Results of the forward that the backward reads."""

    @property
    def graph(self) -> fx.Graph:
        """Graph of the module."""
        return self.module.graph


def fuse(module: fx.GraphModule, num_outputs: int) -> None:
    """Replace a joint graph by one of groups, calls of libraries and views.

    The first `num_outputs` results belong to the forward. Inductor's passes have been applied.
    """
    returned: Any = module.graph.output_node()
    described = returned.meta.get("desc")
    changed = changed_inputs(returned, num_outputs)
    # Inductor would drop what runs for its effects, such as assertions: it is written again.
    checks = list(filter(_makes_nothing, module.graph.nodes))
    read = list(dict.fromkeys(node for check in checks for node in check.all_input_nodes))
    results = list(returned.args[0])
    returned.args = ((*results[:num_outputs], *read, *results[num_outputs:]),)
    if described is not None:
        # Halves have as many results as descriptions.
        unknown = [None] * len(read)
        returned.meta["desc"] = [*described[:num_outputs], *unknown, *described[num_outputs:]]
    merged = _merged(module, num_outputs + len(read))
    found = dict(zip(read, merged.outputs[num_outputs:], strict=True))
    del merged.outputs[num_outputs:]
    with merged.graph.inserting_before(merged.graph.output_node()):
        for check in checks:
            merged.libraries.add(merged.graph.node_copy(check, found.__getitem__))
    _split_statistics(merged, changed)
    module.graph = _Grouping(merged).written()
    if described is not None:
        module.graph.output_node().meta["desc"] = described
    module.recompile()


def _makes_nothing(node: fx.Node) -> bool:
    value = node.meta.get("val")
    is_call = node.op == "call_function"
    return is_call and not (result_tensors(value) or symbols.is_symbol(value))


def _is_number(node: fx.Node) -> bool:
    return symbols.is_symbol(node.meta.get("val"))


def _parts(node: fx.Node) -> list[Any]:
    """Return the numbers that describe a node's result: itself, or sizes, strides and offsets."""
    value = node.meta.get("val")
    if _is_number(node):
        return [value]
    tensors = [tensor for tensor in result_tensors(value) if symbols.has_symbols(tensor)]
    return [part for t in tensors for part in (*t.shape, *t.stride(), t.storage_offset())]


def _symbols(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the nodes of the symbols by name: inputs, or sizes of inputs, which are added."""
    found: dict[str, fx.Node] = {}
    inputs = graph.find_nodes(op="placeholder")
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for name, (number, dimension) in symbols_among(inputs).items():
        found[name] = node = inputs[number]
        if dimension is not None:
            with graph.inserting_before(first):
                found[name] = graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
            found[name].meta["val"] = node.meta["val"].shape[dimension]
    return found


# -- both halves in one graph


def _merged(module: fx.GraphModule, num_outputs: int) -> _Merged:
    """Return both halves of a joint graph, simplified, in one graph."""
    inputs = module.graph.find_nodes(op="placeholder")
    mode = core.fake_mode_of(inputs)
    forward, backward = inductor.halves(module, num_outputs)
    graph = fx.Graph()
    merged = _Merged(fx.GraphModule({}, graph), [], [])
    for node in inputs:
        merged.inputs[node.name] = graph.node_copy(node)
    kept = [_name_of(node) for node in _returned(forward)[num_outputs:]]
    made = _append(merged, module, forward, mode, is_late=False)
    merged.outputs, saved = made[:num_outputs], made[num_outputs:]
    merged.saved = [node for node in saved if isinstance(node, fx.Node)]
    merged.inputs.update({name: node for name, node in zip(kept, saved, strict=True) if name})
    merged.gradients = _append(merged, module, backward, mode, is_late=True)
    graph.output((*merged.outputs, *merged.gradients))
    merged.module = fx.GraphModule(module, graph)
    # Copies that the backward computes again had the fake tensors of the forward.
    inductor.propagate(merged.module, mode)
    merged.libraries.update(filter(_makes_nothing, graph.nodes))
    return merged


def _returned(module: fx.GraphModule) -> list[Any]:
    output: Any = module.graph.output_node()
    return list(output.args[0])


def _name_of(node: Any) -> str:
    return node.name if isinstance(node, fx.Node) else ""


def _append(
    merged: _Merged, module: fx.GraphModule, half: fx.GraphModule, mode: Any, *, is_late: bool
) -> list[Any]:
    """Append a half to the merged graph, with its kernels; return the nodes of its results."""
    inductor.simplify(half, mode)
    kernels, libraries = inductor.kernels_of(half, mode)
    known: dict[fx.Node, fx.Node] = {}
    for node in half.graph.nodes:
        if node.op == "placeholder":
            known[node] = merged.inputs[node.name]
        elif node.op != "output":
            known[node] = _copied(merged, module, half, node, known, is_late)
            if node in libraries:
                merged.libraries.add(known[node])
            if node in kernels:
                merged.kernels[known[node]] = (is_late, kernels[node])
            if is_late:
                merged.late.add(known[node])
    return [known[node] if isinstance(node, fx.Node) else node for node in _returned(half)]


def _copied(
    merged: _Merged,
    module: fx.GraphModule,
    half: fx.GraphModule,
    node: fx.Node,
    known: dict[fx.Node, fx.Node],
    is_late: bool,
) -> fx.Node:
    if inductor.takes_seed(node):
        # The index differs between alike layers: it must be no constant of a group.
        seeds, index = node.args
        copy = merged.graph.call_function(
            torch.ops.aten.select.int,
            (known[seeds], 0, index),  # type: ignore[index]
        )
        merged.seeds.add(copy)
        return copy
    copy = merged.graph.node_copy(node, known.__getitem__)
    if node.op == "get_attr":
        copy.target = f"{'late' if is_late else 'early'}_{str(node.target).replace('.', '_')}"
        setattr(module, copy.target, core.attribute(half, str(node.target)))
    return copy


def _split_statistics(merged: _Merged, changed: Iterable[int]) -> None:
    """Give new values of inputs kernels of their own.

    What reads an input that changes must not run again: that holds for the new running statistics
    of BatchNorm, and not for the normalized values that Inductor has the same kernel compute.
    """
    for number in changed:
        node = merged.outputs[number]
        if isinstance(node, fx.Node) and node in merged.kernels:
            merged.kernels[node] = ("statistics", merged.kernels[node])


# -- groups


Unit = Hashable
"""A kernel, or the node of a library's call."""


class _Grouping:
    """Choice of the results that groups store, and the graph that follows."""

    def __init__(self, merged: _Merged) -> None:
        self.merged = merged
        self.kernels = merged.kernels
        nodes = list(merged.graph.nodes)
        self.order = {node: number for number, node in enumerate(nodes)}
        self._keys = {node: set(identities_of(node)) for node in nodes if node.op != "output"}
        self.views = {node for node in nodes if self._is_view(node)}
        self.libraries = merged.libraries - self.views
        for node in nodes:
            if node.target is getitem and node.args[0] in self.libraries:
                self.libraries.add(node)
        for node in [*self.kernels]:
            if node in self.views or self._is_leaf(node):
                del self.kernels[node]
        self.symbols = _symbols(merged.graph)
        """Nodes of the sizes that are symbols, by the names of these."""
        self.stored: set[fx.Node]
        """Results that groups store."""
        self._store_all()

    def _is_view(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        read = set().union(*(self._keys[source] for source in node.all_input_nodes))
        return bool(self._keys[node]) and self._keys[node] <= read and not self._is_made_item(node)

    def _is_made_item(self, node: fx.Node) -> bool:
        """Return whether a node takes one of several results that are no views."""
        source: Any = node.args[0] if node.args else None
        return node.target is getitem and not self._is_view(source)

    def _is_leaf(self, node: fx.Node) -> bool:
        """Return whether groups take a node as their input, and never compute it."""
        is_given = node.op in ("placeholder", "get_attr") or _is_number(node)
        return is_given or node in self.libraries or node in self.merged.seeds

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that must be computed for a node that may be a view."""
        if node not in self.views:
            return [node]
        return [base for source in node.all_input_nodes for base in self._bases(source)]

    # -- what is stored

    def _store_all(self) -> None:
        """Store what libraries, results and the backward read, and what the groups of these do."""
        merged = self.merged
        self.stored = set()
        waiting = [node for node in merged.saved if node.op == "call_function"]
        for node in merged.graph.nodes:
            is_call = node in self.libraries and node.target is not getitem
            if is_call or node.op == "output":
                waiting += node.all_input_nodes
        while waiting:
            for base in self._bases(waiting.pop()):
                if not self._is_leaf(base) and base not in self.stored:
                    self.kernels.setdefault(base, base)
                    self.stored.add(base)
                    waiting += self.reads(base)[1]

    def reads(self, result: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes that a group computes for a result, and those that it reads.

        Both come in an order that depends on the operators alone.
        """
        members: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}
        waiting = [(result, False)]
        while waiting:
            node, is_done = waiting.pop()
            if is_done:
                members[node] = None
            elif node not in members:
                waiting.append((node, True))
                for source in reversed(node.all_input_nodes):
                    if self._is_read(source, result):
                        inputs[source] = None
                    elif source not in members:
                        waiting.append((source, False))
        return list(members), list(inputs)

    def _is_read(self, node: fx.Node, result: fx.Node) -> bool:
        """Return whether the group of a result reads a node, and does not compute it."""
        if self._is_leaf(node):
            return True
        if node in self.views:
            return False
        if (node in self.merged.late) != (result in self.merged.late):
            return True
        return node in self.kernels and self.kernels[node] != self.kernels[result]

    # -- the order of the groups

    def units(self) -> dict[Unit, list[fx.Node]]:
        """Return the results of each kernel, and of each call of a library, in the graph's order.

        Where kernels would wait for one another, their results get groups of their own.
        """
        while True:
            units = self._units()
            waits = {unit: self._waits_for(unit, results) for unit, results in units.items()}
            ordered = self._ordered(units, waits)
            if len(ordered) == len(units):
                return {unit: units[unit] for unit in ordered}
            circles = _circles({unit: waits[unit] for unit in units if unit not in ordered})
            self._part([node for unit in circles for node in units[unit]])

    def _part(self, results: Iterable[fx.Node]) -> None:
        """Give results groups of their own, and store what these read of one another."""
        parted = [node for node in results if self.kernels.get(node, node) is not node]
        assert parted, "the nodes of a graph cannot wait for one another"
        self.kernels.update(zip(parted, parted, strict=True))
        self._store_all()

    def _units(self) -> dict[Unit, list[fx.Node]]:
        units: dict[Unit, list[fx.Node]] = defaultdict(list)
        for node in self.merged.graph.nodes:
            if node in self.stored:
                units[self.kernels[node]].append(node)
            elif node in self.libraries and node.target is not getitem:
                units[node].append(node)
        return dict(units)

    def _waits_for(self, unit: Unit, results: list[fx.Node]) -> set[Unit]:
        """Return the units that a unit reads."""
        read = [node for result in results for node in self._read_by(result)]
        found = {self._unit_of(base) for node in read for base in self._bases(node)}
        return found - {None, unit}

    def _read_by(self, result: fx.Node) -> list[fx.Node]:
        return self.reads(result)[1] if result in self.stored else result.all_input_nodes

    def _unit_of(self, node: fx.Node) -> Unit | None:
        """Return the unit that makes a node; None for the inputs of the graph."""
        if node in self.stored:
            return self.kernels[node]
        while node.target is getitem:
            node = node.args[0]  # type: ignore[assignment]
        return node if node.op == "call_function" and not _is_number(node) else None

    def _ordered(
        self, units: dict[Unit, list[fx.Node]], waits: dict[Unit, set[Unit]]
    ) -> dict[Unit, None]:
        """Return the units as early as the graph has them; those in a circle are missing."""
        places = {
            unit: max(map(self.order.__getitem__, results)) for unit, results in units.items()
        }
        unit_at = {place: unit for unit, place in places.items()}
        readers: dict[Unit, list[Unit]] = defaultdict(list)
        for unit, read in waits.items():
            for source in read:
                readers[source].append(unit)
        open_waits = {unit: len(read) for unit, read in waits.items()}
        ready = [places[unit] for unit, count in open_waits.items() if not count]
        heapq.heapify(ready)
        ordered: dict[Unit, None] = {}
        while ready:
            unit = unit_at[heapq.heappop(ready)]
            ordered[unit] = None
            for reader in readers[unit]:
                open_waits[reader] -= 1
                if not open_waits[reader]:
                    heapq.heappush(ready, places[reader])
        return ordered

    # -- the graph of groups

    def written(self) -> fx.Graph:
        """Return the graph of groups, calls of libraries and views."""
        merged, graph = self.merged, fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        for node in merged.graph.find_nodes(op="placeholder"):
            known[node] = graph.node_copy(node)
        for node in self.symbols.values():
            if node not in known:
                known[node] = graph.node_copy(node, known.__getitem__)
        reference = partial(self._reference, graph, known)
        for results in self.units().values():
            if results[0] in self.stored:
                self._write_group(graph, known, results)
            else:
                self._write_call(graph, known, results[0])
        results = [*merged.outputs, *merged.gradients]
        graph.output(tuple(reference(r) if isinstance(r, fx.Node) else r for r in results))
        return graph

    def _reference(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
        """Return the written node for a node; write views and sizes, which cost nothing."""
        if node not in known and _is_number(node):
            known[node] = self._number(graph, known, node.meta["val"])
        elif node not in known:
            known[node] = graph.node_copy(node, partial(self._reference, graph, known))
        return known[node]

    def _number(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], value: Any) -> fx.Node:
        """Write a size that depends on symbols, as a function of the graph's inputs alone."""
        scope = {name: known[self.symbols[name]] for name in sorted(symbols_in(value))}
        written = graph.call_function(symbols.evaluated, (symbols.text_of(value), scope))
        written.meta["val"] = value
        return written

    def _write_call(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], node: fx.Node) -> None:
        known[node] = graph.node_copy(node, partial(self._reference, graph, known))
        for user in node.users:
            if user.target is getitem:
                known[user] = graph.node_copy(user, known.__getitem__)

    def _write_group(
        self, graph: fx.Graph, known: dict[fx.Node, fx.Node], results: list[fx.Node]
    ) -> None:
        members: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}
        for result in results:
            computed, read = self.reads(result)
            members.update(dict.fromkeys(computed))
            inputs.update(dict.fromkeys(read))
        named = [*members, *inputs]
        found = {name for node in named for part in _parts(node) for name in symbols_in(part)}
        sizes = [self.symbols[name] for name in sorted(found)]
        inputs = dict.fromkeys([*sizes, *inputs])
        group = group_of(list(members), list(inputs), results)
        given = tuple(self._reference(graph, known, node) for node in inputs)
        call = graph.create_node("call_function", group, given, name=_name(results))
        call.meta.update(_facts(list(members), results))
        values = [result.meta["val"] for result in results]
        call.meta["val"] = values[0] if len(values) == 1 else tuple(values)
        known[results[0]] = call
        if len(results) > 1:
            for number, result in enumerate(results):
                known[result] = graph.call_function(getitem, (call, number))
                known[result].meta["val"] = result.meta["val"]


def _circles(waits: dict[Unit, set[Unit]]) -> set[Unit]:
    """Return the units that wait for themselves, among some that wait for these, or are these."""
    left = set(waits)
    while True:
        awaited = left & set().union(*(waits[unit] for unit in left))
        if awaited == left:
            return left
        left = awaited


def _name(results: list[fx.Node]) -> str:
    """Return a name for a group, of the operators that make its results."""
    makers: list[Any] = [node.args[0] if node.target is getitem else node for node in results]
    names = [str(getattr(n.target, "__name__", n.name)).split(".")[0] for n in makers]
    return "_".join(["fused", *dict.fromkeys(names)])


def _facts(members: list[fx.Node], results: list[fx.Node]) -> dict[str, Any]:
    """Return what a report says of a group, and whether its results must be saved."""
    found: dict[str, Any] = {}
    for node in [*reversed(results), *reversed(members)]:
        for name in _ORIGINS:
            if node.meta.get(name):
                found.setdefault(name, node.meta[name])
    marked = [node for node in results if rewrite.is_saved(node) or rewrite.prefers_saving(node)]
    if marked:
        found["recompute"] = min(marked, key=rewrite.prefers_saving).meta["recompute"]
    return found
