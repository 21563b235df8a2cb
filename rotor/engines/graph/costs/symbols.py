"""Sizes of a captured graph as functions of symbols, and costs at sizes that were not measured.

A graph captured with symbolic dimensions has expressions in the place of sizes. They are compiled
once into a function of the symbols that returns a list of whole numbers; a shape is then a few
array operations. `at` makes a graph of plain sizes, for the few shapes at which operations are run.

Times at other sizes are fitted by least squares to those shapes, workspaces are bounded from above:
a wrong time costs time, a wrong byte breaks the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.fx.node import map_arg

from rotor._pytorch import core, symbols
from rotor.engines.graph.costs.estimate import flops_expression, made_tensor, moved_bytes
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.tracing.false_edges import of_sizes
from rotor.engines.graph.tracing.lowering import Lowered, Value
from rotor.meter import allocator

_LAUNCH_NS = 3_000
"""Time of an operation on almost nothing, assumed if only one size was measured."""

Numbers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """Costs of all operations at one shape, and their amounts of work there."""

    values: tuple[int, ...]
    """Values of the symbols."""
    ns: Reals
    workspace: Numbers
    """Bytes of each operation's workspace."""
    work: Reals
    """Amount of work of each operation, to which its time is about proportional."""
    moved: Reals
    """Bytes that each operation reads and writes."""

    @classmethod
    def of(
        cls, values: Sequence[int], costs: Sequence[Cost], moved: Numbers, flops: Numbers
    ) -> Point:
        """Return the point of measured costs."""
        return cls(
            tuple(values),
            np.array([cost.ns for cost in costs], dtype=np.float64),
            np.array([cost.workspace_bytes for cost in costs], dtype=np.int64),
            work_of(moved, flops),
            np.maximum(moved, 1).astype(np.float64),
        )


def work_of(moved: Numbers, flops: Numbers) -> Reals:
    """Return amounts of work: the flops where they outweigh the bytes, else the bytes."""
    return np.maximum(np.maximum(moved, flops), 1).astype(np.float64)


class Fits:
    """Costs as functions of the symbols, by the shapes at which operations were measured."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point) -> None:
        """Add a measured shape."""
        self.points = [known for known in self.points if known.values != point.values]
        self.points.append(point)

    def ns(self, work: Reals) -> Numbers:
        """Return the times of operations with these amounts of work."""
        works = np.stack([point.work for point in self.points])
        times = np.stack([point.ns for point in self.points])
        # Relative errors count: a small shape is as important as a large one.
        weights = 1 / np.maximum(times, 1) ** 2
        total = weights.sum(axis=0)
        mean_work = (weights * works).sum(axis=0) / total
        mean_time = (weights * times).sum(axis=0) / total
        spread = (weights * (works - mean_work) ** 2).sum(axis=0)
        product = (weights * (works - mean_work) * (times - mean_time)).sum(axis=0)
        one = mean_time - np.minimum(mean_time, _LAUNCH_NS)
        is_spread = spread > 1e-6 * total * mean_work**2
        slope = np.where(is_spread, product / np.maximum(spread, 1e-300), one / mean_work)
        # Neither the slope nor the time without any work is negative.
        slope = np.clip(slope, 0, mean_time / mean_work)
        found: Numbers = np.maximum(mean_time + slope * (work - mean_work), 0).astype(np.int64)
        return found

    def workspaces(self, values: Sequence[int], moved: Reals) -> Numbers:
        """Return upper bounds of workspaces at a shape where operations move `moved` bytes.

        Where a measured shape covers this one, the workspace is at most the one measured there.
        Beyond, it grows from the largest one as the bytes that are moved, or with the exponent by
        which it grew between the measured shapes, if that is larger.
        """
        measured = np.stack([point.workspace for point in self.points])
        sizes = np.stack([point.moved for point in self.points])
        exact = [p for p in self.points if p.values == tuple(values)]
        if exact:
            return exact[0].workspace
        covering = [
            point.workspace
            for point in self.points
            if all(here <= there for here, there in zip(values, point.values, strict=True))
        ]
        if covering:
            bound: Numbers = np.max(np.stack(covering), axis=0)
            return bound
        growth = np.ones(measured.shape[1])
        for first in range(len(measured)):
            for second in range(len(measured)):
                more = (sizes[second] > 1.05 * sizes[first]) & (measured[first] > 0)
                ratio = np.log(np.maximum(measured[second], 1) / np.maximum(measured[first], 1))
                span = np.log(np.where(more, sizes[second] / sizes[first], np.e))
                growth = np.where(more, np.maximum(growth, ratio / span), growth)
        columns = np.arange(measured.shape[1])
        largest = sizes.argmax(axis=0)
        ratio = np.maximum(moved / sizes[largest, columns], 1.0)
        scaled = measured[largest, columns] * ratio ** np.minimum(growth, _MOST_GROWTH)
        beyond: Numbers = np.ceil(np.maximum(scaled, measured.max(axis=0))).astype(np.int64)
        return beyond


_MOST_GROWTH = 3.0


class _Expressions:
    """Distinct expressions, compiled into one function."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._places: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """Return the place of a number's value among the results."""
        return self._places.setdefault(symbols.text_of(value), len(self._places))

    def constants(self) -> npt.NDArray[np.bool_]:
        """Return True for the results that no symbol changes."""
        return np.array([text.isdigit() for text in self._places], dtype=np.bool_)

    def compiled(self) -> Callable[..., list[int]]:
        """Return the function of the symbols."""
        body = ", ".join(f"({text})" for text in self._places)
        source = f"def evaluate({', '.join(self._names)}):\n    return [{body}]\n"
        namespace: dict[str, Any] = {"math": math, "torch": torch}
        exec(compile(source, "<rotor sizes>", "exec"), namespace)
        found: Callable[..., list[int]] = namespace["evaluate"]
        return found


