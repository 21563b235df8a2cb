"""A captured step as Python text: every operation is one statement that can be run.

Values have the published names, ``__<number>_<operation>``; parameters and buffers are read from
``self``, which is the module, and inputs have the names of the forward's arguments.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from rotor._pytorch import core
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.tracing.lowering import Lowered, Task, Value

Namer = Callable[[fx.Node], str]

_BLIND = ("native_batch_norm_backward",)
"""Backward operations that read buffers and do not depend on their values in training."""


def argument_names(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int, str]:
    """Return expressions such as ``batch['ids']`` for a call's tensors, by the tensors' ids."""
    found: dict[int, str] = {}
    for name, value in inspect.signature(module.forward).bind(*args, **kwargs).arguments.items():
        for expression, tensor in _leaves(name, value):
            found.setdefault(id(tensor), expression)
    return found


def _leaves(expression: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield expression, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{expression}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{expression}[{key!r}]", item)


class Trace:
    """A captured step, its nodes by phase, and the text of their statements.

    `primals` are the tensors that the capture took as inputs; `inputs` has for each tensor among
    the arguments, by its id, the expression that reads it. `forward` and `backward` are nodes in
    the order of the capture, without inputs and tangents; `outputs` are the nodes that the forward
    returns, in order. `mutations` are inputs that the forward changes in place, each with the node
    of its new value. `names` has the text that reads each input, `constants` the values of names
    such as ``_cst_0_`` that statements read, and `parameters` the inputs that are parameters.
    """

    def __init__(
        self,
        step: CapturedStep,
        module: nn.Module,
        primals: Sequence[Any],
        inputs: Mapping[int, str],
    ) -> None:
        self.lowered: Lowered = step.lowered
        self.task_of = {t.node: k for k, t in enumerate(self.lowered.tasks) if t.node is not None}
        self.constants: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self.names: dict[fx.Node, str] = {}
        self.parameters: set[fx.Node] = set()
        self._name_inputs(module, primals, inputs)
        self.outputs, self.mutations = self._returned()
        self.forward = self._forward_nodes()
        within = set(self.forward)
        self.backward = [
            node
            for node in self.lowered.module.graph.nodes
            if node.op == "call_function" and node in self.lowered.values and node not in within
        ]
        self.number = {
            node: k
            for k, node in enumerate([*self.forward, *self.lowered.tangents, *self.backward])
        }
        self.targets = {}
        for node, k in self.number.items():
            is_item = node.target is operator.getitem
            self.targets[node] = f"__{k}_{_plain(self.root(node) if is_item else node)}"
        self._scopes = {name: any(m.children()) for name, m in module.named_modules()}

    def _name_inputs(
        self, module: nn.Module, primals: Sequence[Any], inputs: Mapping[int, str]
    ) -> None:
        known: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            known.setdefault(id(parameter), f"self.get_parameter({name!r})")
        owned = set(known)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            known.setdefault(id(buffer), f"self.get_buffer({name!r})")
        known |= inputs
        for node, value in zip(self.lowered.primals, primals, strict=True):
            self.names[node] = known.get(id(value)) or self.constant(value)
            if id(value) in owned:
                self.parameters.add(node)
        for node, value in self.lowered.values.items():
            if node.op == "get_attr":
                found = core.attribute(self.lowered.module, str(node.target))
                self.names[value.node] = self.constant(found)

    def _returned(self) -> tuple[list[fx.Node], list[tuple[fx.Node, fx.Node]]]:
        last = next(n for n in reversed(self.lowered.module.graph.nodes) if n.op == "output")
        described = {repr(n.meta.get("desc")): n for n in self.lowered.primals}
        outputs, mutations = [], []
        descriptions = list(last.meta.get("desc") or [])
        for node, desc in itertools.zip_longest(self.lowered.outputs, descriptions):
            mutated = getattr(desc, "mutated_input", None)
            if isinstance(node, fx.Node) and mutated is None:
                outputs.append(node)
            elif isinstance(node, fx.Node):
                mutations.append((described[repr(mutated)], node))
        return outputs, mutations

    def _forward_nodes(self) -> list[fx.Node]:
        """Return the nodes that outputs are computed from, and others that the forward runs."""
        waiting = [node for node in self.lowered.outputs if isinstance(node, fx.Node)]
        tasks = self.lowered.tasks
        waiting += [node for node, k in self.task_of.items() if tasks[k].phase == "forward"]
        found = self.ancestors(waiting)
        return [node for node in self.lowered.module.graph.nodes if node in found]

    def ancestors(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes and all that they are computed from, inputs and tangents left out."""
        waiting = list(nodes)
        found: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in found and node.op == "call_function":
                found.add(node)
                waiting.extend(node.all_input_nodes)
        return found

    def is_operation(self, node: fx.Node) -> bool:
        """Return True if the node makes storages of its own."""
        return node in self.task_of

    def task(self, node: fx.Node) -> Task:
        """Return the operation of a node that makes storages of its own."""
        return self.lowered.tasks[self.task_of[node]]

    def root(self, node: fx.Node) -> fx.Node:
        """Return the operation or input whose storages a view or item lies on."""
        value: Value = self.lowered.values[node]
        while value.base is not None and value.node not in self.task_of:
            value = value.base
        return value.node

    def module_of(self, node: fx.Node) -> str:
        """Return the path of the module that an operation belongs to."""
        return self.task(node).module

    def scope(self, node: fx.Node) -> str:
        """Return the path of the innermost module with children that an operation belongs to."""
        path = self.module_of(node)
        while path and not self._scopes.get(path, False):
            path = path.rpartition(".")[0]
        return path

    def constant(self, value: Any) -> str:
        """Return the name of a value that has no text of its own."""
        if id(value) not in self._known:
            name = f"_cst_{len(self.constants)}_"
            self._known[id(value)] = name
            self.constants[name] = value
        return self._known[id(value)]

    def name(self, node: fx.Node) -> str:
        """Return the text that reads the value of a node."""
        return self.names.get(node) or self.targets[node]

    def function(self, node: fx.Node) -> str:
        """Return the text of the function that a node calls."""
        if node.target is operator.getitem:
            return "getitem"
        # Strides of a run may differ from the capture's; a view may then need a copy.
        target = node.target
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return f"torch.ops.{target}" if core.is_operator(target) else self.constant(target)

    def expression(self, node: fx.Node, name: Namer | None = None) -> str:
        """Return the text that computes a node from its inputs."""
        name = name or self.name
        if node.target is operator.getitem:
            return f"{self._text(node.args[0], name)}[{self._text(node.args[1], name)}]"
        words = [self._text(value, name) for value in node.args]
        words += [f"{key}={self._text(value, name)}" for key, value in node.kwargs.items()]
        return f"{self.function(node)}({', '.join(words)})"

    def statement(self, node: fx.Node) -> str:
        """Return the assignment of a node."""
        return f"{self.targets[node]} = {self.expression(node)}"

    def _text(self, value: Any, name: Namer) -> str:
        if isinstance(value, fx.Node):
            return name(value)
        if isinstance(value, list | tuple):
            words = ", ".join(self._text(item, name) for item in value)
            comma = "," if len(value) == 1 and isinstance(value, tuple) else ""
            return f"[{words}]" if isinstance(value, list) else f"({words}{comma})"
        if isinstance(value, dict):
            items = (f"{key!r}: {self._text(item, name)}" for key, item in value.items())
            return "{" + ", ".join(items) + "}"
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        plain = bool | int | str | torch.dtype | torch.layout | torch.memory_format
        if value is None or isinstance(value, plain):
            return repr(value)
        if isinstance(value, slice):
            words = ", ".join(self._text(v, name) for v in (value.start, value.stop, value.step))
            return f"slice({words})"
        if isinstance(value, torch.device):
            return f"torch.{value!r}"
        return self.constant(value)

    def readers(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the operations that read a node or its views, and the node with its views."""
        operations: dict[fx.Node, None] = {}
        views = [node]
        for view in views:
            for user in view.users:
                if self.is_operation(user):
                    operations[user] = None
                elif user.op != "output" and user not in views:
                    views.append(user)
        return list(operations), views

    def readers_beside(self, primal: fx.Node, inside: set[fx.Node]) -> bool:
        """Return True if operations outside of `inside` read an input or its views."""
        readers = set(self.readers(primal)[0]) - inside
        return any(not _plain(reader).startswith(_BLIND) for reader in readers)


def _plain(node: fx.Node) -> str:
    """Return the name of a node's operation, without its namespace and overload."""
    if node.op != "call_function":
        return node.name
    return str(getattr(node.target, "__name__", node.name)).split(".")[0].lstrip("_") or node.name
