"""The state of a model that plans depend on, and models that cannot be planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import compress, repeat
from operator import is_, methodcaller
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rotor import _core
from rotor._pytorch import backwards, core, fsdp, patches
from rotor._pytorch import traces as modes
from rotor._pytorch.scripts import ScriptModel
from rotor.common.module_state import Watch
from rotor.common.places import is_library, names_in
from rotor.common.rerun import Rerun, Unit

_values_of = methodcaller("values")
_FLAGS = {id(flag): flag for flag in (False, True)}

_ROOT = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
"""Functions of ``nn.Module`` that run when a module is called."""


def refuse_sharded(model: nn.Module, planned_as: str = "a graph") -> None:
    """Raise RuntimeError if FSDP swaps parameters of the model while it runs."""
    if not fsdp.is_loaded():
        return
    modules = dict(model.named_modules())
    managed = fsdp.managed(modules.values()) or [False] * len(modules)
    for (name, module), is_managed in zip(modules.items(), managed, strict=True):
        if is_managed or fsdp.is_unit(module):
            where = f"module {name}" if name else "the model"
            raise RuntimeError(
                f"{where} is sharded by fully_shard (FSDP2): its parameters are swapped while it "
                f"runs, and planned as {planned_as} it would silently lose gradients. Leave the "
                'engine at "auto", which plans an nn.Sequential as a chain and any other model by '
                "its sharded blocks (docs/fsdp.md); or use DistributedDataParallel"
            )


def planned_module(model: nn.Module) -> nn.Module:
    """Return the model, or the module that is planned in the place of a script.

    Raises TypeError for no module, or a DistributedDataParallel in the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            kind = type(module).__name__
            where = f"module {name}" if name else "the model"
            raise TypeError(
                f"{where} is a {kind}: what it does with gradients would be lost, or done twice, "
                "where they are computed under a plan. Wrap the other way round: "
                f"{kind}(rotor.Checkpointable(model))"
            )
    for module in model.modules():
        if not hasattr(module, "training"):
            module.training = False  # As `eval` does. Frozen scripts have no such attribute.
    return ScriptModel(model) if isinstance(model, torch.jit.ScriptModule) else model


