"""Python code of a program: one function for the forward, one for the backward.

The forward returns the model's outputs, the inputs that the backward may read, and a *token*: an
empty tensor that carries the kept values. AOTAutograd saves the token with the step, so that the
kept values are freed with the graph of autograd. They may thus change from one step to the next
without capturing again.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from rotor._pytorch import core, dispatch, symbols
from rotor._pytorch.devices import generator_of
from rotor.common.ranks import run_and_wait
from rotor.engines.graph.code.actions import (
    Kind,
    actions_of,
    deaths,
    outputs_among,
    stored_values,
)
from rotor.engines.graph.code.backwards import OtherModes, in_order
from rotor.engines.graph.code.numbers import Written
from rotor.engines.graph.code.offloading import Layout, Moves, Places
from rotor.engines.graph.code.pricing import Pooling
from rotor.engines.graph.code.proving import Prover, compared_storages
from rotor.engines.graph.costs.repeating import is_empty
from rotor.engines.graph.tracing.false_edges import of_sizes
from rotor.engines.graph.tracing.fetches import Fetch, arrived, is_collective, is_fetch, is_wait
from rotor.engines.graph.tracing.groups import Group, groups_among, prepare
from rotor.engines.graph.tracing.lowering import Lowered, Task, Value, at_path
from rotor.errors import CaptureError
from rotor.tier.homes import Home

_POOL_END = ["        pass", "    finally:", "        pool.leave()"]
"""End of a function within a private pool."""


@dataclass(frozen=True)
class Emitted:
    """Functions of a program, and their source."""

    forward: Callable[[list[Any]], Any]
    """Function of the list of the joint graph's primals, which it empties."""
    backward: Callable[[list[Any]], Any]
    """Function of the list of saved primals, token and tangents, which it empties."""
    source: str
    replayed: int
    """Random operations that run more than once; each keeps a state of the generator."""
    places: Places | None = None
    """Places of offloaded values; None if nothing is offloaded."""
    pooling: Pooling | None = None
    """Use of a private pool; None if none is used."""
    kernels: Sequence[Group] = ()
    """Groups of operators that it runs."""

    def prepare(self) -> None:
        """Compile the kernels that are not compiled yet."""
        if self.kernels:
            prepare(self.kernels)


def read_primals(lowered: Lowered) -> list[fx.Node]:
    """Return the primals that a backward may read, and that the forward does not write to."""
    return [
        n
        for n in lowered.primals
        if n.users and n not in lowered.mutated and not symbols.is_symbol(n.meta.get("val"))
    ]


def saved_primals(lowered: Lowered) -> list[fx.Node]:
    """Return those of `read_primals` that autograd keeps: the backward reads them by any plan.

    The others are read by what a plan computes again, and kept with what it keeps, as are objects
    other than tensors. Tensors whose version AOTAutograd does not compare are the last.
    """
    made = {task.node for task in lowered.tasks if task.node}
    waiting: list[Any] = [task.node for task in lowered.tasks[lowered.loss + 1 :] if task.node]
    waiting += [node for node in lowered.gradients if isinstance(node, fx.Node)]
    read = set(waiting)
    while waiting:
        inputs = {node for node in waiting.pop().all_input_nodes if node not in made} - read
        read |= inputs
        waiting += inputs
    found = [node for node in read_primals(lowered) if node in read]
    return sorted([n for n in found if isinstance(n.meta["val"], torch.Tensor)], key=is_unchecked)


def is_unchecked(node: fx.Node) -> bool:
    """Return whether AOTAutograd has autograd compare no version of a saved value."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def noted_versions(values: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return tensors and homes with their versions; other objects, and some tensors, have none."""
    tensors = [t for t in values if isinstance(t, torch.Tensor) and not t.is_inference()]
    return [(t, _version_of(t)) for t in (*tensors, *(h for h in values if isinstance(h, Home)))]


def _version_of(value: Any) -> int:
    return int(value.version if isinstance(value, Home) else value._version)


OUTPUT_CHANGED = (
    "an output of the model was changed in place before the backward, which needs it (shape "
    "{shape}, version {found}, expected {expected}): change a clone of it instead"
)
INPUT_CHANGED = (
    "a parameter or an input (shape {shape}) was changed in place between its forward and its "
    "backward, which computes again what was made from it: change it after the backward"
)


