"""Caches of keys and values that training steps of Hugging Face's models leave out.

A causal model returns the keys and values of all its layers by default. As outputs they would be
kept to the end of the step, though hardly any training loop reads them. A step leaves them out;
its output has an `UnreadCache` in their place, which computes them when it is read.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, get_args

import torch
from torch import nn

from rotor.common.generators import AutocastState, RngTracker
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.common.undisturbed import trial
from rotor.engines.contract import Call, Context
from rotor.meter import allocator
from rotor.meter.step_meter import cancel_running
from rotor.units import exact_bytes

__all__ = ["CacheRule", "UnreadCache", "cache_field"]

_ARGUMENT = "use_cache"
_FIELDS = ("cache", "past_key_values")
"""Names of the cache among the arguments and results, in Transformers from 5.24 on and before."""
_LABELS = ("labels", "start_positions", "future_values")
"""Arguments with which some forwards of Transformers leave the cache out by themselves."""


def cache_field(output: Any) -> str | None:
    """Return the name of the cache in the output of a model of Transformers; ``None`` without."""
    return None if isinstance(output, torch.Tensor) else _cache_field_of(type(output))


def _cache_field_of(kind: Any) -> str | None:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return None
    if not any(base.__name__ == "ModelOutput" for base in kind.__mro__):
        return None
    names = {field.name for field in dataclasses.fields(kind)}
    return next((name for name in _FIELDS if name in names), None)


class UnreadCache:
    """Keys and values of a training step, computed when they are first read.

    It passes for a ``Cache`` of Transformers, and has the attributes and methods of the real one.

    Parameters
    ----------
    compute
        Function that returns the real cache.
    """

    __slots__ = ("_compute", "_real")

    def __init__(self, compute: Callable[[], Any]) -> None:
        object.__setattr__(self, "_compute", compute)
        object.__setattr__(self, "_real", None)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of caches, for callers that ask an object; ``type`` is this class."""
        if self._compute is None:
            return type(self._real)
        return getattr(sys.modules.get("transformers.cache_utils"), "Cache", UnreadCache)

    def _read(self) -> Any:
        if self._compute is not None:
            object.__setattr__(self, "_real", self._compute())
            object.__setattr__(self, "_compute", None)
        return self._real

    def __getattr__(self, name: str) -> Any:
        is_special = name.startswith("__") and name.endswith("__")
        if is_special or (hasattr(torch.Tensor, name) and not hasattr(self.__class__, name)):
            # Utilities ask any part of an output for its dtype or its device.
            raise AttributeError(f"a cache has no attribute {name!r}")
        return getattr(self._read(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._read(), name, value)

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Any:
        return iter(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        if self._compute is None:
            return repr(self._real)
        return "<keys and values of a training step, computed when they are read>"


class CacheRule:
    """Rule for the keys and values of one model's training steps.

    They are left out where the model's configuration alone asks for them. Once a loop has read
    them, they are outputs as any other.

    Parameters
    ----------
    context
        Context of the model's engines.

    Attributes
    ----------
    is_read
        True once the keys and values of a step were read.
    """

    def __init__(self, context: Context, *, is_read: bool = False) -> None:
        self.is_read = is_read
        self._context = context
        self._habits = _Habits(context.module)

    def applied(self, call: Call) -> Call:
        """Return the call without a cache in its output; the same one where that is kept."""
        if self.is_read or not self._leaves_out(call):
            return call
        return dataclasses.replace(call, kwargs={**call.kwargs, _ARGUMENT: False})

    def _leaves_out(self, call: Call) -> bool:
        module, names, habits = self._context.module, self._habits.names, self._habits
        if not any(map(_makes_cache, habits.makers)):
            return False
        loss_fn = self._context.loss_of(call)
        if loss_fn is not None and not getattr(loss_fn, "returns_output", False):
            # The cache is no output then, and the loss may read it.
            return False
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        if any(given.get(name) is not None for name in (_ARGUMENT, *_FIELDS, *habits.labels)):
            return False
        is_output = getattr(getattr(module, "config", None), "return_dict", True)
        as_tuple = given.get("return_dict") is False or not is_output
        return not as_tuple and _ARGUMENT not in names[: len(call.args)]

    def begin(self, call: Call) -> _Forward:
        """Return a record of the state in which a call's forward begins."""
        return _Forward(self._context, call)

    def completed(self, output: Any, forward: _Forward) -> Any:
        """Return an output with an `UnreadCache` in the place of the one that was left out."""
        name = cache_field(output)
        if name is None or getattr(output, name) is not None:
            return output

        def compute() -> Any:
            cancel_running()
            cache = getattr(forward.output_again(), name)
            self.is_read = True
            size = allocator.storage_bytes(output_tensors(cache))
            self._context.warn(
                "cache",
                f"the cache of a training step was read: {exact_bytes(size)} of keys and "
                f"values, which the step had left out{_of_limit(self._context)}, were computed by "
                "a second forward, beside the limit. The following steps keep them to their end. "
                "Call the model with use_cache=True to keep them from the first step on",
            )
            return cache

        made: Any = type(output)
        values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        return made(**values | {name: UnreadCache(compute)})


class _Forward:
    """State of a model, of its arguments, and of random generators when a forward begins."""

    def __init__(self, context: Context, call: Call) -> None:
        self._module, self._call = context.module, call
        # A callback has its own forward in the place of this one, but while a step runs.
        self._forward = context.module.forward
        self._device = context.device_of(call)
        self._set_generators = RngTracker(self._device).kept()
        self._autocast = AutocastState(self._device.type)
        self._flags = [module.training for module in self._module.modules()]
        self._versions = self._current_versions()

    def _current_versions(self) -> list[tuple[int, int]]:
        tensors = [*self._module.parameters(), *tree_tensors(self._call.arguments)]
        return [(id(tensor), tensor._version) for tensor in tensors]

    def output_again(self) -> Any:
        """Return the output of the plain model, from the same state.

        Raises
        ------
        RuntimeError
            A parameter or an argument has changed.
        """
        if self._current_versions() != self._versions:
            raise RuntimeError(
                "the cache of a training step was read after the model's parameters or the "
                "batch had changed: the step had left them out, for nothing read them before. "
                "Call the model with use_cache=True to keep them"
            )
        module = self._module
        modules = list(module.modules())
        with ExitStack() as stack:
            # The caller's own arguments, to whose graph gradients flow.
            stack.enter_context(trial(module, (), self._device))
            stack.enter_context(self._autocast)
            stack.enter_context(torch.enable_grad())
            for part, training in zip(modules, self._flags, strict=True):
                part.training = training
            self._set_generators()
            return self._forward(*self._call.args, **self._call.kwargs)


def _of_limit(context: Context) -> str:
    limit = context.settings.present_limit
    return "" if limit is None else f" of its limit of {exact_bytes(limit)}"


class _Habits:
    """Rules of a model's code on the cache in the output of its training steps.

    Attributes
    ----------
    names
        Names of the forward's arguments; none unless it can leave out a cache that it returns.
    makers
        Parts whose configurations may ask for a cache where a call does not: the innermost ones
        that take the argument. That of a model of several models has no say, nor has one that
        its decoder has a copy of.
    labels
        Names of arguments with which the forward leaves the cache out by itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: list[str] = []
        self.makers: list[nn.Module] = []
        self.labels: tuple[str, ...] = ()
        base: Any = module
        if hasattr(base, "get_base_model"):
            if getattr(getattr(base, "active_peft_config", None), "is_prompt_learning", True):
                return
            base = base.get_base_model()
        code = inspect.unwrap(type(base).forward)
        signature = inspect.signature(code)
        if not (
            (code.__module__ or "").startswith("transformers.")
            and _returns_cache(code, signature.return_annotation)
            and _takes(signature, with_others=True)
        ):
            return
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        self.makers = _makers(base)
        if any(each.opname.startswith("STORE") for each in _uses(code, _ARGUMENT)):
            self.labels = _LABELS


def _returns_cache(code: Any, annotation: Any) -> bool:
    if isinstance(annotation, str):
        kinds = [code.__globals__.get(name.strip()) for name in annotation.split("|")]
    else:
        kinds = [annotation, *get_args(annotation)]
    return any(_cache_field_of(kind) is not None for kind in kinds)


def _takes(signature: inspect.Signature, *, with_others: bool = False) -> bool:
    """Return whether a forward takes the argument, by name or among others."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    is_any = with_others and inspect.Parameter.VAR_KEYWORD in kinds
    return is_any or _ARGUMENT in signature.parameters


def _makers(base: nn.Module) -> list[nn.Module]:
    takers = {
        module
        for module in base.modules()
        if hasattr(module, "config")
        and _takes(inspect.signature(inspect.unwrap(type(module).forward)))
    }
    inner = [module for module in takers if takers.isdisjoint({*module.modules()} - {module})]
    return [module for module in inner if _decodes(module.config) and not _asks_mode(module)]


def _makes_cache(module: nn.Module) -> bool:
    asks = getattr(module.config, _ARGUMENT, False) is True
    return asks and not getattr(module, "gradient_checkpointing", False)


def _decodes(config: Any) -> bool:
    return getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", True)


def _asks_mode(module: nn.Module) -> bool:
    """Return whether a forward makes no cache in training, checkpointed or not."""
    code = inspect.unwrap(type(module).forward)
    training, cache, checkpointing = (
        _lines(code, name) for name in ("training", _ARGUMENT, "gradient_checkpointing")
    )
    return bool((training & cache) - checkpointing)


def _uses(function: Any, name: str) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(function) if each.argval == name]


def _lines(function: Any, name: str) -> set[int | None]:
    """Return the numbers of the lines of a function that use a name."""
    return {each.positions.lineno for each in _uses(function, name) if each.positions}
