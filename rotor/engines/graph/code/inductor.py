"""Programs as two FX graphs, compiled by Inductor.

Inductor's joint passes run before planning. Dropout is then a pure function of a seed that is drawn
once and kept, and a repeated operation is a repeated node. Inductor's fusions differ from the plan,
so that the bytes of a program are only known once measured (`Attempt`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from rotor._pytorch import core, inductor
from rotor.common.accounting import INDUCTOR_MARGIN
from rotor.engines.graph.code.actions import actions_of, deaths
from rotor.engines.graph.code.early import EarlyCode
from rotor.engines.graph.code.emit import (
    INPUT_CHANGED,
    OUTPUT_CHANGED,
    StepCode,
    check_versions,
    noted_versions,
    saved_primals,
)
from rotor.engines.graph.tracing.lowering import Lowered, Task, Value
from rotor.errors import CaptureError

logger = logging.getLogger("rotor")

MOST_ATTEMPTS = 3
"""Largest number of programs compiled and measured for one limit before FX takes over."""

_AS_PLANNED = {"layout_optimization": False, "realize_reads_threshold": 0}
"""Settings that keep strides as captured, and have shared values computed once, as planned."""

_NEAR, _NEVER = 4, -1
"""Largest distances of kernels that are fused because they read the same values."""

_LIBRARY = re.compile(
    r"aten\.(mm|bmm|addmm|baddbmm|addbmm|addmv|mv|dot|convolution|convolution_backward|"
    r"_scaled_dot_product_\w+|_fft_\w+|_\w*embedding_bag\w*)\."
)
_LEAST_DIMENSIONS = 2

Key = tuple[int, tuple[int, ...]]


def draw_once(lowered: Lowered) -> None:
    """Make operations that draw random numbers, seeds among them, run once."""
    lowered.draws_once = True
    for task in lowered.tasks:
        if task.random:
            task.random, task.once = False, True


@dataclass(frozen=True)
class Attempt:
    """Compiled and measured program; bytes above the level at which a step begins."""

    target_bytes: int
    """Target of its plan."""
    predicted_bytes: int
    """Peak by the simulator."""
    measured_bytes: int
    """Peak in a training step."""
    kept_apart: bool
    """True if operations that only read the same values were not fused."""


class _Builder:
    """Writer of one of the two graphs, with a table of its nodes."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.graph = fx.Graph()
        self.task_of = {task.node: i for i, task in enumerate(lowered.tasks) if task.node}
        self.tangents = {node: i for i, node in enumerate(lowered.tangents)}
        self.primals = {node: i for i, node in enumerate(lowered.primals)}
        self.inputs: dict[tuple[str, Any], fx.Node] = {}
        self.made: dict[Key, fx.Node] = {}
        self.whole: dict[int, fx.Node] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        self.on: dict[int, list[fx.Node]] = {}

    def input(self, kind: str, which: Any, name: str, value: Any) -> fx.Node:
        """Return an input of the graph: a "primal", a "tangent", or a value that was "kept"."""
        found = self.inputs.get((kind, which))
        if found is None:
            with self.graph.inserting_before(None):
                found = self.graph.placeholder(name)
            found.meta["val"] = value
            self.inputs[kind, which] = found
        return found

    def reference(self, node: fx.Node) -> fx.Node:
        """Return the present node for a node of the joint graph; write missing views."""
        value = self.lowered.values[node]
        if value.kind == "input":
            if node.op == "get_attr":
                if node not in self.views:
                    self.views[node] = self.graph.node_copy(node)
                return self.views[node]
            return self.input("primal", self.primals[node], node.name, node.meta.get("val"))
        if value.kind in ("output", "item"):
            return self.output(value)
        if node not in self.views:
            self.views[node] = self.graph.node_copy(node, self.reference)
            for storage in value.storages:
                self.on.setdefault(storage, []).append(node)
        return self.views[node]

    def output(self, value: Value) -> fx.Node:
        path: tuple[int, ...] = ()
        while value.kind == "item":
            path = (int(value.node.args[1]), *path)  # type: ignore[arg-type]
            assert value.base is not None
            value = value.base
        if value.node in self.tangents:
            which = self.tangents[value.node]
            return self.input("tangent", which, value.node.name, value.node.meta["val"])
        key = (self.task_of[value.node], path)
        if key not in self.made:
            if key[0] in self.whole and path not in self.lowered.tasks[key[0]].made:
                return self.item(self.whole[key[0]], value.node, path)
            found = _at(value.node, path)
            if not isinstance(found, torch.Tensor):
                raise CaptureError(f"{value.node.format_node()} is used as a whole")
            name = "_".join([value.node.name, *map(str, path)])
            return self.input("kept", key, name, found)
        return self.made[key]

    def item(self, made: fx.Node, node: fx.Node, path: tuple[int, ...]) -> fx.Node:
        for depth, index in enumerate(path, start=1):
            made = self.graph.call_function(getitem, (made, index))
            made.meta["val"] = _at(node, path[:depth])
        return made

    def laid_out(self, made: fx.Node, task: Task, path: tuple[int, ...]) -> fx.Node:
        """Return the result of a task; inputs of library kernels get the strides of the capture.

        Strides chosen by Inductor would depend on neighbours, and with them the order in which a
        matrix product adds.
        """
        assert task.node is not None
        value = _at(task.node, path)
        if not _is_operand(task.node) or value.dim() < _LEAST_DIMENSIONS:
            return made
        if any(stride == 0 for stride in value.stride()):
            return made
        forced = self.graph.call_function(
            torch.ops.prims.inductor_force_stride_order.default, (made, list(value.stride()))
        )
        forced.meta["val"] = value
        return forced

    def run(self, index: int, repetition: int, kept: set[int]) -> None:
        """Write one execution of a task; `kept` are the storages made by it that are used."""
        task = self.lowered.tasks[index]
        assert task.node is not None
        again = f"_again{repetition}" if repetition else ""
        new = self.graph.create_node(
            task.node.op,
            task.node.target,
            map_arg(task.node.args, self.reference),
            map_arg(task.node.kwargs, self.reference),
            task.node.name + again,
        )
        new.meta = dict(task.node.meta)
        self.whole[index] = new
        for path, storage in task.made.items():
            if storage in kept:
                self.made[index, path] = self.laid_out(self.item(new, task.node, path), task, path)
                for view in self.on.pop(storage, ()):
                    self.views.pop(view, None)

    def finish(self, outputs: Sequence[Any], kept: Sequence[Key] = ()) -> fx.GraphModule:
        """Return the graph that returns nodes of the joint graph, or constants, and kept values."""
        returned = self.graph.output(
            (
                *(self.reference(o) if isinstance(o, fx.Node) else o for o in outputs),
                *(self.made[key] for key in kept),
            )
        )
        returned.meta["user_visible_output_idxs"] = []
        return fx.GraphModule(self.lowered.module, self.graph)

    def ordered_inputs(self) -> list[tuple[str, Any]]:
        """Return (kind, which) of the inputs, in the graph's order."""
        known = {node: source for source, node in self.inputs.items()}
        return [known[node] for node in self.graph.nodes if node.op == "placeholder"]