def check_versions(kept: Sequence[tuple[Any, int]], refusal: str) -> None:
    """Raise RuntimeError if a tensor, or a home, has another version than the one given with it."""
    for value, version in kept:
        if (found := _version_of(value)) != version:
            shape = tuple(value.shape)
            raise RuntimeError(refusal.format(shape=shape, found=found, expected=version))


class _Writer:
    """Writer of one of the two functions, with a table of its variables."""

    def __init__(
        self,
        lowered: Lowered,
        namespace: dict[str, Any],
        names: dict[int, str],
        pooling: Pooling | None,
        proves: bool,
        others: OtherModes | None,
    ) -> None:
        self.lowered = lowered
        self.others = others
        self.pooling = pooling
        self.proves = proves
        self.namespace = namespace
        self.constants = names
        self.lines: list[str] = []
        self.valid: set[str] = set()
        self.on: dict[int, set[str]] = {}
        self.task_of = {task.node: i for i, task in enumerate(lowered.tasks) if task.node}
        self.primal_of = {node: i for i, node in enumerate(lowered.primals)}
        self.tangent_of = {node: i for i, node in enumerate(lowered.tangents)}
        self.order: dict[fx.Node, int] = {}
        self.read: set[fx.Node] = set()

    def variable(self, task: int, path: tuple[int, ...]) -> str:
        return f"a{task}" + "".join(f"_{k}" for k in path)

    def constant(self, value: Any) -> str:
        name = self.constants.get(id(value))
        if name is None:
            name = f"k{len(self.constants)}"
            self.constants[id(value)] = name
            self.namespace[name] = value
        return name

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.reference(value)
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, Written):
            if isinstance(value.target, str):
                return value.target
            given = ", ".join(map(self.argument, value.operands))
            return f"{self.constant(value.target)}({given})"
        if isinstance(value, list | tuple):
            inner = ", ".join([self.argument(item) for item in value])
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if inner else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.argument(v)}" for k, v in value.items()) + "}"
        return self.constant(value)

    def call(self, node: fx.Node) -> str:
        arguments = [self.argument(value) for value in node.args]
        if node.target is of_sizes:
            # Sizes and strides are written as tuples of expressions of the symbols.
            arguments[:2] = [f"({', '.join(sizes)},)" for sizes in node.args[:2]]  # type: ignore
        arguments += [f"{name}={self.argument(value)}" for name, value in node.kwargs.items()]
        # Real strides may differ from the captured ones; then a view has to be a copy.
        is_view = node.target is torch.ops.aten.view.default
        target = core.callable_of(torch.ops.aten.reshape.default if is_view else node.target)
        target = target.begin if isinstance(target, Fetch) else in_order(node, target)
        if is_collective(node):
            target = partial(run_and_wait, target)
        if self.others is not None and node in self.task_of:
            is_backward = self.task_of[node] > self.lowered.loss
            target = self.others.operation(target, node, is_backward=is_backward)
        return f"{self.constant(target)}({', '.join(arguments)})"

    def reference(self, node: fx.Node) -> str:
        """Return the variable of a node; write the code of a missing view."""
        value = self.lowered.values[node]
        if symbols.is_symbol(node.meta.get("val")):
            return f"({symbols.text_of(node.meta['val'])})"
        if value.kind == "input":
            if node.op == "get_attr":
                return self.constant(core.attribute(self.lowered.module, str(node.target)))
            self.read.add(node)
            return f"p{self.primal_of[node]}"
        if value.kind in ("output", "item"):
            return self.output_variable(value)
        if is_wait(node):
            # The code of the collective has waited.
            return self.reference(node.all_input_nodes[0])
        if _is_transposed(node) and _is_transposed(node.args[0]):
            return self.reference(node.args[0].args[0])  # type: ignore[union-attr, arg-type]
        name = f"v{self.order.setdefault(node, len(self.order))}"
        if name not in self.valid:
            if node.op == "call_function" and value.base and node.target is getitem:
                made = f"{self.reference(value.base.node)}[{node.args[1]!r}]"
            else:
                made = self.call(node)
            self.lines.append(f"{name} = {made}")
            self.define(name, value.storages)
        return name

    def output_variable(self, value: Value) -> str:
        path: tuple[int, ...] = ()
        while value.kind == "item":
            path = (int(value.node.args[1]), *path)  # type: ignore[arg-type]
            assert value.base is not None
            value = value.base
        if value.node in self.tangent_of:
            return self.variable(self.lowered.loss, (self.tangent_of[value.node],))
        task = self.task_of[value.node]
        if path not in self.lowered.tasks[task].made and not isinstance(
            at_path(value.node.meta.get("val"), path), torch.Tensor
        ):
            raise CaptureError(f"{value.node.format_node()} is used as a whole")
        return self.variable(task, path)

    def define(self, name: str, storages: Sequence[int]) -> None:
        self.valid.add(name)
        for storage in storages:
            self.on.setdefault(storage, set()).add(name)

    def drop(self, storages: Sequence[int]) -> None:
        names = sorted({name for s in storages for name in self.on.pop(s, ())} & self.valid)
        self.valid.difference_update(names)
        if names:
            self.lines.append(" = ".join([*names, "None"]))

    def hand_out(self, indices: Sequence[int], dying: Sequence[int] | None = None) -> None:
        """Write the delivery of gradients, and a stop after it.

        Storages in `dying` are dropped; by default those of the gradients.
        """
        nodes = [self.lowered.gradients[index] for index in indices]
        for index, node in zip(indices, nodes, strict=True):
            given = self.argument(node)
            self.lines.append(f"given[{index}] = {given}")
        if dying is None:
            dying = sorted({s for node in nodes for s in self.lowered.values[node].storages})
        self.drop(dying)
        with self.outside(self.pooling is not None):
            self.lines.append("yield")

    @contextmanager
    def outside(self, is_outside: bool) -> Iterator[None]:
        """Have lines that are written in the context run outside of the private pool, if so."""
        if not is_outside:
            yield
            return
        if self.lines[-1:] == ["pool.enter()"]:
            self.lines.pop()
        else:
            self.lines.append("pool.leave()")
        yield
        self.lines.append("pool.enter()")

    def body(self) -> list[str]:
        """Return the lines of the function, indented, within its private pool."""
        if self.pooling is None:
            return [f"    {line}" for line in self.lines]
        inner = [f"        {line}" for line in self.lines]
        return ["    pool.enter()", "    try:", *inner, *_POOL_END]

    def run(self, index: int, kept: set[int], replay: str | None) -> None:
        """Write one execution of a task; `kept` are the storages made by it that are used."""
        task = self.lowered.tasks[index]
        assert task.node is not None
        call = self.call(task.node)
        if self.proves and is_empty(task.node.target):
            # Values made from it are compared before all of it is written.
            call += ".zero_()"
        if replay is not None:
            self.lines.append(f"now = get_state({replay[1:]})")
            self.lines.append(f"set_state({replay[1:]}, {replay})")
        pooling = self.pooling
        with self.outside(pooling is not None and pooling.runs_outside(index, kept)):
            target = self.assignment(index, task, kept)
            self.lines.append(target + call)
            if "_," in target:
                self.lines.append("_ = None")
        if pooling is not None and not pooling.runs_outside(index, kept):
            for path, storage in task.made.items():
                if storage in kept and storage in pooling.outliving:
                    name = self.variable(index, path)
                    self.lines.append(f"{name} = pool.copied({name})")
        if replay is not None:
            self.lines.append(f"set_state({replay[1:]}, now)")

    def note(self, index: int, noted: Sequence[int], is_first: bool) -> None:
        """Write code that notes new values of a task in the proof."""
        for path, storage in self.lowered.tasks[index].made.items():
            if storage in noted:
                variable = self.variable(index, path)
                self.lines.append(
                    f"proof.{'first' if is_first else 'again'}({storage}, {variable})"
                )

    def assignment(self, index: int, task: Task, kept: set[int]) -> str:
        assert task.node is not None
        if not kept:
            return ""
        value = task.node.meta.get("val")
        if isinstance(value, list | tuple):
            return self._pattern(index, task, kept, value, ()) + " = "
        name = self.variable(index, ())
        self.define(name, list(task.made.values()))
        return f"{name} = "

    def _pattern(
        self, index: int, task: Task, kept: set[int], value: Any, path: tuple[int, ...]
    ) -> str:
        if isinstance(value, list | tuple):
            inner = [
                self._pattern(index, task, kept, item, (*path, k)) for k, item in enumerate(value)
            ]
            return "(" + ", ".join(inner) + ",)"
        storage = task.made.get(path)
        if storage is None or storage not in kept:
            return "_"
        name = self.variable(index, path)
        self.define(name, [storage])
        return name


