"""Sizes of a captured graph as functions of symbols, and costs at sizes that were not measured.

A graph captured with symbolic dimensions has expressions in the place of sizes. They are compiled
once into a function of the symbols that returns a list of whole numbers; a shape is then a few
array operations. `at` makes a graph of plain sizes, for the few shapes at which operations are run.

Times at other sizes are fitted by least squares to those shapes, workspaces are bounded from above:
a wrong time costs time, a wrong byte breaks the limit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
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
from rotor.engines.graph.costs.profile import Cost, in_order, keys_of
from rotor.engines.graph.tracing.false_edges import of_sizes
from rotor.engines.graph.tracing.groups import groups_among
from rotor.engines.graph.tracing.lowering import Lowered, Value
from rotor.meter import allocator

_LAUNCH_NS = 3_000
"""Time of an operation on almost nothing, assumed if only one size was measured."""

_MOST_GROWTH = 3.0
_PARTS = 1 << 12

_ROUNDED = 1 - 1e-14
"""Factor that keeps the product of a ratio, a whole number, from being above it."""

Numbers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Values = tuple[int, ...]
"""Values of the symbols, in the order of `Lowered.symbols`."""
Shapes = tuple[tuple[int, ...] | None, ...]
"""Shapes of the leaves of a call's arguments; ``None`` for leaves that are no tensors."""


@dataclass(frozen=True)
class Point:
    """Costs of all operations at one shape, and their amounts of work there."""

    values: Values
    ns: Reals
    workspace: Numbers
    """Bytes of each operation's workspace."""
    work: Reals
    """Amount of work of each operation, to which its time is about proportional."""
    moved: Reals
    """Bytes that each operation reads and writes."""


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

    def workspaces(self, values: Values, moved: Reals) -> Numbers:
        """Return upper bounds of workspaces at a shape where operations move `moved` bytes.

        Where a measured shape covers this one, the workspace is at most the one measured there.
        Beyond, it grows from the largest one as the bytes that are moved, or with the exponent by
        which it grew between the measured shapes, if that is larger.
        """
        measured = np.stack([point.workspace for point in self.points])
        sizes = np.stack([point.moved for point in self.points])
        exact = [p for p in self.points if p.values == values]
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