def _at(node: fx.Node, path: tuple[int, ...]) -> Any:
    value: Any = node.meta.get("val")
    for index in path:
        value = value[index]
    return value


def _is_operand(node: fx.Node) -> bool:
    """Return whether a kernel of a library reads a node's result, or a view of it."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if _LIBRARY.match(str(user.target)):
                return True
            views = user.target is getitem or getattr(user.target, "is_view", False)
            if views and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


Source = tuple[str, Any]
Layouts = dict[Key, tuple[int, ...] | None]
Run = Callable[[list[Any]], Any]


class _Segment:
    """Stretch of the backward that is compiled as one graph.

    `gradients` are the numbers of those that it returns; its builder has written its operations.
    """

    def __init__(self, builder: _Builder, gradients: Sequence[int]) -> None:
        self.builder = builder
        self.gradients = list(gradients)
        self.nodes = [builder.lowered.gradients[index] for index in gradients]
        for node in self.nodes:
            if isinstance(node, fx.Node):
                builder.reference(node)
        self.sources = builder.ordered_inputs()
        self.kept: list[Key] = []
        """Values that it makes for later segments."""
        self.dying: set[Source] = set()
        """Inputs that no later segment reads."""
        self.run: Run | None = None

    def finish(self, needed: set[Source]) -> None:
        """Write its graph.

        `needed` are the values that later segments read; afterwards, also those that this one
        reads.
        """
        self.kept = sorted(key for key in self.builder.made if ("kept", key) in needed)
        needed.difference_update(("kept", key) for key in self.kept)
        self.dying = set(self.sources) - needed
        needed.update(self.sources)
        self.module = self.builder.finish(self.nodes, self.kept)
        _have_exact(self.module, range(len(self.nodes), len(self.nodes) + len(self.kept)))

    def __call__(self, known: dict[Source, Any]) -> list[Any]:
        """Return its gradients; reduce the known values to those that later segments need."""
        assert self.run is not None
        given = [known[source] for source in self.sources]
        for source in self.dying:
            del known[source]
        results = list(self.run(given))
        for key in reversed(self.kept):
            known["kept", key] = results.pop()
        return results


def _have_exact(module: fx.GraphModule, indices: Iterable[int]) -> None:
    """Give some of a graph's results the strides of the capture."""
    returned = next(iter(module.graph.find_nodes(op="output")))
    returned.meta["user_visible_output_idxs"] = [
        index for index in indices if isinstance(returned.args[0][index], fx.Node)
    ]