def _is_transposed(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is torch.ops.aten.t.default


def emit(
    lowered: Lowered,
    numbers: Sequence[int],
    groups: Sequence[tuple[int, Sequence[int]]] = (),
    prover: Prover | None = None,
    layout: Layout | None = None,
    pooling: Pooling | None = None,
    others: OtherModes | None = None,
) -> Emitted:
    """Return the functions that run a program, whose loss must run once.

    `groups` are positions in the backward, and the gradients that are delivered after them. With
    groups, or operations that hand gradients over, the backward is a generator, and takes a
    dictionary for the gradients too: it stops before the first run, and after each delivery.
    Without a `prover`, recomputed values are not compared. `others` are the backwards in other
    modes for which this is emitted; by default the modes of forward and backward are the same.
    """
    actions = actions_of(lowered, numbers)
    boundary = [int(number) for number in numbers].index(lowered.loss)
    in_parts = bool(groups) or any(task.gradients for task in lowered.tasks)
    namespace: dict[str, Any] = {
        "empty": torch.empty,
        "backend_flags": dispatch.backend_flags,
        "keeps_graph": core.keeps_graph,
        "check_versions": check_versions,
        "INPUT_CHANGED": INPUT_CHANGED,
        "OUTPUT_CHANGED": OUTPUT_CHANGED,
        "noted_versions": noted_versions,
        "math": math,
        "torch": torch,
        "arrived": arrived,
    }
    if pooling is not None:
        namespace["pool"] = pooling
    constants: dict[int, str] = {}
    runs = [0] * len(lowered.tasks)
    for action in actions:
        if action.kind is Kind.RUN:
            runs[action.number] += 1
    replays = {i: f"r{i}" for i, t in enumerate(lowered.tasks) if t.random and runs[i] > 1}
    devices = {i: _device(lowered.tasks[i]) for i in replays}
    namespace["get_state"] = lambda i: generator_of(devices[i]).get_state()
    namespace["set_state"] = lambda i, state: generator_of(devices[i]).set_state(state)

    kept, dying = deaths(lowered, actions)
    compared = {} if prover is None else compared_storages(lowered, actions, kept)
    if prover is not None:
        namespace["begin_proof"] = prover.begin
    places = None
    if layout is not None:
        places = Places(layout)
        namespace["begin_step"] = places.begin
    moves = Moves(lowered, actions, kept, dying)
    handovers = len(groups)
    handovers += sum(
        bool(lowered.tasks[action.number].gradients)
        for action in actions
        if action.kind is Kind.RUN
    )
    remaining = list(runs)
    ran: set[int] = set()

    def hand_out(
        writer: _Writer, indices: Sequence[int], dying: Sequence[int] | None = None
    ) -> None:
        nonlocal handovers
        handovers -= 1
        for k in indices:
            moves.receive(writer, lowered.values[lowered.gradients[k]].storages)
        if prover is not None and handovers == 0:
            writer.lines.append("proof.settle()")
        writer.hand_out(indices, dying)

    def write(writer: _Writer, begin: int, end: int) -> None:
        for position in range(begin, end):
            if actions[position].kind is not Kind.RUN:
                moves.move(writer, position)
                continue
            index = actions[position].number
            task = lowered.tasks[index]
            moves.receive(writer, task.inputs)
            if task.settle is not None:
                writer.lines.append(f"{writer.constant(task.settle)}()")
            if task.gradients:
                hand_out(writer, task.gradients, None if task.settle else sorted(dying[position]))
            if task.gradients or task.settle is not None:
                continue
            if index in replays and index not in ran:
                writer.lines.append(f"{replays[index]} = get_state({index})")
            replay = replays[index] if index in replays and index in ran else None
            made = task.made
            noted = [s for s in made.values() if position in compared.get(s, ())]
            writer.run(index, kept[position].union(noted), replay)
            writer.note(index, noted, is_first=index not in ran)
            writer.drop([s for s in noted if s not in kept[position]])
            moves.send(writer, position)
            if is_fetch(task.node):
                moves.begin_read(kept[position])
            ran.add(index)
            remaining[index] -= 1
            if replay is not None and remaining[index] == 0:
                writer.lines.append(f"{replay} = None")
            writer.drop(sorted(dying[position]))

    new_writer = partial(
        _Writer, lowered, namespace, constants, pooling, prover is not None, others
    )
    head = new_writer()
    write(head, 0, boundary)
    outputs = [head.argument(node) for node in lowered.outputs]
    stored = stored_values(lowered, actions, boundary, kept)
    states = [replays[i] for i in sorted(replays) if i in ran and remaining[i] > 0]

    tail = new_writer()
    for storage, name in stored.items():
        tail.define(name, [storage])
    for index, storage in enumerate(lowered.tasks[lowered.loss].made.values()):
        tail.define(tail.variable(lowered.loss, (index,)), [storage])
    tail.drop(sorted(set(lowered.tasks[lowered.loss].made.values()) - kept[boundary]))
    reached = boundary + 1
    for position, indices in groups:
        write(tail, reached, position + 1)
        reached = position + 1
        hand_out(tail, indices)
    write(tail, reached, len(actions))
    if not in_parts:
        moves.receive(tail, sorted(moves.pending))
    gradients = [] if in_parts else [tail.argument(node) for node in lowered.gradients]
    tangents = [tail.variable(lowered.loss, (i,)) for i in range(len(lowered.tangents))]

    unsaved = [f"p{head.primal_of[n]}" for n in lowered.primals if n in lowered.mutated]
    saves = saved_primals(lowered)
    saved = [f"p{head.primal_of[n]}" for n in saves]
    unsaved_reads = tail.read.difference(saves)
    again = [f"p{head.primal_of[n]}" for n in read_primals(lowered) if n in unsaved_reads]
    late = {action.number for action in actions[boundary:] if action.kind is Kind.RUN}
    homes = [
        head.constant(cast(Fetch, cast(fx.Node, task.node).target).home)
        for k, task in enumerate(lowered.tasks)
        if is_fetch(task.node) and (k in late or not stored.keys().isdisjoint(task.made.values()))
    ]
    noted = ", ".join(again + homes)
    names = [*stored.values(), *states, *unsaved, *again, *lowered.symbols, *lowered.variables]
    changed = ", ".join(unsaved)
    if prover is not None:
        names.append("proof")
    if layout is not None:
        names.append("tier")
    # An output itself would keep the node that keeps the token: a cycle that nothing frees.
    aliases = {name: f"{name}_kept" for name in outputs_among(lowered, stored)}
    checks = ", ".join(f"({name}, {name}._version)" for name in aliases.values())
    held = ", ".join(aliases.get(name, name) for name in names)
    forward = [
        "def forward(args):",
        _unpack([f"p{i}" for i in range(len(lowered.primals))], "args"),
        "    args.clear()",
        *(f"    {name} = {_origin(*place)}" for name, place in lowered.symbols.items()),
        *(f"    {name} = {code}" for name, code in lowered.variables.items()),
        *([f"    proof = begin_proof({changed})"] if prover is not None else []),
        *(["    tier = begin_step()"] if layout is not None else []),
        *head.body(),
        "    token = empty(0)",
        "    token.flags = backend_flags()",
        *(f"    {alias} = {name}.detach()" for name, alias in aliases.items()),
        f"    token.kept = [[{checks}], noted_versions([{noted}]), {held}]",
        f"    return ({', '.join([*outputs, *saved, 'token'])},)",
    ]
    backward = [
        "def backward(args, given):" if in_parts else "def backward(args):",
        _unpack([*saved, "token", *tangents], "args"),
        "    args.clear()",
        "    kept = token.kept",
        _unpack(["checks", "noted", *names], "kept"),
        "    check_versions(checks, OUTPUT_CHANGED)",
        "    check_versions(noted, INPUT_CHANGED)",
        "    if not keeps_graph():",
        "        kept.clear()",
        "    kept = checks = noted = token = None",
        *(["    yield"] if in_parts else []),
        *tail.body(),
        *(["    proof.settle()"] if prover is not None and not in_parts else []),
        f"    return ({', '.join(gradients)}{',' if gradients else ''})",
    ]
    source = "\n".join([*forward, "", *backward, ""])
    filename = f"<rotor program {hashlib.sha256(source.encode()).hexdigest()[:24]}>"
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    run_backward = namespace["backward"]
    if others is None:
        given = (lowered, numbers, groups, prover, layout, pooling)
        run_backward = OtherModes(run_backward, partial(emit, *given), len(saved))
    made = (namespace["forward"], run_backward, source, len(replays), places, pooling)
    return Emitted(*made, groups_among(task.node for task in lowered.tasks))


def _origin(primal: int, dimension: int | None) -> str:
    """Return the code of a symbol's value."""
    return f"p{primal}" if dimension is None else f"p{primal}.size({dimension})"


def _unpack(names: Sequence[str], source: str) -> str:
    return f"    {', '.join(names)}{',' if names else '()'} = {source}" if names else "    pass"


def _device(task: Task) -> torch.device:
    assert task.node is not None
    value = task.node.meta["val"]
    while isinstance(value, list | tuple):
        value = value[0]
    return torch.device(value.device)
