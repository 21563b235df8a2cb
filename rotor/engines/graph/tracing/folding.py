"""Capture of alike modules: one is traced, and its operations are copied for the others.

Dynamo traces the forward of the first of alike modules; a call of another one, whose trace would be
the same, is one node (see `rotor._pytorch.regions`). AOTAutograd sees such a call as one operation,
with one more for its backward. Both are then replaced by the operations of the module's own joint
graph, which is traced once. Where it is not certain that this gives the graph of a plain capture,
the module's forward is written out instead, and traced with the rest.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from rotor._pytorch import casts, core, regions
from rotor.engines.graph.tracing.alike import Alike, Slot, Watch, alike_modules, own_slots
from rotor.engines.graph.tracing.region_ops import (
    BACKWARD,
    CHOSEN,
    DOUBTS,
    FAMILIES,
    FORWARD,
    NUMBERS,
    Family,
    Region,
    Uncertain,
    call_of,
    family_of,
    storage_of,
)

_ATTEMPTS = 3
"""Traces of a model that are made before its modules are traced with the rest."""


_NUMBER = re.compile(r"_\d+$")
"""Number at the end of a node's name."""


class Changed(Exception):
    """Signal that a module is no longer like the one whose trace stands for it."""


class CastOnce(Exception):
    """Signal that alike modules have to be traced together."""


class _Stacks:
    """Stacks of modules, renamed from those of one module to those of another."""

    def __init__(self, prefixes: tuple[str, str] | None) -> None:
        self._old, self._new = prefixes or ("", "")
        self._known: dict[int, Any] = {}

    def apply(self, meta: dict[str, Any]) -> None:
        """Rename the stacks in the data of a node."""
        if not self._old:
            return
        for name in ("nn_module_stack", "fwd_nn_module_stack"):
            stack = meta.get(name)
            if stack:
                if id(stack) not in self._known:
                    self._known[id(stack)] = {k: self._renamed(v) for k, v in stack.items()}
                meta[name] = self._known[id(stack)]

    def _renamed(self, entry: Any) -> Any:
        path, kind = entry
        plain = core.module_path(str(path))
        if plain == self._old or plain.startswith(f"{self._old}."):
            path = self._new + plain[len(self._old) :]
        return path, kind


class _Copy:
    """Call of a region whose operations are copied into a graph."""

    def __init__(self, region: Region, stacks: _Stacks) -> None:
        self.region = region
        self._stacks = stacks
        self._known: dict[fx.Node, fx.Node] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def bind(self, inner: fx.Node, outer: fx.Node) -> None:
        """Have a node of the graph take the place of a node of the region."""
        self._known[inner] = outer
        here, there = inner.meta["val"], outer.meta["val"]
        shift = there.storage_offset() - here.storage_offset()
        self._storages[storage_of(inner)] = (there.untyped_storage(), shift)

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = self._storages.get(core.storage_identity(value))
            made = regions.alike(value) if place is None else regions.on_storage(value, *place)
            if place is None:
                self._storages[core.storage_identity(value)] = (made.untyped_storage(), 0)
            return made
        if isinstance(value, list | tuple):
            return type(value)(self._value(item) for item in value)
        return value

    def replace(
        self, graph: fx.Graph, node: fx.Node, nodes: Sequence[fx.Node], made: Sequence[fx.Node]
    ) -> None:
        """Replace a node, and those that take its results, by copies of nodes of the region."""
        users = {user.args[1]: user for user in node.users}
        if len(users) != len(node.users) or set(users) != set(range(len(made))):
            raise Uncertain("a result of a module is not used")
        for k, inner in enumerate(made):
            storage = users[k].meta["val"].untyped_storage()
            self._storages[storage_of(inner)] = (storage, 0)
        with graph.inserting_before(node):
            for inner in nodes:
                self._write(graph, inner)
        for k, inner in enumerate(made):
            users[k].replace_all_uses_with(self._known[inner])
            graph.erase_node(users[k])
        graph.erase_node(node)

    def _write(self, graph: fx.Graph, node: fx.Node) -> None:
        args = fx.node.map_arg(node.args, self._known.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._known.__getitem__) if node.kwargs else {}
        name = _NUMBER.sub("", node.name)
        made = graph.create_node("call_function", node.target, args, kwargs, name)
        meta = made.meta
        meta.update(node.meta)
        meta["val"] = self._value(node.meta.get("val"))
        if "seq_nr" in meta:
            meta["seq_nr"] = (id(self), meta["seq_nr"])
        self._stacks.apply(meta)
        self._known[node] = made


