"""Captured graphs of a model's parts, also those that several shapes share."""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rotor._pytorch.captures import fresh
from rotor.common.frames import release
from rotor.engines.contract import CannotPlan, NothingToPlan, Settings
from rotor.engines.graph.capture import Capture, Unplanned
from rotor.engines.graph.code.early import slots_of
from rotor.engines.graph.code.numbers import ModelNumbers, numbers_of
from rotor.engines.graph.costs.recorded import price
from rotor.engines.graph.costs.symbols import origin_values
from rotor.engines.graph.sizing import Families, Family, made_step
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
        family, given = self._family(key, module, arguments), (*arguments, ())
        differing = family.note(key[-1], arguments)
        if not differing or family.refusal:
            return None
        try:
            with in_place(self.away, module):
                found = family.reach(self._new_capture, module, arguments, given, differing)
            if found is None or family.capture is None:
                return None
            return self._kind(family.capture, found, module, arguments, key, family)
        except NothingToPlan:
            return None
        except CannotPlan as error:
            # A capture of this shape alone is refused for the same reason, which is kept.
            release(error)
            return None

    def _kind(
        self,
        capture: Capture,
        found: Unplanned,
        module: nn.Module,
        arguments: Any,
        key: Any,
        family: Family | None = None,
    ) -> Kind:
        """Return the ways to run a captured call; with a family, of a graph for any size."""
        lowered, primals = found.captured.lowered, found.primals
        values = () if family is None else origin_values(lowered, primals)
        place = (id(found.captured), values)
        try:
            if place not in self.kinds:
                orders: dict[Any, Any] = {}
                if family is None and self.away is not None:
                    orders = self._orders.setdefault((key[1:], len(lowered.tasks)), orders)
                made = made_step(
                    Kind,
                    capture,
                    found,
                    slots_of(module),
                    arguments,
                    self.device,
                    lambda plain: price(self._source, plain, self.device, primals),
                    self.away,
                    family,
                    loss_captured=False,
                    offload=self.offload,
                    search=self._options,
                    orders=orders,
                )
                assert isinstance(made, Kind)
                if family is None and self._shares_shapes:
                    self._family(key, module, arguments).alone[key[-1]] = made
                self.kinds[place] = made.with_existing(module, set())
        finally:
            found.drop()
        return self.kinds[place]


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
