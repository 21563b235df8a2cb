"""Captures of a model's parts that several shapes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.engines.graph.capture import Capture, Unplanned
from rotor.engines.graph.early import owners_of, slots_of
from rotor.engines.graph.families import Families, Family, origins_of, shapes_of
from rotor.engines.graph.lowering import Lowered
from rotor.engines.graph.profile import Cost, keys_of
from rotor.engines.graph.repeating import keep_unrepeatable
from rotor.engines.graph.shapes import ShapeStep, SymbolicGraph
from rotor.engines.graph.symbols import origin_values

__all__ = ["Price", "SharedShapes"]

Price = Callable[[Lowered, torch.device, Sequence[Any]], list[Cost]]


class SharedShapes:
    """Graphs with symbols of a model's parts."""

    def __init__(self, device: torch.device, price: Price) -> None:
        self._device, self._price = device, price
        self._families: dict[Any, Families] = {}
        self._known: dict[int, list[tuple[Any, Lowered, list[Cost]]]] = {}

    def step(
        self,
        key: Any,
        module: nn.Module,
        signature: Any,
        arguments: tuple[Any, Any],
        make: Callable[[], Capture],
    ) -> ShapeStep | None:
        """Return the sizes and costs of a call; ``None`` if it is to be captured alone.

        The key has the properties of modules that share a capture, which `make` makes. The
        arguments are those of the call by position, and by name.
        """
        family = self._family(key, module, signature, arguments)
        shapes = shapes_of(core.tree_flatten((*arguments, ()))[0])
        differing = family.differing(shapes)
        family.shapes[signature] = shapes
        if not differing or family.refusal:
            return None
        found = family.reach(make, module, arguments, (*arguments, ()), differing)
        if found is None:
            return None
        try:
            values = tuple(origin_values(found.captured.lowered, found.primals))
            graph = family.graph_of(found.captured)
            if graph is None:
                graph = self._graph(family, found, module, arguments, values)
            return graph.step(values)
        finally:
            found.drop()

    def note(
        self,
        key: Any,
        module: nn.Module,
        signature: Any,
        arguments: tuple[Any, Any],
        known: tuple[Lowered, list[Cost]],
    ) -> None:
        """Take note of the costs of a call that was captured alone."""
        family = self._family(key, module, signature, arguments)
        self._known.setdefault(id(family), []).append((family.shapes.get(signature), *known))

    def _family(self, key: Any, module: nn.Module, signature: Any, arguments: Any) -> Family:
        families = self._families.setdefault(key, Families())
        return families.joined(signature, module, (*arguments, ()))

    def _graph(
        self,
        family: Family,
        found: Unplanned,
        module: nn.Module,
        arguments: tuple[Any, Any],
        values: tuple[int, ...],
    ) -> SymbolicGraph:
        captured, device, lowered = found.captured, self._device, found.captured.lowered
        leaves = core.tree_flatten((*arguments, ()))[0]
        origins, leaf_sizes = origins_of(captured, found.primals, leaves)
        graph = SymbolicGraph(
            family.shared_capture,
            captured,
            device,
            loss_captured=False,
            planned_for="",
            owners=owners_of(lowered, found.primals, slots_of(module), arguments),
            verifies=True,
            origins=origins,
            leaf_sizes=leaf_sizes,
        )
        costs = self._price(graph.concrete(values), device, found.primals)
        keep_unrepeatable(lowered, [cost.flags for cost in costs])
        graph.add_point(values, costs)
        for shapes, alone, known in self._known.get(id(family), []):
            there = None if shapes is None else graph.values_at(shapes)
            if there is not None and there != values:
                graph.add_known(there, dict(zip(keys_of(alone, device), known, strict=True)))
        family.graphs.append(graph)
        return graph