def _written_out(graph: fx.GraphModule, calls: Sequence[fx.Node], prefixes: Any) -> None:
    """Replace calls of regions by the nodes of their bodies."""
    for node in calls:
        body: Any = getattr(graph, node.args[0].target)  # type: ignore[union-attr, arg-type]
        known = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
        renamed = _Stacks(prefixes.get(node))
        with graph.graph.inserting_before(node):
            for inner in body.graph.nodes:
                if inner.op in ("placeholder", "output"):
                    continue
                made = graph.graph.node_copy(inner, known.__getitem__)
                renamed.apply(made.meta)
                known[inner] = made
                if inner.op in ("get_attr", "call_module"):
                    name = f"{node.name}_{inner.name}"
                    graph.add_module(name, getattr(body, inner.target))
                    made.target = name
        returned = body.graph.output_node().args[0]
        for user in list(node.users):
            user.replace_all_uses_with(known[returned[user.args[1]]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    graph.recompile()


def _renumber(graph: fx.Graph) -> None:
    """Number autograd's operations anew: copies have the numbers of the originals."""
    numbers: dict[Any, int] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if number is not None:
            node.meta["seq_nr"] = numbers.setdefault(number, len(numbers))


class Folding:
    """Calls of alike modules in one capture; a backend of ``torch.compile`` around `compiler`."""

    def __init__(self, compiler: Callable[..., Any], decompositions: Any) -> None:
        self._compiler = compiler
        self._decompositions = decompositions
        self._tracing: regions.Tracing | None = None
        self._calls: dict[int, tuple[str, str]] = {}
        self.watch: Watch | None = None
        """Check of the modules that were not traced."""
        self.copied = 0
        """Number of calls whose operations were copied from another call's."""
        self.reason = ""
        """Reason why calls of alike modules were traced with the rest; empty if none were."""
        self.was_tried = False
        """True if a module was traced by itself."""
        self.alike = Alike([], [])
        self.doubts: list[str] = []
        """Reasons of AOTAutograd's to trace modules one by one."""
        self.reasons: list[str] = []
        """Reasons of dynamo's to trace modules one by one."""

    @property
    def text(self) -> str:
        """Text on the alike modules; empty without any."""
        doubts = [self.reason, *self.doubts] if self.reason else self.doubts
        reasons = doubts or [*self.reasons, *self.alike.obstacles]
        why = f": {'; '.join(reasons)}" if reasons else ""
        if self.copied:
            return f"{self.copied} copied from one that was traced" + (
                f", others traced{why}" if reasons else ""
            )
        if not (self.alike.modules or self.alike.obstacles):
            return ""
        return f"traced one by one{why or ': the trace met no call of them'}"

    @contextmanager
    def tracing(self, module: nn.Module) -> Iterator[None]:
        """Have alike modules of a module be traced once in the context."""
        self.watch = Watch(module)
        self.alike = alike_modules(module)
        with regions.regions(self.alike.modules, own_slots) as self._tracing:
            try:
                yield
            finally:
                self.reasons = self._tracing.reasons
                self.was_tried = self._tracing.traced
                self._forget()
                self._tracing = None

    def _forget(self) -> None:
        for number in self._calls:
            for kept in (FAMILIES, DOUBTS, CHOSEN):
                kept.pop(number, None)
        self._calls.clear()

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph of dynamo's."""
        if not any(map(regions.is_region, graph.graph.nodes)):
            compiled: Callable[..., Any] = self._compiler(graph, examples)
            return compiled
        graph = regions.copied(graph)
        calls = list(filter(regions.is_region, graph.graph.nodes))
        prefixes = self._complete(graph, calls)
        if casts.has_casts_for_several(calls):
            raise CastOnce("autocast casts a weight of theirs once for several uses")
        taken, given = self._inputs(graph, examples)
        compiled = self._compiled(graph, calls, prefixes, given)
        if not taken:
            return compiled
        assert self.watch is not None
        modules = [call.module for node in calls if (call := self._call_of(node)) is not None]
        self.watch.begin(list(taken.values()), modules)
        return _with_inputs(compiled, list(taken), weakref.ref(self.watch))

    def _call_of(self, node: fx.Node) -> regions.Call | None:
        assert self._tracing is not None
        return self._tracing.calls.get(node.meta.get(regions.MARK, ""))

    def _complete(self, graph: fx.GraphModule, calls: list[fx.Node]) -> dict[fx.Node, Any]:
        """Add the tensors of modules to calls that lack them; return old and new module paths."""
        traced_calls = [node for node in reversed(calls) if self._call_of(node) is None]
        templates = {node.args[1]: node for node in traced_calls}
        prefixes: dict[fx.Node, Any] = {}
        order = {node: k for k, node in enumerate(graph.graph.nodes)}
        known = regions.inputs_by_tensor(graph.graph)
        for node in calls:
            call = self._call_of(node)
            if call is None:
                # Dynamo has one body for traces that came out alike.
                first = templates[node.args[1]]
                paths = (first.meta[regions.PATH], node.meta[regions.PATH])
                prefixes[node] = tuple(map(core.module_path, paths))
                continue
            traced, shared = call.template, templates[node.args[1]].args[2:]
            slots = own_slots(call.module)
            arguments: list[Any] = [None] * len(traced.inputs)
            after = _last_known(graph.graph, call.before)
            for number, origin in sorted(
                enumerate(traced.inputs), key=lambda p: order[shared[p[0]]]
            ):
                if isinstance(origin, int):
                    arguments[number] = node.args[2 + origin]
                elif number not in call.captured:
                    arguments[number] = shared[number]
                else:
                    tensor = call.captured[number]
                    if id(tensor) in known:
                        # Another call, or the forward itself, reads the tensor too.
                        arguments[number] = known[id(tensor)]
                        continue
                    with graph.graph.inserting_after(after):
                        value = regions.stand_in(tensor)
                        after = regions.add_input(graph.graph, f"{node.name}_{number}", value)
                    after.meta[regions.SLOT] = slots[id(tensor)]
                    arguments[number] = known[id(tensor)] = after
            node.args = (*node.args[:2], *arguments)
            prefixes[node] = (core.module_path(traced.source.name), core.module_path(call.path))
        return prefixes

    @staticmethod
    def _inputs(
        graph: fx.GraphModule, examples: Sequence[Any]
    ) -> tuple[dict[int, Slot], list[Any]]:
        """Return the slots of the added inputs by position, and the values of all inputs."""
        known = iter(examples)
        taken: dict[int, Slot] = {}
        given = []
        for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            slot = node.meta.get(regions.SLOT)
            if slot is None:
                given.append(next(known))
            else:
                taken[position] = slot
                given.append(node.meta["example_value"])
        return taken, given

    def _compiled(
        self, graph: fx.GraphModule, calls: list[fx.Node], prefixes: dict[fx.Node, Any], given: Any
    ) -> Callable[..., Any]:
        families = self._traced(calls)
        _written_out(graph, [node for node in calls if node not in families], prefixes)
        calls = list(families)
        originals = {node: (node.target, node.args) for node in calls}
        attempts = 0
        while families and attempts < _ATTEMPTS:
            attempts += 1
            numbers = self._fold(graph, families, prefixes)
            try:
                compiled: Callable[..., Any] = self._compiler(graph, given)
            except Uncertain as error:
                self.reason, self.copied = str(error), 0
            else:
                self.reason = ""
                return compiled
            for node in families:
                node.target, node.args = originals[node]
            learnt = [family.learn(self._decompositions) for family in families.values()]
            if any(learnt):
                continue
            doubted = [node for node in families if numbers[node] in DOUBTS]
            _written_out(graph, doubted, prefixes)
            left = set(families).difference(doubted)
            calls = [node for node in calls if node in left]
            families = {node: families[node] for node in calls} if doubted else {}
        _written_out(graph, calls, prefixes)
        written_out: Callable[..., Any] = self._compiler(graph, given)
        return written_out

    def _traced(self, calls: list[fx.Node]) -> dict[fx.Node, Family]:
        """Return the families of calls; calls that have to be traced with the rest are left out."""
        known: dict[Any, Family] = {}
        refused: set[Any] = set()
        for node in calls:
            call = self._call_of(node)
            if call is not None and node.args[1] not in known:
                given: Any = node.args[2:]
                values = [argument.meta["example_value"] for argument in given]
                try:
                    known[node.args[1]] = family_of(call.template, values, self._decompositions)
                except Uncertain as error:
                    self._doubt(refused, node.args[1], str(error))
        for node in calls:
            wanted = known[node.args[1]].first.wanted if node.args[1] in known else []
            if any(len(node.args[2 + k].users) > 1 for k in wanted):  # type: ignore[union-attr]
                text = "a tensor with a gradient is used by several modules"
                self._doubt(refused, node.args[1], text)
        return {
            node: known[node.args[1]]
            for node in calls
            if node.args[1] in known and node.args[1] not in refused
        }

    def _doubt(self, refused: set[Any], body: Any, reason: str) -> None:
        """Refuse to copy the calls of a body."""
        refused.add(body)
        if reason not in self.doubts:
            self.doubts.append(reason)

    def _fold(
        self, graph: fx.GraphModule, families: dict[fx.Node, Family], prefixes: dict[Any, Any]
    ) -> dict[fx.Node, int]:
        """Make each call one operation; return the numbers of the calls."""
        numbers = {}
        self._forget()
        for node, family in families.items():
            numbers[node] = number = next(NUMBERS)
            FAMILIES[number] = family
            self._calls[number] = prefixes.get(node, ("", ""))
            node.target, node.args = call_of, (number, *node.args[2:])
        graph.recompile()
        return numbers

    def expand(self, module: fx.GraphModule) -> None:
        """Replace operations that stand for calls of modules by the operations of these."""
        graph = module.graph
        for number in self._calls:
            if number in DOUBTS:
                raise Uncertain(DOUBTS[number])
        with core.real_tensors():
            self._expand(graph)
        if self.copied:
            module.recompile()

    def _expand(self, graph: fx.Graph) -> None:
        copies: dict[int, _Copy] = {}
        for node in graph.nodes:
            if node.target is FORWARD:
                given, number = node.args
                if number in copies:
                    raise Uncertain("a call of a module is traced twice")
                region = FAMILIES[number].chosen(number)
                copies[number] = copy = _Copy(region, _Stacks(self._calls[number]))
                for inner, outer in zip(region.primals, given, strict=True):
                    copy.bind(inner, outer)
                copy.replace(graph, node, region.before, region.outputs)
            elif node.target is BACKWARD:
                given, number = node.args
                copy = copies[number]
                for inner, outer in zip(copy.region.tangents, given, strict=True):
                    copy.bind(inner, outer)
                made = [g for g in copy.region.gradients if g is not None]
                copy.replace(graph, node, copy.region.after, made)
        if copies:
            _renumber(graph)
        self.copied = len(copies)


def _last_known(graph: fx.Graph, names: Sequence[str]) -> fx.Node:
    """Return the last input that existed before a call, or was added before it."""
    wanted = set(names)
    last: fx.Node | None = None
    for node in graph.find_nodes(op="placeholder"):
        if node.name in wanted or regions.SLOT in node.meta:
            last = node
    if last is None:
        raise Uncertain("a module is called before any input is known")
    return last


def _with_inputs(
    compiled: Callable[..., Any], positions: list[int], watched: weakref.ref[Watch]
) -> Callable[..., Any]:
    """Return a function that calls a compiled one with the tensors of modules at their positions.

    It raises `Changed` if the modules have changed.
    """

    def call(*args: Any) -> Any:
        watch = watched()
        taken = None if watch is None else watch.tensors(args)
        if taken is None:
            raise Changed
        given = list(args)
        for position, tensor in zip(positions, taken, strict=True):
            given.insert(position, tensor)
        return compiled(*given)

    return call