class InductorCode:
    """Functions of a program, compiled at their first use; no operation replays a random state.

    The backward is one graph, or several, each of which ends with a handover of gradients. `ops` is
    the order of the runs, with repeats; the loss runs once. `apart` is the largest distance of
    kernels that are fused only because they read the same values.
    """

    replayed = 0

    def __init__(self, lowered: Lowered, ops: Sequence[int], apart: int = _NEAR) -> None:
        self.lowered = lowered
        self.apart = apart
        self.seconds: float | None = None
        """Time of compiling; None before it."""
        ops = [int(index) for index in ops]
        boundary = ops.index(lowered.loss)
        kept, _ = deaths(lowered, actions_of(lowered, ops))
        self._done = [0] * len(lowered.tasks)
        self._head = _Builder(lowered)
        self._write(self._head, ops[:boundary], kept[:boundary])
        self._segments = self._cut(ops[boundary + 1 :], kept[boundary + 1 :])
        needed: set[Source] = set()
        for segment in reversed(self._segments):
            segment.finish(needed)
        self.groups = [segment.gradients for segment in self._segments]
        """Numbers of the gradients that leave the backward, by the segment that returns them."""
        self._needed = needed
        self._kept: list[Key] = sorted(which for kind, which in needed if kind == "kept")
        self._number = len(lowered.outputs)
        self._forward_module = self._finish_forward()
        self._given = [which for _, which in self._head.ordered_inputs()]
        modules = [self._forward_module, *(segment.module for segment in self._segments)]
        self.source = "\n".join([module.code for module in modules])
        self._run_forward: Run | None = None
        self._checked = self._outputs_kept()
        primals = {node: i for i, node in enumerate(lowered.primals)}
        self._saved = [primals[node] for node in saved_primals(lowered)]
        read = {which for kind, which in needed if kind == "primal"}
        self._unsaved = sorted(read - set(self._saved))
        self._noted = [i for i in self._unsaved if lowered.primals[i] not in lowered.mutated]

    def _write(self, builder: _Builder, ops: Sequence[int], kept: Sequence[set[int]]) -> None:
        for index, used in zip(ops, kept, strict=True):
            builder.run(index, self._done[index], used)
            self._done[index] += 1

    def _cut(self, ops: Sequence[int], kept: Sequence[set[int]]) -> list[_Segment]:
        """Return the backward, cut at handovers of gradients; the last part returns all others."""
        segments: list[_Segment] = []
        rest = dict.fromkeys(range(len(self.lowered.gradients)))
        begin = 0
        for position, index in enumerate(ops):
            over = self.lowered.tasks[index].gradients
            if over:
                segments.append(self._segment(ops, kept, begin, position, over))
                begin = position + 1
                for number in over:
                    del rest[number]
        if segments:
            rest = {i: None for i in rest if self.lowered.gradients[i] is not None}
        if rest or begin < len(ops) or not segments:
            segments.append(self._segment(ops, kept, begin, len(ops), list(rest)))
        return segments

    def _segment(
        self,
        ops: Sequence[int],
        kept: Sequence[set[int]],
        begin: int,
        end: int,
        gradients: Sequence[int],
    ) -> _Segment:
        builder = _Builder(self.lowered)
        self._write(builder, ops[begin:end], kept[begin:end])
        return _Segment(builder, gradients)

    def _finish_forward(self) -> fx.GraphModule:
        module = self._head.finish(self.lowered.outputs, self._kept)
        _have_exact(module, range(len(self.lowered.mutated), self._number + len(self._kept)))
        return module

    def _outputs_kept(self) -> list[int]:
        """Return the kept values that are outputs, and must not change before the backward."""
        on = {
            storage
            for node in self.lowered.outputs[len(self.lowered.mutated) :]
            if isinstance(node, fx.Node)
            for storage in self.lowered.values[node].storages
        }
        made = [self.lowered.tasks[task].made[path] for task, path in self._kept]
        return [number for number, storage in enumerate(made) if storage in on]

    # -- compiling

    def prepare(self) -> None:
        """Compile, unless that is done; raise RuntimeError with Inductor's reason if it fails."""
        if self.seconds is not None:
            return
        begin = time.perf_counter()
        try:
            self._run_forward, strides = self._compiled(
                self._forward_module, self._head, {}, is_backward=False
            )
            layouts = dict(zip(self._kept, strides[self._number :], strict=True))
            for segment in self._segments:
                segment.run, strides = self._compiled(
                    segment.module, segment.builder, layouts, is_backward=True
                )
                made = strides[len(segment.nodes) :]
                layouts.update(zip(segment.kept, made, strict=True))
        except Exception as error:
            raise RuntimeError(
                f'Inductor could not compile the planned step; backend="fx" needs no compiler. '
                f"Its reason:\n{type(error).__name__}: {error}"
            ) from error
        self.seconds = time.perf_counter() - begin
        logger.info("compiled by Inductor in %.3g s", self.seconds)

    def _compiled(
        self, module: fx.GraphModule, builder: _Builder, layouts: Layouts, *, is_backward: bool
    ) -> tuple[Run, list[tuple[int, ...] | None]]:
        values = []
        with torch.no_grad(), core.fake_mode_of(self.lowered.primals + self.lowered.tangents):
            for source, node in zip(
                builder.ordered_inputs(), module.graph.find_nodes(op="placeholder"), strict=True
            ):
                value = node.meta.get("val")
                strides = layouts.get(source[1]) if source[0] == "kept" else None
                if strides is not None and tuple(value.stride()) != tuple(strides):
                    value = torch.empty_strided(
                        value.shape, strides, dtype=value.dtype, device=value.device
                    )
                values.append(value)
        return inductor.compile_graph(
            module, values, is_backward=is_backward, apart=self.apart, options=_AS_PLANNED
        )

    # -- running

    def forward(self, args: list[Any]) -> Any:
        """Return outputs, saved primals and the token; empty the given list of primals."""
        self.prepare()
        assert self._run_forward is not None
        saved = [args[index] for index in self._saved]
        unsaved = {index: args[index] for index in self._unsaved}
        given = [args[index] for index in self._given]
        args.clear()
        results = list(self._run_forward(given))
        kept = results[self._number :]
        del results[self._number :]
        checks = [(kept[number], kept[number]._version) for number in self._checked]
        token: Any = torch.empty(0)
        noted = noted_versions([unsaved[index] for index in self._noted])
        token.kept = [checks, noted, unsaved, kept]
        return (*results, *saved, token)

    def backward(self, args: list[Any]) -> Any:
        """Return the gradients; empty the given list of saved primals, token and tangents."""
        known = self._known(args)
        (segment,) = self._segments
        return tuple(segment(known))

    def backward_in_parts(
        self, args: list[Any], given: dict[int, torch.Tensor | None]
    ) -> Generator[None, None, None]:
        """Stop before the first segment, and after each; put gradients into the dictionary."""
        known = self._known(args)
        yield
        for segment in self._segments:
            given.update(zip(segment.gradients, segment(known), strict=True))
            yield

    def _known(self, args: list[Any]) -> dict[Source, Any]:
        """Return the inputs of the backward from its arguments, which are emptied."""
        self.prepare()
        count = len(self._saved)
        checks, noted, unsaved, kept = args[count].kept
        check_versions(checks, OUTPUT_CHANGED)
        check_versions(noted, INPUT_CHANGED)
        known: dict[Source, Any] = {("primal", i): t for i, t in unsaved.items()}
        known.update((("primal", i), t) for i, t in zip(self._saved, args, strict=False))
        known.update((("tangent", i), t) for i, t in enumerate(args[count + 1 :]))
        known.update((("kept", key), t) for key, t in zip(self._kept, kept, strict=True))
        if not core.keeps_graph():
            args[count].kept.clear()
        args.clear()
        return {source: t for source, t in known.items() if source in self._needed}

    def in_parts(self) -> EarlyCode:
        """Return its code for a backward that stops at handovers of gradients."""
        return EarlyCode(_InParts(self), self.groups, len(self.lowered.gradients))


