"""Lowering of a captured joint graph to operations and storages, with the data for emitting.

AOTAutograd's joint graph computes the model's outputs and, from the tangents of these, the
gradients, without mutation. Here its nodes become

- *inputs*: parameters, buffers, the model's inputs, constants: alive before and after;
- *operations*: they make storages;
- *views*: tensors on existing storages: they cost nothing and are made again at each use;
- *items*: one output of an operation with several;
- *numbers*: expressions of sizes that are symbols: written where they are used.

The loss is one operation between the forward and the backward: from the outputs to the tangents.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core, inductor, symbols
from rotor._pytorch.draws import is_random
from rotor.common.tensor_trees import result_tensors
from rotor.engines.graph.tracing import rewrite
from rotor.engines.graph.tracing.false_edges import (
    changed_inputs,
    drop_false_edges,
    identities_of,
    of_sizes,
)
from rotor.engines.graph.tracing.fetches import awaited, is_collective
from rotor.engines.graph.tracing.rewrite import normalise_as_in_eager, split_convolutions
from rotor.errors import CaptureError
from rotor.meter import allocator

_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+), in [^\n]*\n(?: *([^\n]*))?', re.MULTILINE)
_LIBRARY = str(Path(torch.__file__).parent)
_ENGINES = str(Path(__file__).parents[2])
_LONGEST = 100


@lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """Return file, line and code of the innermost frame outside PyTorch; empty if unknown.

    The stack trace has frames as Python prints them, the innermost last.
    """
    for path, line, code in reversed(_FRAME.findall(stack_trace)):
        if path.startswith((_LIBRARY, _ENGINES)):
            continue
        place = f"{'/'.join(Path(path).parts[-2:])}:{line}"
        text = code.strip()
        if not text or text.startswith("File "):
            return place
        return f"{place}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"
    return ""


_MUTATION_BLIND = (
    "_native_batch_norm_legit_functional",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "native_batch_norm_backward",
)
"""Operators that read running statistics in training only for new ones, which are discarded."""


@dataclass
class Value:
    """Tensor (or tuple of tensors) of the joint graph."""

    kind: str
    """One of "input", "output" (of an operation), "item", "view", and "number" (of sizes)."""
    node: fx.Node
    base: Value | None = None
    """Value from which a view or item is made."""
    storages: tuple[int, ...] = ()
    """Storages of its tensors; none for inputs and their views."""


@dataclass
class Task:
    """Operation; the loss has no node, nor has a handover of gradients."""

    name: str
    node: fx.Node | None
    phase: str
    """One of "forward", "loss" and "backward"."""
    inputs: list[int]
    """Storages that it reads."""
    made: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Storages that it makes, by the path of the output tensor that is their root."""
    random: bool = False
    """True if it draws random numbers."""
    once: bool = False
    """True if it must not run a second time."""
    module: str = ""
    """Path of its module."""
    gradients: tuple[int, ...] = ()
    """Numbers of the gradients that it hands over, to be added to existing ones."""
    settle: Callable[[], None] | None = None
    """Function that waits for the transfers of gradients handed over before; ``None``: there are
    none."""
    source: str = ""
    """File, line and code of the model that it comes from; empty if unknown."""
    prefers_once: bool = False
    """True if it may run a second time where no plan fits otherwise."""


