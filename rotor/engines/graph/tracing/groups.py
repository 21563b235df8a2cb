"""Groups of operators that Inductor compiles to one kernel, each one operation of a joint graph.

A group is named by a hash of its text: its operators, their constants, the layouts of its inputs.
Alike layers thus share a group, which is compiled once, when it is first needed.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch.fx.node import map_arg

from rotor._pytorch import core, inductor
from rotor.engines.graph.tracing.false_edges import identities_of

logger = logging.getLogger("rotor")

_KEY = 16


class Group:
    """Function of tensors that is compiled at its first call.

    It returns a tensor, or a tuple of several. `module` is its graph, and `values` are its inputs
    as fake tensors of the mode. `can_part` is true if its operators, run one by one, give results
    that repeat, in memory of their own.
    """

    def __init__(
        self,
        key: str,
        module: fx.GraphModule,
        values: Sequence[Any],
        mode: Any,
        *,
        can_part: bool = False,
    ) -> None:
        self.key, self.can_part = key, can_part
        self.graph = copy.deepcopy(module.graph)
        self.text = str(module.graph)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        self.operators = tuple([str(node.target) for node in calls])
        """Operators in it, the same for groups that differ in sizes and constants only."""
        self.seconds: float | None = None
        """Time of compiling; None before it."""
        self.conditions: tuple[str, ...] = ()
        """Conditions on sizes that are symbols, on which the compiled code relies."""
        self._graph: tuple[fx.GraphModule, Sequence[Any], Any] | None = (module, values, mode)
        returned: Any = module.graph.output_node().args[0]
        self.returns_one = len(returned) == 1
        self._run: Callable[[list[Any]], Any] | None = None
        self.__name__ = f"group_{key}"

    def __repr__(self) -> str:
        """Return the name by which costs are kept."""
        return f"group.{self.key}"

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def prepare(self) -> None:
        """Compile the group, if it is not yet; raise CaptureError with Inductor's reason."""
        if self._graph is None:
            return
        begun = time.perf_counter()
        with inductor.explained():
            self._run, self.conditions = inductor.compile_graph(*self._graph)
        self._graph = None
        self.seconds = time.perf_counter() - begun
        logger.debug("%r compiled by Inductor in %.3g s", self, self.seconds)

    def __call__(self, *tensors: Any) -> Any:
        """Return the results for inputs of the layouts that the group was made for."""
        if self._run is None:
            self.prepare()
            assert self._run is not None
        made = self._run(list(tensors))
        return made[0] if self.returns_one else tuple(made)


class Operators:
    """A group that runs as its operators, one by one; nothing is compiled."""

    def __init__(self, group: Group) -> None:
        self._name, self.__name__ = f"operators.{group.key}", group.__name__
        self._run = fx.GraphModule({}, group.graph).forward
        self._returns_one = group.returns_one

    def __repr__(self) -> str:
        """Return the name by which costs are kept."""
        return self._name

    def __deepcopy__(self, memo: Any) -> Operators:
        return self

    def __call__(self, *tensors: Any) -> Any:
        """Return the results for inputs of the layouts that the group was made for."""
        made = self._run(*tensors)
        return made[0] if self._returns_one else made


_known: WeakValueDictionary[str, Group] = WeakValueDictionary()
"""Groups of all captures that live, by key."""


def groups_among(nodes: Iterable[fx.Node | None]) -> list[Group]:
    """Return the distinct groups that nodes of a graph call."""
    targets = dict.fromkeys(node.target for node in nodes if node is not None)
    return [target for target in targets if isinstance(target, Group)]


def prepare(groups: Iterable[Group]) -> None:
    """Compile those groups that are not compiled yet."""
    waiting = [group for group in groups if group.seconds is None]
    for group in waiting:
        group.prepare()
    if waiting:
        seconds = sum(group.seconds or 0 for group in waiting)
        logger.info("%d kernels compiled by Inductor in %.3g s", len(waiting), seconds)


def group_of(
    members: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> Group:
    """Return the group that computes some nodes of a graph from others.

    `members` come in an order in which they can run, and have fake tensors.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"i{number}")
    for node in members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.clear()
    graph.output(tuple(copies[node] for node in results))
    text = _text(graph, inputs)
    key = hashlib.sha256(text.encode()).hexdigest()[:_KEY]
    found = _known.get(key)
    if found is None:
        mode = core.fake_mode_of([*results, *inputs])
        values = _fakes(inputs, mode)
        module = fx.GraphModule({}, graph)
        can_part = not any(map(inductor.draws_numbers, members)) and _are_apart(results, inputs)
        found = _known[key] = Group(key, module, values, mode, can_part=can_part)
    return found


def _are_apart(results: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> bool:
    """Return whether no result shares its memory with another one, or with an input."""
    made = [identity for node in results for identity in identities_of(node)]
    given = {identity for node in inputs for identity in identities_of(node)}
    return len(set(made)) == len(made) and given.isdisjoint(made)


def _text(graph: fx.Graph, inputs: Sequence[fx.Node]) -> str:
    """Return the text of a group's graph, whatever its nodes were called."""
    names = {node: f"n{number}" for number, node in enumerate(graph.nodes)}
    lines = [_layout(node.meta.get("val")) for node in inputs]
    for node in graph.nodes:
        if node.op != "placeholder":
            given = (node.args, sorted(node.kwargs.items()))
            lines.append(f"{names[node]} = {node.target}{map_arg(given, names.__getitem__)!r}")
    return "\n".join(lines)


def _layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return repr((value.dtype, tuple(value.shape), value.stride(), value.device))


def _fakes(inputs: Sequence[fx.Node], mode: Any) -> list[Any]:
    """Return fake tensors of the layouts of nodes, in storages of their own."""
    values: list[Any] = [node.meta.get("val") for node in inputs]
    with mode:
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if isinstance(value, torch.Tensor)
            else value
            for value in values
        ]
