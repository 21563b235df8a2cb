"""Groups of operations that are one node of the simplified forward.

Each operation that is more than a view or a cheap step begins a group:

- Views and single results of an operation belong to the operation that made their storage.
- Element-wise operations and copies with one user belong to that user, within a module; so do
  views of parameters and inputs, and constants.
- Values that several nodes read and that depend on nothing belong to the node of the inputs.
- New values of buffers, and of inputs that are changed in place, belong to the operation that they
  are computed from.
"""

from __future__ import annotations

import heapq
import itertools
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import torch
from torch import fx

from rotor.graph.graph import Graph
from rotor.rkgb.source import Trace

_COPIES = ("_to_copy", "clone", "alias_copy", "lift_fresh_copy", "fill", "detach_copy")
_LARGEST_CONSTANT = 1 << 20
"""Constants of more bytes are nodes, as published."""


@dataclass
class Grouped:
    """Nodes of a capture in groups, one for each S node."""

    members: list[list[fx.Node]]
    """For each S node its forward nodes, in the order of the capture; the last of `roots` first."""
    roots: list[fx.Node]
    """For each S node its main operation."""
    init: list[fx.Node]
    """Nodes of the inputs: constants that several nodes read, and views."""
    home: dict[fx.Node, int]
    """For each forward node the number of its S node; -1 for `init`."""
    effects: set[fx.Node]
    """Nodes that only new values of buffers or inputs are computed from."""