@dataclass
class Lowered:
    """Joint graph as operations, and the origins of its parts."""

    tasks: list[Task]
    """Operations, in the order of the joint graph."""
    storages: list[tuple[int, bool]]
    """Bytes of each storage, and True if it stays once it is made."""
    values: dict[fx.Node, Value]
    loss: int
    """Index of the loss among the tasks."""
    primals: list[fx.Node]
    """Inputs of the forward, in the order of the joint graph."""
    tangents: list[fx.Node]
    """Gradients of outputs, which are inputs of the joint graph too."""
    outputs: list[Any]
    """Results of the forward: nodes, or constants such as None."""
    gradients: list[Any]
    """Results of the backward, by primal: nodes, or constants such as None; then further terms."""
    mutated: set[fx.Node]
    """Primals whose new values are among the outputs."""
    module: fx.GraphModule
    output_of_tangent: list[int] = field(default_factory=list)
    """For each tangent, the number of its output; empty if unknown."""
    unrepeatable: list[Task] = field(default_factory=list)
    """Tasks that differed when they ran again, or may."""
    symbols: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Numbers of a primal and its dimension, by symbol; None: the primal is the size itself."""
    variables: dict[str, str] = field(default_factory=dict)
    """Code of the variables of numbers that calls give (`numbers.write_numbers`)."""
    further: list[int] = field(default_factory=list)
    """Numbers of the primals of the further terms, to be added to their gradients one by one."""
    reads_gradients: bool = False
    """True if the captured code reads gradients that exist when a step begins."""

    @cached_property
    def collectives(self) -> list[int]:
        """Numbers of the operations in which other processes take part."""
        return [number for number, task in enumerate(self.tasks) if is_collective(task.node)]

    def primal_of(self, gradient: int) -> int:
        """Return the number of a gradient's primal."""
        count = self.first_terms
        return gradient if gradient < count else self.further[gradient - count]

    @property
    def first_terms(self) -> int:
        """Number of gradients without further terms; a check's input of the forward has none."""
        return len(self.gradients) - len(self.further)

    def drop_preferences(self) -> bool:
        """Let operations run again that prefer not to; return whether an operation did."""
        preferring = [task for task in self.tasks if task.prefers_once]
        for task in preferring:
            task.prefers_once = task.once = False
        return bool(preferring)

    def input_bytes(self, node: fx.Node) -> int:
        """Return the bytes of an input's tensors."""
        return sum(map(_bytes, result_tensors(node.meta.get("val"))))

    @cached_property
    def inner_outputs(self) -> list[int]:
        """Numbers of the outputs from which others are computed, in their order."""
        numbers: dict[fx.Node, list[int]] = {}
        for k, node in enumerate(self.outputs):
            if isinstance(node, fx.Node):
                numbers.setdefault(node, []).append(k)
        read: set[fx.Node] = set()
        for node in reversed(self.module.graph.nodes):
            if node in numbers or node in read:
                read.update(node.all_input_nodes)
        return [
            k for node in self.module.graph.nodes if node in read for k in numbers.get(node, ())
        ]

    def tangents_of_gradients(self) -> list[frozenset[int]]:
        """Return for each gradient the numbers of the tangents from which it is computed.

        All of them in a graph that hands out other things, as the mesh of a distributed tensor:
        such a gradient is made of its parts, of which none can be left out.
        """
        nodes = [g for g in self.gradients if isinstance(g, fx.Node)]
        if not all(result_tensors(node.meta.get("val")) for node in nodes):
            return [frozenset(range(len(self.tangents)))] * len(self.gradients)
        reached: dict[fx.Node, frozenset[int]] = {
            node: frozenset([k]) for k, node in enumerate(self.tangents)
        }
        for node in self.module.graph.nodes:
            if node.op == "call_function":
                reached[node] = frozenset().union(
                    *(reached[source] for source in node.all_input_nodes if source in reached)
                )
        return [
            reached.get(g, frozenset()) if isinstance(g, fx.Node) else frozenset()
            for g in self.gradients
        ]


