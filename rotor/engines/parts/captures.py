"""Captured graphs of a model's parts, also those that several shapes share."""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rotor._pytorch import core
from rotor._pytorch.captures import fresh
from rotor.common.frames import release
from rotor.engines.contract import CannotPlan, NothingToPlan, Settings
from rotor.engines.graph.capture import Capture, Unplanned
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.early import owners_of, slots_of
from rotor.engines.graph.code.handover import Away
from rotor.engines.graph.code.numbers import ModelNumbers, numbers_of
from rotor.engines.graph.costs.recorded import price
from rotor.engines.graph.sizing import Alone, Families, Family, shapes_of
from rotor.engines.parts.kinds import Kind, in_place
from rotor.errors import CaptureError
from rotor.tier.state import AwayState

logger = logging.getLogger("rotor")


class Captures:
    """Captured graphs of a model's parts, by their common properties.

    With `shares_shapes`, calls that differ in sizes share a capture. Parts whose parameters are at
    home in a second tier, by `away`, have a capture each, and share programs.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        *,
        shares_shapes: bool = False,
        away: AwayState | None = None,
    ) -> None:
        self.offload = settings.offload
        self.away = away
        self.device = device
        self._source = settings.profile
        self._options = {"effort": "fast"} | settings.options
        self._captures: dict[Any, Capture] = {}
        self._numbers: defaultdict[Any, ModelNumbers] = defaultdict(ModelNumbers)
        self._read: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
        """Numbers of each module that its latest capture has read."""
        self._failures: dict[Any, str] = {}
        self.kinds: dict[Any, Kind] = {}
        """Captured graphs, by their id and, if others share them, the sizes of the call."""
        self._shares_shapes = shares_shapes
        self._orders: dict[Any, dict[Any, Any]] = {}
        self._families = Families()
        self._alone: dict[int, list[Alone]] = {}

    def kind_of(
        self, path: str, module: nn.Module, signature: Any, args: Any, kwargs: Any
    ) -> Kind | str:
        """Return the captured graph of a call, or the reason for having none."""
        key: Any = (_shape_of(module), signature)
        if self.away is not None:
            key = (id(module), *key)
        if key in self._failures:
            return self._failures[key]
        logger.debug("capturing %s", path)
        if self._shares_shapes and key not in self._captures:
            shaped = self._shaped(key, module, (args, kwargs))
            if shaped is not None:
                return shaped
        numbers, attempts, reason = self._numbers[key], [], ""
        reach = partial(self._reached, module, args, kwargs)
        if key in self._captures:
            known = self._read.get(module, {})
            attempts = [
                lambda: numbers.captured(known, module, reach),
                # It may be one that others share, for too many values already.
                lambda: reach(capture=self._captures[key]),
            ]
        for attempt in [*attempts, lambda: reach(numbers.inputs)]:
            try:
                reached = attempt()
                if reached is None:
                    continue
                self._captures[key], found = reached
                self._read[module] = numbers_of(module, found.captured.numbers)
                return self._kind(*reached, module, (args, kwargs), key)
            except (CaptureError, CannotPlan) as error:
                reason = str(error)
                release(error)
            except NothingToPlan:
                reason = "nothing in it needs a gradient"
                break
        self._failures[key] = reason
        return reason

    def _reached(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        numbers: frozenset[str] = frozenset(),
        capture: Capture | None = None,
    ) -> tuple[Capture, Unplanned]:
        """Return a capture, a new one with numbers as inputs if none is given, and its call."""
        capture = capture or self._new_capture(folds=False, numbers=numbers)
        capture.forget_programs()
        with in_place(self.away, module):
            return capture, capture.reach(module, args, kwargs)

    def _new_capture(self, **options: Any) -> Capture:
        home_of = None if self.away is None else self.away.home_of
        return Capture(fresh(_run), home_of=home_of, is_part=True, **options)

    def _family(self, key: Any, module: nn.Module, arguments: tuple[Any, Any]) -> Family:
        return self._families.joined((*key[-1], *key[:-1]), module, (*arguments, ()))

    def _shaped(self, key: Any, module: nn.Module, arguments: tuple[Any, Any]) -> Kind | None:
        """Return a graph that shapes share, at the shape of a call; ``None`` without one."""
        family = self._family(key, module, arguments)
        shapes = shapes_of(core.tree_flatten(arguments)[0])
        differing = family.differing(shapes)
        family.shapes[key[-1]] = shapes
        if not differing or family.refusal:
            return None
        given = (*arguments, ())
        try:
            with in_place(self.away, module):
                found = family.reach(self._new_capture, module, arguments, given, differing)
        except NothingToPlan:
            return None
        if found is None:
            return None
        try:
            shaped, _ = family.step(
                found,
                slots_of(module),
                arguments,
                self.device,
                lambda lowered: price(self._source, lowered, self.device, found.primals),
                self._alone.get(id(family), []),
                state=self.away,
                loss_captured=False,
                offload=self.offload,
                releases_outputs=True,
            )
        except CannotPlan as error:
            # A capture of this shape alone is refused for the same reason, which is kept.
            release(error)
            return None
        finally:
            found.drop()
        step = _leaving(shaped, module)
        place = (id(step.captured), step.values)
        if place not in self.kinds:
            alike = [kind.orders for kind in self.kinds.values() if kind.captured is step.captured]
            self.kinds[place] = Kind(step, self._options, alike[0] if alike else {})
        return self.kinds[place]

    def _kind(
        self,
        capture: Capture,
        found: Unplanned,
        module: nn.Module,
        arguments: Any,
        key: Any,
    ) -> Kind:
        captured = found.captured
        try:
            if id(captured) not in self.kinds:
                slots = slots_of(module)
                with in_place(self.away, module):
                    owners = owners_of(captured.lowered, found.primals, slots, arguments)
                costs = price(self._source, captured.lowered, self.device, found.primals)
                step = CapturedStep(
                    capture,
                    captured,
                    costs,
                    self.device,
                    loss_captured=False,
                    owners=owners,
                    offload=self.offload,
                    releases_outputs=True,
                )
                step.away = Away.of(self.away, captured.lowered, owners, slots)
                step = _leaving(step, module)
                orders = self._orders.setdefault((key[1:], len(captured.lowered.tasks)), {})
                known = {} if self.away is None else orders
                self.kinds[id(captured)] = Kind(step, self._options, known)
                if self._shares_shapes:
                    family = self._family(key, module, arguments)
                    alone = (family.shapes[key[-1]], captured.lowered, costs)
                    self._alone.setdefault(id(family), []).append(alone)
        finally:
            found.drop()
        return self.kinds[id(captured)]


def _run(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _leaving(step: CapturedStep, module: nn.Module) -> CapturedStep:
    """Return a part's step in which the gradients with homes leave, and no others exist."""
    return step.variant(step.existing_among([True] * len(slots_of(module))), frozenset())


def _shape_of(module: nn.Module) -> Any:
    """Return the properties of modules that share one capture; its guards check more."""
    parts = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    return (
        repr(module),
        tuple((type(part), part.training) for part in parts),
        tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors),
    )