class Grouping:
    """Maker of the groups that the operations of a forward are merged into."""

    def __init__(self, trace: Trace, step: Graph) -> None:
        self.trace = trace
        self.step = step
        self.within = set(trace.forward)
        self.needed = trace.ancestors(trace.outputs)
        # Values that the backward alone reads are needed as well, and no effects.
        late = [read for node in trace.backward for read in node.all_input_nodes]
        self.needed |= trace.ancestors(node for node in late if node in self.within)
        self.returned = set(trace.outputs)
        self.constants = self._constants()
        self.home: dict[fx.Node, fx.Node | None] = {}

    def _constants(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self.trace.forward:
            if any(read not in found for read in node.all_input_nodes):
                continue
            if not self.trace.is_operation(node):
                found.add(node)
                continue
            task = self.trace.task(node)
            size = sum(self.step.storages[s].bytes for s in task.made.values())
            if task.made and not task.random and size <= _LARGEST_CONSTANT:
                found.add(node)
        return found

    def _readers(self, node: fx.Node) -> tuple[list[fx.Node], bool]:
        """Return the operations that read a node or its views, and if one of these is returned."""
        operations, views = self.trace.readers(node)
        is_returned = not self.returned.isdisjoint(views)
        return [reader for reader in operations if reader in self.within], is_returned

    def _is_cheap(self, node: fx.Node) -> bool:
        task = self.trace.task(node)
        if task.random or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        name = getattr(node.target, "__name__", "").split(".")[0]
        return name in _COPIES or torch.Tag.pointwise in getattr(node.target, "tags", ())

    def run(self) -> Grouped:
        """Return the groups."""
        operations = [node for node in self.trace.forward if self.trace.is_operation(node)]
        for node in reversed(operations):
            if node in self.needed:
                self.home[node] = self._home_of(node)
        order = {node: k for k, node in enumerate(self.trace.forward)}
        for node in operations:
            if node not in self.needed:
                self.home[node] = self._home_of_effect(node, order)
        for node in self.trace.forward:
            if not self.trace.is_operation(node):
                self.home[node] = self._home_of_view(node)
        return self._numbered()

    def _home_of(self, node: fx.Node) -> fx.Node | None:
        readers, is_returned = self._readers(node)
        homes = {self.home[reader] for reader in readers if reader in self.needed}
        only = next(iter(homes)) if len(homes) == 1 else None
        if node in self.constants and not is_returned:
            return only if only is not None or not homes else None
        if only is None or is_returned or not self._is_cheap(node):
            return node
        scope, user = self.trace.scope(node), self.trace.module_of(only)
        return only if not scope or f"{user}.".startswith(f"{scope}.") else node

    def _home_of_effect(self, node: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
        """Return the group of the last operation that an update reads, else one of its module."""
        trace = self.trace
        read = [trace.root(n) for n in node.all_input_nodes if n in self.within]
        made = [n for n in read if n in self.home and self.home[n] is not None]
        if made:
            last = self.home[max(made, key=order.__getitem__)]
            others = {self.home[n] for n in made} - {last}
            return last if not self._reaches(last, others) else node
        same = [
            home
            for other, home in self.home.items()
            if home is other and trace.module_of(other) == trace.module_of(node)
        ]
        if not same:
            return node
        later = [home for home in same if order[home] > order[node]]
        return min(later or same, key=lambda home: abs(order[home] - order[node]))

    def _reaches(self, start: fx.Node | None, goals: set[fx.Node | None]) -> bool:
        """Return True if values of a group lead to one of the other groups."""
        waiting, seen = [start], {start}
        while waiting:
            current = waiting.pop()
            for node in [n for n, home in self.home.items() if home is current]:
                for reader in self._readers(node)[0]:
                    found = self.home.get(reader)
                    if found in goals:
                        return True
                    if found is not None and found not in seen:
                        seen.add(found)
                        waiting.append(found)
        return False

    def _home_of_view(self, node: fx.Node) -> fx.Node | None:
        root = self.trace.root(node)
        if self.trace.is_operation(root):
            return self.home[root]
        readers, is_returned = self._readers(node)
        homes = {self.home[reader] for reader in readers}
        return next(iter(homes)) if len(homes) == 1 and not is_returned else None

    def _numbered(self) -> Grouped:
        while True:
            members: dict[fx.Node, list[fx.Node]] = {}
            init = [node for node in self.trace.forward if self.home[node] is None]
            for node in self.trace.forward:
                root = self.home[node]
                if root is not None:
                    members.setdefault(root, []).append(node)
            roots = self._sorted(members)
            if len(roots) == len(members):
                break
            self._part(members, roots)
        home = {n: k for k, root in enumerate(roots) for n in members[root]}
        home |= dict.fromkeys(init, -1)
        effects = self.within - self.needed
        return Grouped([members[root] for root in roots], roots, init, home, effects)

    def _ordered(self, node: fx.Node) -> bool:
        """Return True if an operation draws numbers or runs once: their order stays."""
        task = self.trace.task(node)
        return task.random or task.once

    def _part(self, members: dict[fx.Node, list[fx.Node]], done: list[fx.Node]) -> None:
        """Make nodes of merged operations whose order keeps the groups from running."""
        parted = set()
        for root in members.keys() - set(done):
            for node in members[root]:
                if node is not root and self.trace.is_operation(node) and self._ordered(node):
                    parted.add(node)
        assert parted, "operations were merged in a circle"
        for node in self.trace.forward:
            if node in parted:
                self.home[node] = node
            elif not self.trace.is_operation(node) and self.trace.root(node) in parted:
                self.home[node] = self.trace.root(node)

    def _sorted(self, members: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
        """Sort the groups so that they can run, as near to the captured order as possible.

        Groups that cannot run are left out.
        """
        order = {node: k for k, node in enumerate(self.trace.forward)}
        sorter: TopologicalSorter[fx.Node] = TopologicalSorter()
        for root, nodes in members.items():
            read = {self.home.get(n) for node in nodes for n in node.all_input_nodes}
            sorter.add(root, *(made for made in read if made is not None and made is not root))
        fixed = [
            self.home[node]
            for node in self.trace.forward
            if self.trace.is_operation(node) and self._ordered(node)
        ]
        for first, second in itertools.pairwise([root for root in fixed if root is not None]):
            if first is not second:
                sorter.add(second, first)
        with suppress(CycleError):
            sorter.prepare()
        ready: list[tuple[int, fx.Node]] = []
        found: list[fx.Node] = []
        while sorter.is_active():
            for root in sorter.get_ready():
                heapq.heappush(ready, (order[root], root))
            found.append(heapq.heappop(ready)[1])
            sorter.done(found[-1])
        return found
