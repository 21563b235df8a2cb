"""Store of the captured graphs of a model's parts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor.common.frames import release
from rotor.engines.graph.capture import Capture, NothingToPlan, Unplanned, fresh
from rotor.engines.graph.early import owners_of, slots_of
from rotor.engines.parts.kinds import Kind, Shared
from rotor.engines.parts.shaped import Price, SharedShapes
from rotor.errors import CaptureError
from rotor.tier.offload import Offload

__all__ = ["Captures"]

logger = logging.getLogger("rotor")


class Captures:
    """Captured graphs of a model's parts, by their common properties.

    `price` returns the costs of captured operations, and the options are those of
    `rotor.graph.plan`. With `shares_shapes`, calls that differ in sizes share a capture.
    """

    def __init__(
        self,
        device: torch.device,
        price: Price,
        options: dict[str, Any],
        *,
        shares_shapes: bool = False,
        offload: Offload | None = None,
    ) -> None:
        self.offload = offload
        self._device = device
        self._price = price
        self._options = options
        self._captures: dict[Any, Capture] = {}
        self._failures: dict[Any, str] = {}
        self.kinds: dict[Any, Kind] = {}
        """Captured graphs, by their id and, if others share them, the sizes of the call."""
        self._shapes = SharedShapes(device, price) if shares_shapes else None

    def kind_of(
        self, path: str, module: nn.Module, signature: Any, args: Any, kwargs: Any
    ) -> Kind | str:
        """Return the captured graph of a call, or the reason for having none."""
        key = (_shape_of(module), signature)
        if key in self._failures:
            return self._failures[key]
        logger.debug("capturing %s", path)
        if self._shapes is not None and key not in self._captures:
            shaped = self._shaped(self._shapes, key, module, (args, kwargs))
            if shaped is not None:
                return shaped
        tried = [self._captures[key]] if key in self._captures else []
        for capture in [*tried, Capture(fresh(_run), folds=False)]:
            capture.forget_programs()
            try:
                found = capture.reach(module, args, kwargs)
            except CaptureError as error:
                # The capture may be one that others share, for too many values already.
                reason = str(error)
                release(error)
                continue
            except NothingToPlan:
                reason = "nothing in it needs a gradient"
                break
            self._captures[key] = capture
            return self._kind(capture, found, module, (args, kwargs), key)
        self._failures[key] = reason
        return reason

    def refresh(self, kinds: Iterable[Kind]) -> None:
        """Search again for programs of graphs in which an operation gave other bits."""
        for kind in kinds:
            if kind.is_refuted:
                kind.find_programs(self._options)

    def follow_link(self, kinds: Iterable[Kind]) -> None:
        """Add programs for the latest speed of the second tier."""
        for kind in dict.fromkeys(kinds):
            kind.follow_link(self._options)

    def with_existing(self, kind: Kind, module: nn.Module, existing: set[int]) -> Kind:
        """Return a kind for parameters with these ids that have gradients when a step begins."""
        return kind.with_existing(module, existing, self._options)

    def _shaped(
        self, shapes: SharedShapes, key: Any, module: nn.Module, arguments: tuple[Any, Any]
    ) -> Kind | None:
        """Return a graph that shapes share, at the shape of a call; ``None`` without one."""
        try:
            make = partial(Capture, fresh(_run))
            step = shapes.step(key[0], module, key[1], arguments, make)
        except NothingToPlan:
            return None
        if step is None:
            return None
        place = (id(step.captured), step.values)
        if place not in self.kinds:
            shared = next((k.shared for (i, *_), k in self._shaped_kinds() if i == place[0]), None)
            kind = Kind(
                step.capture,
                step.captured,
                [],
                self._device,
                step.owners,
                shape=step,
                shared=shared or Shared(),
                offload=self.offload,
            )
            kind.find_programs(self._options)
            self.kinds[place] = kind
        return self.kinds[place]

    def _shaped_kinds(self) -> list[tuple[Any, Kind]]:
        return [(place, kind) for place, kind in self.kinds.items() if kind.shape is not None]

    def search(self, kinds: Iterable[Kind]) -> None:
        """Search for programs at their own shape, for kinds that have programs of another shape."""
        for kind in dict.fromkeys(kinds):
            if kind.is_carried:
                kind.find_programs(self._options, again=True)

    def _kind(
        self, capture: Capture, found: Unplanned, module: nn.Module, arguments: Any, key: Any
    ) -> Kind:
        captured = found.captured
        try:
            if id(captured) not in self.kinds:
                owners = owners_of(captured.lowered, found.primals, slots_of(module), arguments)
                costs = self._price(captured.lowered, self._device, found.primals)
                kind = Kind(capture, captured, costs, self._device, owners, offload=self.offload)
                kind.find_programs(self._options)
                self.kinds[id(captured)] = kind
                if self._shapes is not None:
                    known = (captured.lowered, costs)
                    self._shapes.note(key[0], module, key[1], arguments, known)
        finally:
            found.drop()
        return self.kinds[id(captured)]


def _run(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _shape_of(module: nn.Module) -> Any:
    """Return the properties of modules that share one capture; its guards check more."""
    parts = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    return (
        repr(module),
        tuple((type(part), part.training) for part in parts),
        tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors),
    )
