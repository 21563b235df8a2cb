"""Sizes of a captured graph as functions of symbols, evaluated for given sizes of the arguments.

A graph captured with symbolic dimensions has expressions in the place of sizes. They are compiled
once into a function of the symbols that returns a list of whole numbers; the sizes of a shape then
take a few array operations. `at` makes a graph of plain sizes, for the few shapes at which
operations are run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.fx.node import map_arg

from rotor._pytorch import core, symbols
from rotor.engines.graph.estimate import flops_expression, moved_bytes
from rotor.engines.graph.false_edges import of_sizes
from rotor.engines.graph.lowering import Lowered, Task, Value
from rotor.meter import allocator

__all__ = ["Sizes", "at", "origin_values"]

Numbers = npt.NDArray[np.int64]


class _Expressions:
    """Distinct expressions, compiled into one function."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._places: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """Return the place of a number's value among the results."""
        return self._places.setdefault(symbols.text_of(value), len(self._places))

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
                    storages[storage] = expressions.add(_made(lowered, task, path))
            moved = [expressions.add(moved_bytes(n) if n is not None else 0) for n in nodes]
            flops = [expressions.add(flops_expression(n) if n is not None else 0) for n in nodes]
        self._evaluate = expressions.compiled()
        self._storages, self._moved, self._flops = map(np.array, (storages, moved, flops))
        self._unit = allocator.rounded_bytes(1, device)

    def of(self, values: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
        """Return the bytes of storages, and the moved bytes and flops of operations.

        `values` are those of the symbols, in the order of `names`.
        """
        found = np.array(self._evaluate(*values), dtype=np.int64)
        bytes_of = found[self._storages]
        return -(-bytes_of // self._unit) * self._unit, found[self._moved], found[self._flops]


def _made(lowered: Lowered, task: Task, path: tuple[int, ...]) -> Any:
    """Return the bytes of a new storage, as a number or an expression."""
    if task.node is None:
        value, below = lowered.tangents[path[0]].meta["val"], path[1:]
    else:
        value, below = task.node.meta["val"], path
    for index in below:
        value = value[index]
    return value.untyped_storage().nbytes()


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