class Sizes:
    """Bytes of storages, and amounts of work of operations, for any values of the symbols."""

    def __init__(self, lowered: Lowered, device: torch.device) -> None:
        self.names = list(lowered.symbols)
        """Names of the symbols, in the order of their values."""
        expressions = _Expressions(self.names)
        nodes = [task.node for task in lowered.tasks]
        values = [node.meta.get("val") for node in lowered.primals]
        sizes = [size for v in values if isinstance(v, torch.Tensor) for size in v.shape]
        with symbols.unguarded([*values, *sizes]):
            storages = [0] * len(lowered.storages)
            for task in lowered.tasks:
                for path, storage in task.made.items():
                    made = made_tensor(lowered, task, path)
                    storages[storage] = expressions.add(made.untyped_storage().nbytes())
            moved = [expressions.add(moved_bytes(n) if n is not None else 0) for n in nodes]
            flops = [expressions.add(flops_expression(n) if n is not None else 0) for n in nodes]
        self._evaluate = expressions.compiled()
        self._storages, self._moved, self._flops = map(np.array, (storages, moved, flops))
        self.grows = ~expressions.constants()[self._storages]
        """True for the storages whose bytes depend on the symbols."""
        self._unit = allocator.rounded_bytes(1, device)

    def of(self, values: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
        """Return the bytes of storages, and the moved bytes and flops of operations.

        `values` are those of the symbols, in the order of `names`.
        """
        found = np.array(self._evaluate(*values), dtype=np.int64)
        bytes_of = found[self._storages]
        return -(-bytes_of // self._unit) * self._unit, found[self._moved], found[self._flops]


def origin_values(lowered: Lowered, primals: Sequence[Any]) -> list[int]:
    """Return the values of the symbols in a call, from the inputs of its joint graph."""
    return [
        int(primals[index] if dimension is None else primals[index].shape[dimension])
        for index, dimension in lowered.symbols.values()
    ]


class _Concrete:
    """Maker of a graph of plain sizes from one with symbols."""

    def __init__(self, lowered: Lowered, values: Mapping[str, int]) -> None:
        self._lowered = lowered
        self._values = dict(values)
        self._graph = fx.Graph()
        self._nodes: dict[fx.Node, Any] = {}
        self._numbers: dict[str, Any] = {}
        self._mode = core.fake_mode()

    def number(self, value: Any) -> Any:
        if not symbols.is_symbol(value):
            return value
        text = symbols.text_of(value)
        if text not in self._numbers:
            scope = {"math": math, "torch": torch, **self._values}
            self._numbers[text] = eval(text, scope)
        return self._numbers[text]

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return type(value)([self.value(item) for item in value])
        return self.number(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = (tensor.untyped_storage().nbytes(), *tensor.shape)
        if tensor.layout != torch.strided or not any(map(symbols.is_symbol, parts)):
            return tensor
        shape = [self.number(size) for size in tensor.shape]
        strides = [self.number(stride) for stride in tensor.stride()]
        size = self.number(tensor.untyped_storage().nbytes()) // tensor.element_size()
        with self._mode:
            flat = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
            found: torch.Tensor = flat.as_strided(
                shape, strides, self.number(tensor.storage_offset())
            )
        return found

    def arguments(self, node: fx.Node) -> Any:
        if node.target is not of_sizes:
            return map_arg(node.args, self._mapped)
        given: Any = node.args
        shape, strides, dtype = given
        found = [
            tuple([int(symbols.evaluated(text, self._values)) for text in texts])
            for texts in (shape, strides)
        ]
        return (*found, dtype)

    def run(self) -> dict[fx.Node, Any]:
        for node in self._lowered.module.graph.nodes:
            if node.op == "output":
                continue
            found = node.meta.get("val")
            if node.op != "placeholder" and symbols.is_symbol(found):
                self._nodes[node] = self.number(found)
                continue
            made = self._graph.create_node(
                node.op,
                node.target,
                self.arguments(node),
                map_arg(node.kwargs, self._mapped),
                node.name,
            )
            made.meta = dict(node.meta)
            made.meta["val"] = self.value(found)
            self._nodes[node] = made
        return self._nodes

    def _mapped(self, node: fx.Node) -> Any:
        found = node.meta.get("val")
        return self.number(found) if symbols.is_symbol(found) else self._nodes[node]


def at(lowered: Lowered, sizes: Sequence[int], values: Sequence[int]) -> Lowered:
    """Return the graph with plain sizes; operations and storages keep their numbers.

    `sizes` are the bytes of the storages (`Sizes.of`), and `values` those of the symbols.
    """
    nodes = _Concrete(lowered, dict(zip(lowered.symbols, values, strict=True))).run()
    kept = {node: made for node, made in nodes.items() if isinstance(made, fx.Node)}
    known: dict[int, Value] = {}

    def value_of(value: Value) -> Value:
        if id(value) not in known:
            base = None if value.base is None else value_of(value.base)
            known[id(value)] = Value(value.kind, kept[value.node], base, value.storages)
        return known[id(value)]

    tasks = [replace(t, node=None if t.node is None else kept[t.node]) for t in lowered.tasks]
    return replace(
        lowered,
        tasks=tasks,
        storages=[
            (int(size), pinned) for size, (_, pinned) in zip(sizes, lowered.storages, strict=True)
        ],
        values={
            kept[node]: value_of(value) for node, value in lowered.values.items() if node in kept
        },
        primals=[kept[node] for node in lowered.primals],
        tangents=[kept[node] for node in lowered.tangents],
        outputs=[],
        gradients=[],
        mutated={kept[node] for node in lowered.mutated},
        unrepeatable=[],
        symbols={},
    )