class AnySize:
    """Sizes and costs of a captured graph for any values of the symbols.

    It knows the shapes at which operations were measured, and what steps of any shape have shown.
    """

    def __init__(
        self,
        lowered: Lowered,
        device: torch.device,
        origins: list[tuple[int, int]] | None,
        leaf_sizes: dict[int, list[str]],
    ) -> None:
        self._lowered, self._device = lowered, device
        self._origins, self._leaf_sizes = origins, leaf_sizes  # As of `sizing.origins_of`.
        self.fits = Fits()
        self.excess: dict[Values, int] = {}
        """Bytes by which metered steps exceeded their prediction."""
        self.losses: dict[Values, int] = {}
        """Bytes that the caller's loss needs."""
        self.held: dict[Values, int] = {}
        """Limits of the plans so far."""
        self._factors = np.ones(len(lowered.storages))
        expressions = _Expressions(list(lowered.symbols))
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
        self._grows = ~expressions.constants()[self._storages]
        self._unit = allocator.rounded_bytes(1, device)

    def of(self, values: Values) -> tuple[Numbers, Reals, Reals]:
        """Return the bytes of storages, and the work and moved bytes of operations, at a shape.

        Work are the flops where they outweigh the bytes, else the bytes.
        """
        found = np.array(self._evaluate(*values), dtype=np.int64)
        storages = -(-found[self._storages] // self._unit) * self._unit
        moved = np.maximum(found[self._moved], 1)
        work = np.maximum(moved, found[self._flops])
        return storages, work.astype(np.float64), moved.astype(np.float64)

    # -- costs

    def concrete(self, values: Values) -> Lowered:
        """Return the graph at plain sizes, to measure its operations."""
        return at(self._lowered, self.of(values)[0].tolist(), values)

    def add_point(self, values: Values, costs: Sequence[Cost]) -> None:
        """Add the measured costs of all operations at one shape."""
        storages, work, moved = self.of(values)
        ns = np.array([cost.ns for cost in costs], dtype=np.float64)
        workspaces = np.array([cost.workspace_bytes for cost in costs], dtype=np.int64)
        self.fits.add(Point(values, ns, workspaces, work, moved))
        for task, cost in zip(self._lowered.tasks, costs, strict=True):
            for storage, size in zip(task.made.values(), cost.made_bytes, strict=True):
                # Some operations make storages that are larger than their results.
                ratio = _ROUNDED * size / max(int(storages[storage]), 1)
                self._factors[storage] = max(self._factors[storage], ratio)

    def add_known(self, values: Values, known: dict[str, Cost]) -> None:
        """Add costs at a shape at which another capture was measured, if it has all operations.

        `known` are the costs by the keys of operations (`keys_of`).
        """
        lowered = self.concrete(values)
        keys = keys_of(lowered, self._device)
        if all(key in known for key in keys if key):
            self.add_point(values, in_order(lowered, keys, known))

    def costs(self, values: Values) -> list[Cost]:
        """Return the cost of every operation at a shape."""
        storages, work, moved = self.of(values)
        sizes = np.ceil(storages * self._factors).astype(np.int64).tolist()
        figures = self.fits.ns(work).tolist(), self.fits.workspaces(values, moved).tolist()
        return [
            Cost(ns, workspace, tuple([sizes[s] for s in task.made.values()]))
            for task, ns, workspace in zip(self._lowered.tasks, *figures, strict=True)
        ]

    def scaled(self, known: dict[Values, int], values: Values) -> int:
        """Return an upper bound of a figure that grows with the shape, from known ones."""
        here = self._growing(values)
        return max(
            (-(-figure * max(here, there) // there) if figure > 0 else figure)
            for shape, figure in known.items()
            for there in [self._growing(shape)]
        )

    def _growing(self, values: Values) -> int:
        """Return the bytes of the storages that grow with the shape, at a shape."""
        return max(int(self.of(values)[0][self._grows].sum()), 1)

    def total(self, values: Values) -> int:
        """Return the bytes of all storages at a shape."""
        return max(int(self.of(values)[0].sum()), 1)

    # -- shapes

    def _scope(self, values: Values) -> dict[str, int]:
        return dict(zip(self._lowered.symbols, values, strict=True))

    def broken_at(self, values: Values) -> str:
        """Return a condition of its kernels that does not hold at a shape; empty if all do."""
        scope, groups = self._scope(values), groups_among(t.node for t in self._lowered.tasks)
        found = dict.fromkeys(text for group in groups for text in group.conditions)
        return next((text for text in found if not symbols.evaluated(text, scope)), "")

    def values_at(self, shapes: Shapes) -> Values | None:
        """Return the values of the symbols at the shapes of a call; ``None`` if unknown."""
        if self._origins is None:
            return None
        found = []
        for leaf, dimension in self._origins:
            shape = shapes[leaf]
            assert shape is not None
            found.append(shape[dimension])
        return tuple(found)

    def shapes_at(self, values: Values, like: Shapes) -> Shapes:
        """Return the shapes of a call at which the symbols have some values.

        Leaves whose sizes are unknown have the shapes in `like`, which are those of any call of the
        graph.
        """
        scope, found = self._scope(values), list(like)
        for leaf, sizes in self._leaf_sizes.items():
            found[leaf] = tuple([int(symbols.evaluated(size, scope)) for size in sizes])
        return tuple(found)

    def largest_held(self, limit_bytes: int) -> Values | None:
        """Return the largest shape that has a plan within a limit; ``None`` without one."""
        known = (shape for shape, limit in self.held.items() if limit <= limit_bytes)
        return max(known, key=self.total, default=None)


def last_fitting(begin: Values, end: Values, fits: Callable[[Values], bool]) -> Values:
    """Return the last shape that fits on the way from one that does to one that does not."""

    def between(part: int) -> Values:
        return tuple(a + (b - a) * part // _PARTS for a, b in zip(begin, end, strict=True))

    return between(bisect_left(range(1, _PARTS), True, key=lambda part: not fits(between(part))))


def origin_values(lowered: Lowered, primals: Sequence[Any]) -> Values:
    """Return the values of the symbols in a call, from the inputs of its joint graph."""
    return tuple(
        [
            int(primals[index] if dimension is None else primals[index].shape[dimension])
            for index, dimension in lowered.symbols.values()
        ]
    )


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

    `sizes` are the bytes of the storages (`AnySize`), and `values` those of the symbols.
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