def _flags_in(
    attributes: Iterable[Mapping[str, Any]], kinds: Iterable[type]
) -> list[tuple[Mapping[str, Any], str]]:
    """Return the places of flags and of ``None`` in attributes, in classes and in global names."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    classes = [vars(base) for base in bases if not is_library(base.__module__)]
    functions = [f for own in classes for f in own.values() if isinstance(f, FunctionType)]
    places: list[tuple[Mapping[str, Any], str]] = [
        *((own, name) for own in attributes for name in own if name not in Watch.internals),
        *((own, name) for own in classes for name in own),
        *((f.__globals__, name) for f in functions for name in names_in(f.__code__).outer),
    ]
    return [(own, name) for own, name in places if isinstance(own.get(name, 0), bool | None)]


def _draws_in_cudnn(tensor: torch.Tensor) -> bool:
    """Return whether a recurrent layer with these weights takes its dropout from cuDNN."""
    return tensor.is_cuda and bool(torch.backends.cudnn.is_acceptable(tensor))


class ModelState:
    """State of a model that a plan depends on, read fast before every step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        children = list(map(core.child_slots, self._modules))
        self._parents = [slots for slots in children if slots]
        self._childless = [slots for slots in children if not slots]
        self._children = self._child_modules()
        self._parameters = [slot for m in self._modules for slot in core.parameter_slots(m)]
        self._read_parameters = core.reader(self._parameters)
        slots = [slot for m in self._modules for slot in core.buffer_slots(m)]
        slots += self._parameters
        self._classes: tuple[type, ...] = ()
        self._functions: list[Any] = []
        self._versions: tuple[int, ...] | None = None
        self._torch, self._hooks = patches.TorchFunctions(), modes.global_hooks()
        tensors = [type(core.value_in(slot)) for slot in slots]
        self.watch({*self._types, torch.Tensor, nn.Parameter, *tensors})
        self._lazy = [slot for slot in slots if is_lazy(core.value_in(slot))]
        self._managed = fsdp.managed(self._modules)
        self._recurrent = [m for m in self._modules if isinstance(m, nn.RNNBase)]

    def _child_modules(self) -> list[tuple[nn.Module | None, ...]]:
        return list(map(tuple, map(_values_of, self._parents)))

    def watch(self, kinds: set[type]) -> None:
        """Have functions of the classes of modules, or of tensors, compared from now on."""
        if kinds.issubset(self._classes):
            return
        self._classes = tuple({*self._classes, *kinds})
        bases = dict.fromkeys(base for kind in self._classes for base in kind.__mro__)
        self._kinds = [kind for kind in bases if kind not in (object, nn.Module)]
        self._functions, self._versions = self._called_functions(), None

    def _called_functions(self) -> list[Any]:
        """Return the functions of the classes of modules and tensors."""
        found = [
            {name: value for name, value in vars(kind).items() if patches.is_code(value)}
            for kind in self._kinds
        ]
        return [found, list(map(vars(nn.Module).get, _ROOT))]

    def _is_same_code(self) -> bool:
        versions = _core.versions(self._classes)
        if versions is None or versions != self._versions:
            # PyTorch, Python and libraries note other things in classes, at any time.
            if self._called_functions() != self._functions:
                return False
            self._versions = versions
        if (
            _core.versions(patches.NAMESPACES) != self._torch.versions
            and not self._torch.are_same()
        ):
            return False
        return modes.global_hooks() == self._hooks

    @cached_property
    def unit(self) -> Unit:
        """All modules of the model."""
        return Unit(self._modules)

    def rerun(self, value: Any, device: torch.device) -> Rerun:
        """Return the state in which a forward of these arguments begins, to run it again."""
        return Rerun(self.unit, value, device)

    @property
    def parameters(self) -> list[core.Slot]:
        """Slots of parameters: (the dictionary of their module, their name)."""
        return self._parameters

    def current_parameters(self) -> list[Any]:
        """Return what the slots of parameters hold now, ``None`` where one is gone."""
        return list(self._read_parameters())

    def is_current(self) -> bool:
        """Return whether modules, their calls and sharding are unchanged, and parameters there."""
        return (
            list(map(type, self._modules)) == self._types
            and self._is_same_code()
            and not any(self._childless)
            and self._child_modules() == self._children
            and fsdp.managed(self._modules) == self._managed
            and not any(map(is_, self._read_parameters(), repeat(None)))
        )

    def is_initialized(self) -> bool:
        """Return whether all parameters exist: lazy modules make theirs in their first forward."""
        return not any(is_lazy(core.value_in(slot)) for slot in self._lazy)

    def check_dropout(self) -> None:
        """Raise RuntimeError if a recurrent layer has dropout that cannot be drawn again."""
        for module in self._recurrent:
            draws = module.training and module.dropout > 0 and module.num_layers > 1
            if draws and _draws_in_cudnn(next(module.parameters())):
                kind = type(module).__name__
                raise RuntimeError(
                    f"the dropout of {kind}(..., dropout={module.dropout}) is drawn from a state "
                    "of cuDNN that no generator restores, so computing the layer again would take "
                    "other masks, and gradients would be wrong. Set dropout=0 and put nn.Dropout "
                    "between layers of one each; or torch.backends.cudnn.enabled = False; or use "
                    'engine="dynamic", which keeps what such a layer makes'
                )

    def training_flags(self) -> tuple[bool, ...]:
        """Return the training flag of every module."""
        return tuple([module.training for module in self._modules])

    @cached_property
    def _switching(self) -> tuple[list[Any], list[tuple[Mapping[str, Any], str]]]:
        """Dictionaries whose sizes tell that code may have changed, and the places of flags."""
        slots_of = [*map(vars, self._modules)]
        own = [not is_library(kind.__module__) for kind in self._types]
        attributes = [*compress(slots_of, own)]
        registries = [slots[n] for slots in slots_of for n in core.HOOKS if n in slots]
        return [*registries, *attributes], _flags_in(attributes, compress(self._types, own))

    def switches(self) -> tuple[Any, ...]:
        """Return what may turn other code of modules on, however it changes from step to step.

        These are the numbers of hooks and of attributes, and what was a flag, or ``None``, in
        attributes of the user's modules, in their classes, or among global names that these use:
        its type, and the flag.
        """
        sized, places = self._switching
        values = [slots.get(name) for slots, name in places]
        flags = map(_FLAGS.get, map(id, values))
        return tuple(map(len, sized)), tuple(map(type, values)), tuple(flags)

    def parameter_flags(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return flags of the parameters: which require gradients, and which have none yet."""
        parameters = self.current_parameters()
        found = zip(parameters, backwards.gradients_of(parameters), strict=True)
        return (
            tuple([p is not None and p.requires_grad for p in parameters]),
            tuple([p is not None and gradient is None for p, gradient in found]),
        )

    def lacking_gradient(self, flags: tuple[bool, ...]) -> set[int]:
        """Return the ids of the parameters without gradient, by the second of `parameter_flags`."""
        return {
            id(slots[name])
            for (slots, name), absent in zip(self._parameters, flags, strict=True)
            if absent
        }