def tensors_by_path(
    value: Any, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the tensors in nested lists and tuples, each with its place."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_by_path(item, (*path, index))


def at_path(value: Any, path: Sequence[int]) -> Any:
    """Return what lies at a place in nested lists and tuples."""
    for index in path:
        value = value[index]
    return value


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage, for the sizes of the capture."""
    return allocator.rounded_bytes(
        symbols.hint_of(tensor.untyped_storage().nbytes()), tensor.device
    )


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return core.module_path(str(path))


class _Lowering:
    def __init__(self, module: fx.GraphModule, num_outputs: int) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        returned = self.nodes[-1].args[0]
        self.outputs = list(returned[:num_outputs])
        self.gradients = list(returned[num_outputs:])
        self.values: dict[fx.Node, Value] = {}
        self.storages: list[tuple[int, bool]] = []
        self.by_key: dict[int, int] = {}
        self.input_keys: set[int] = set()
        self.tasks: list[Task] = []
        self._keys: dict[fx.Node, list[int]] = {}
        self._sources = {node: node.all_input_nodes for node in self.nodes}
        self._awaited: dict[int, int] = {}
        # Fake tensors have to stay: their addresses are the keys.
        self.primals: list[fx.Node] = []
        self.tangents: list[fx.Node] = []
        for node in self.nodes:
            if node.op == "placeholder":
                (self.tangents if "tangent" in node.name else self.primals).append(node)
        for node, result in awaited(self.nodes):
            (key,), (given,) = identities_of(node), self._keys_of(result)
            self._awaited[key] = given
        returned_nodes = [node for node in self.outputs if isinstance(node, fx.Node)]
        self.forward = self._closure(returned_nodes + self._effects())
        described = {repr(node.meta.get("desc")): node for node in self.primals}
        changed = changed_inputs(self.nodes[-1], len(self.outputs))
        self.mutated = {described[name] for name in changed.values()}
        self.tainted = self._reads_of_mutated()
        if rewrite.recompute_marked(module, self.forward, self._is_view, self._is_fixed):
            self.nodes = list(module.graph.nodes)
            self._sources = {node: node.all_input_nodes for node in self.nodes}

    def _closure(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes and everything from which they are computed."""
        found: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(self._sources[node])
        return found

    def _effects(self) -> list[fx.Node]:
        """Return the nodes of the forward that run for their effects, such as assertions."""
        late = set(self.tangents)
        found = []
        for node in self.nodes:
            if not late.isdisjoint(self._sources[node]):
                late.add(node)
            elif node.op == "call_function":
                value = node.meta.get("val")
                if not (result_tensors(value) or symbols.is_symbol(value)):
                    found.append(node)
        return found

    def _outputs_of_tangents(self) -> list[int]:
        described = {
            repr(desc): index
            for index, desc in enumerate(
                (self.nodes[-1].meta.get("desc") or [])[: len(self.outputs)]
            )
        }
        wanted = [repr(getattr(node.meta.get("desc"), "output", None)) for node in self.tangents]
        are_tensors = all(result_tensors(node.meta.get("val")) for node in self.tangents)
        if not (are_tensors and all(name in described for name in wanted)):
            return []
        return [described[name] for name in wanted]

    def _reads_of_mutated(self) -> set[fx.Node]:
        """Return operations that cannot run again once the caller has changed an input."""
        seen = set(self.mutated)
        tainted: set[fx.Node] = set()
        for node in self.nodes:
            if seen.isdisjoint(self._sources[node]) or node.op != "call_function":
                continue
            if getattr(node.target, "__name__", "").split(".")[0] in _MUTATION_BLIND:
                continue
            tainted.add(node)
            if self._is_view(node):
                seen.add(node)
        return tainted

    def _is_fixed(self, node: fx.Node) -> bool:
        return node in self.tainted or is_random(node.target, node.args, node.kwargs)

    def _is_view(self, node: fx.Node) -> bool:
        made = self._keys_of(node)
        read = [key for source in self._sources[node] for key in self._keys_of(source)]
        return bool(made) and all(key in read for key in made)

    def _keys_of(self, node: fx.Node) -> list[int]:
        """Return the storages of a node's tensors."""
        found = self._keys.get(node)
        if found is None:
            _refuse_sparse(node)
            found = [self._awaited.get(key, key) for key in identities_of(node)]
            self._keys[node] = found
        return found

    def run(self) -> Lowered:
        for node in self.primals:
            self.values[node] = Value("input", node)
            self.input_keys.update(self._keys_of(node))
        before = [n for n in self.nodes if n.op != "placeholder" and n in self.forward]
        after = [n for n in self.nodes if n.op != "placeholder" and n not in self.forward]
        for node in before:
            self._add(node, "forward")
        loss = self._add_loss()
        for node in after[:-1]:
            self._add(node, "backward")
        self._pin(self.gradients)
        return Lowered(
            tasks=self.tasks,
            storages=self.storages,
            values=self.values,
            loss=loss,
            primals=self.primals,
            tangents=self.tangents,
            outputs=self.outputs,
            gradients=self.gradients,
            mutated=self.mutated,
            module=self.module,
            output_of_tangent=self._outputs_of_tangents(),
            symbols=self._symbols(),
        )

    def _symbols(self) -> dict[str, tuple[int, int | None]]:
        parts = [
            part
            for node in self.nodes
            for part in _symbols_within(node.meta.get("val"))
            if node.op != "placeholder" or part is not node.meta["val"]
        ]
        if not parts:
            return {}
        found = symbols_among(self.primals)
        used = {name for part in parts for name in symbols.symbols_in(part)}
        if not used <= set(found):
            raise CaptureError(
                f"the sizes {', '.join(sorted(used - set(found)))} are not among those of the "
                "arguments"
            )
        return found

    def _pin(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            if isinstance(node, fx.Node):
                for storage in self.values[node].storages:
                    self.storages[storage] = (self.storages[storage][0], True)

    def _add_loss(self) -> int:
        self._pin(self.outputs)
        read = [
            storage
            for node in self.outputs
            if isinstance(node, fx.Node)
            for storage in self.values[node].storages
        ]
        task = Task("loss", None, "loss", _unique(read))
        for index, node in enumerate(self.tangents):
            if not result_tensors(node.meta["val"]):
                # The device mesh of a distributed tensor, for one.
                self.values[node] = Value("output", node)
                continue
            (tensor,) = result_tensors(node.meta["val"])
            (key,) = self._keys_of(node)
            task.made[(index,)] = self._new_storage(key, tensor)
            self.values[node] = Value("output", node, None, (task.made[(index,)],))
        if not core.hands_gradients_over():
            self._pin(self.tangents)
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _new_storage(self, key: int, tensor: torch.Tensor) -> int:
        self.by_key[key] = len(self.storages)
        self.storages.append((_bytes(tensor), False))
        return len(self.storages) - 1

    def _add(self, node: fx.Node, phase: str) -> None:
        if node.op == "get_attr":
            self.values[node] = Value("input", node)
            self.input_keys.update(self._keys_of(node))
            return
        if node.op != "call_function":
            raise CaptureError(f"the graph has a node of kind {node.op!r}: {node.format_node()}")
        if symbols.is_symbol(node.meta.get("val")):
            self.values[node] = Value("number", node)
            return
        if node.target is of_sizes:
            self.values[node] = Value("view", node)
            self.input_keys.update(self._keys_of(node))
            return
        if node.target is operator.getitem:
            base = self.values[node.args[0]]  # type: ignore[index]
            kind = "item" if base.kind in ("output", "item") else base.kind
            self.values[node] = Value(
                "view" if kind == "input" else kind, node, base, self._lying_on(node)
            )
            return
        if self._is_view(node):
            base = self._view_base(node)
            self.values[node] = Value("view", node, base, self._lying_on(node))
            return
        self._add_operation(node, phase)

    def _lying_on(self, node: fx.Node) -> tuple[int, ...]:
        keys = self._keys_of(node)
        return tuple(_unique(self.by_key[key] for key in keys if key in self.by_key))

    def _view_base(self, node: fx.Node) -> Value:
        keys = set(self._keys_of(node))
        for source in self._sources[node]:
            if not keys.isdisjoint(self._keys_of(source)):
                return self.values[source]
        raise CaptureError(f"{node.format_node()} is a view of nothing")

    def _add_operation(self, node: fx.Node, phase: str) -> None:
        read = _unique(s for source in self._sources[node] for s in self.values[source].storages)
        is_seeds = inductor.draws_seeds(node)
        task = Task(
            node.name,
            node,
            phase,
            read,
            random=is_random(node.target, node.args, node.kwargs) and not is_seeds,
            module=_module_path(node),
        )
        task.source = source_line(str(node.meta.get("stack_trace") or ""))
        tensors = tensors_by_path(node.meta.get("val"))
        for (path, tensor), key in zip(tensors, self._keys_of(node), strict=True):
            if key in self.by_key and self.by_key[key] in task.made.values():
                continue
            if key in self.by_key or key in self.input_keys:
                raise CaptureError(
                    f"{node.format_node()} returns new tensors and an input of its own"
                )
            task.made[path] = self._new_storage(key, tensor)
        self.values[node] = Value("output", node, None, tuple(task.made.values()))
        self.tasks.append(task)
        task.prefers_once = rewrite.prefers_saving(node)
        is_saved = rewrite.is_saved(node) or task.prefers_once or is_seeds
        task.once = node in self.tainted or not task.made or is_saved


def _refuse_sparse(node: fx.Node) -> None:
    if any(tensor.layout != torch.strided for tensor in result_tensors(node.meta.get("val"))):
        raise CaptureError(
            "a sparse tensor cannot be planned, for its size is not known before it is made: use "
            "nn.Embedding(sparse=False)"
        )


def symbols_among(inputs: Sequence[fx.Node]) -> dict[str, tuple[int, int | None]]:
    """Return the number of an input, and of its dimension, by symbol; None: the input is it."""
    found: dict[str, tuple[int, int | None]] = {}
    for index, node in enumerate(inputs):
        for tensor in result_tensors(node.meta.get("val")):
            for dimension, size in enumerate(tensor.shape):
                if symbols.symbols_in(size) == {symbols.text_of(size)}:
                    found.setdefault(symbols.text_of(size), (index, dimension))
    for index, node in enumerate(inputs):
        value = node.meta.get("val")
        if symbols.symbols_in(value) == {symbols.text_of(value)}:
            found[symbols.text_of(value)] = (index, None)
    return found


def _unique(items: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(items))


def _symbols_within(value: Any) -> Iterator[Any]:
    if symbols.is_symbol(value):
        yield value
    for tensor in result_tensors(value):
        if symbols.has_symbols(tensor):
            yield from tensor.shape


def _depends_on_data(value: Any) -> bool:
    if symbols.is_symbol(value):
        return symbols.depends_on_data(value)
    return any(map(symbols.depends_on_data, result_tensors(value)))


def _refuse_sizes_of_data(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op != "call_function" or not _depends_on_data(node.meta.get("val")):
            continue
        path = _module_path(node)
        lines = [text.strip() for text in str(node.meta.get("stack_trace") or "").splitlines()]
        code = [text for text in lines if text and not set(text) <= set("^~")][-2:]
        raise CaptureError(
            f"{node.target} in {f'module {path}' if path else 'the model'} makes a tensor or a "
            "number that depends on the values of its input, so the bytes of the step are not "
            'known before it runs: leave the engine at "auto", which runs such a model in parts or '
            "by the dynamic engine, or give it a fixed size (torch.where, a product with the mask)"
            + "".join(f"\n  {text}" for text in code)
        )


def lower(module: fx.GraphModule, num_outputs: int) -> Lowered:
    """Return the operations and storages of AOTAutograd's joint graph.

    Every node has its fake tensors. The first `num_outputs` results belong to the forward, the
    others are gradients. Arguments that are read for their sizes only are replaced. Raise
    CaptureError, which names the place, if a part of the graph cannot be planned.
    """
    _refuse_sizes_of_data(module)
    split_convolutions(module)
    normalise_as_in_eager(module)
    drop_false_edges(module)
    lowered = _Lowering(module, num_outputs).run()
    if lowered.symbols:
        # Programs for all shapes are made on one graph.
        lowered.drop_preferences()
    return lowered
