"""Guards of runs that leave no trace: each puts one kind of state back when it ends."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.generators import RngTracker

__all__ = [
    "attributes_kept",
    "autocast_cache_dropped",
    "buffers_copied",
    "buffers_kept",
    "generators_kept",
    "gradients_aside",
    "model_kept",
    "random_states_kept",
    "training_flags_kept",
    "values_kept",
]

_PLAIN = (bool, int, float, complex, str, type(None), tuple)
_FILLED = (list, dict, set)


@contextmanager
def training_flags_kept(model: nn.Module) -> Iterator[None]:
    """Put the training flags of a model's modules back as they were."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Take the gradients of parameters off inside, and put them back afterwards."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Put PyTorch's default generators of the CPU and of a device back as they were."""
    rng = RngTracker(device)
    states = rng.read()
    try:
        yield
    finally:
        rng.write(states)


@contextmanager
def generators_kept(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put the generators of Python and NumPy, and those in modules' attributes, back as they were.

    Parameters
    ----------
    modules
        Where to look for a `torch.Generator`, or one of NumPy's or Python's.
    """
    numpy: Any = sys.modules.get("numpy")
    restores: list[Callable[[], object]] = [partial(random.setstate, random.getstate())]
    if numpy is not None:
        restores.append(partial(numpy.random.set_state, numpy.random.get_state()))
    for module in modules:
        for value in module.__dict__.values():
            if isinstance(value, torch.Generator):
                restores.append(partial(value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                restores.append(partial(value.setstate, value.getstate()))
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                restores.append(partial(value.set_state, value.get_state()))
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                bits = value.bit_generator
                restores.append(partial(setattr, bits, "state", bits.state))
    try:
        yield
    finally:
        for restore in restores:
            restore()


@contextmanager
def attributes_kept(modules: Sequence[nn.Module], *, prepares: bool = False) -> Iterator[None]:
    """Put plain attributes of modules, tensors and collections among them, back as they were.

    Parameters
    ----------
    modules
        Whose attributes.
    prepares
        Leave what a first forward sets up: attributes that are new, or were ``None`` or a flag.
    """
    before = [(module, dict(module.__dict__)) for module in modules]
    values = [value for _, found in before for value in found.values()]
    tensors = [
        (value, value.detach().clone())
        for value in values
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    ]
    filled = [(value, value.copy()) for value in values if type(value) in _FILLED]
    own = {id(slots) for module in modules for slots in core.slots_of_module(module)}
    filled = [(value, copied) for value, copied in filled if id(value) not in own]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for value, copied in filled:
            _refill(value, copied)
        for module, attributes in before:
            for name, value in list(module.__dict__.items()):
                if name not in attributes:
                    if not prepares and type(value) in (*_PLAIN, torch.Tensor):
                        del module.__dict__[name]
                elif prepares and isinstance(attributes[name], bool | None):
                    continue
                elif type(attributes[name]) in (*_PLAIN, torch.Tensor, *_FILLED):
                    module.__dict__[name] = attributes[name]


def _refill(value: Any, copied: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(copied)
    else:
        value.update(copied)


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Copy the values that tensors had back into them."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


@contextmanager
def buffers_kept(slots: Sequence[core.Slot]) -> Iterator[None]:
    """Put the same buffers with the same values back, after a run on the buffers themselves."""
    kept = [(slot, slot[0][slot[1]]) for slot in slots]
    try:
        with values_kept(buffer for _, buffer in kept):
            yield
    finally:
        for (where, name), buffer in kept:
            where[name] = buffer


@contextmanager
def buffers_copied(slots: Iterable[core.Slot]) -> Iterator[None]:
    """Put the same buffers back after a run on copies of them; shared ones share their copy."""
    kept = [(slot, slot[0][slot[1]]) for slot in slots]
    copies: dict[int, torch.Tensor] = {}
    try:
        for (where, name), buffer in kept:
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                where[name] = copies[id(buffer)]
        yield
    finally:
        for (where, name), buffer in kept:
            where[name] = buffer


@contextmanager
def autocast_cache_dropped() -> Iterator[None]:
    """Clear autocast's cache afterwards: it holds casts that no further step reads."""
    is_enabled = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        if is_enabled:
            torch.clear_autocast_cache()


@contextmanager
def model_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers, random states and plain attributes back after forwards of a model."""
    modules = list(model.modules())
    slots = [slot for module in modules for slot in core.buffer_slots(module)]
    with (
        random_states_kept(device),
        buffers_kept(slots),
        generators_kept(modules),
        attributes_kept(modules),
    ):
        yield