class _InParts:
    """Code whose backward is a generator."""

    replayed = 0

    def __init__(self, code: InductorCode) -> None:
        self.source = code.source
        self.forward = code.forward
        self.backward: Callable[..., Any] = code.backward_in_parts
        self.prepare = code.prepare


@dataclass
class Inductor:
    """Compiled programs of one captured step."""

    lowered: Lowered
    attempts: list[Attempt] = field(default_factory=list)
    """Programs that were measured under the present limit."""
    apart: int = _NEAR
    """Setting of the next program, see `InductorCode`."""
    _codes: dict[tuple[tuple[int, ...], int], StepCode] = field(default_factory=dict)

    def code(self, ops: Sequence[int]) -> StepCode:
        """Return the functions of a program, existing or new ones."""
        key = (tuple(int(index) for index in ops), self.apart)
        if key not in self._codes:
            code = InductorCode(self.lowered, *key)
            in_parts = any(task.gradients for task in self.lowered.tasks)
            self._codes[key] = code.in_parts() if in_parts else code
        return self._codes[key]

    def begin(self) -> None:
        """Forget the attempts, since the limit has changed."""
        self.attempts.clear()
        self.apart = _NEAR

    def learn(self, target_bytes: int, predicted_bytes: int, measured_bytes: int) -> None:
        """Note a measured program."""
        self.attempts.append(
            Attempt(target_bytes, predicted_bytes, measured_bytes, self.apart == _NEVER)
        )

    def next_target(self, limit_bytes: int) -> int | None:
        """Return the target after a program that needed more than the limit; None to give up."""
        if len(self.attempts) >= MOST_ATTEMPTS:
            return None
        last = self.attempts[-1]
        if not last.kept_apart:
            # The same program may fit when no kernel is moved forward to be fused.
            self.apart = _NEVER
            return last.target_bytes
        scaled = last.predicted_bytes * limit_bytes / last.measured_bytes * INDUCTOR_MARGIN
        return min(int(scaled), last.target_bytes - 1)
