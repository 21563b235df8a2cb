"""Caches of keys and values, which training steps of Transformers' models leave out.

A causal model returns the keys and values of all its layers by default. As outputs they would be
kept to the end of the step, though hardly any training loop reads them.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import nn

from rotor.engines.contract import Call, Context
from rotor.units import exact_bytes

_ARGUMENT = "use_cache"
_GIVEN = ("cache", "past_key_values")
"""Names of a cache among the arguments, in Transformers from 5.24 on and before."""


class CacheRule:
    """Rule that training steps of one model run with ``use_cache=False``, where it takes that."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._names: list[str] = []
        self._parts: list[nn.Module] = []
        self._is_named = False
        # A model with low-rank parts has the forward of PEFT, and the arguments of its base.
        module: Any = context.module
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        prompts = getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False)
        if prompts or all(kind.__name__ != "PreTrainedModel" for kind in type(base).__mro__):
            return
        self._names = list(_parameters(module))[1:]
        kinds = {parameter.kind for parameter in _parameters(base).values()}
        self._is_named = _ARGUMENT in _parameters(base)
        if self._is_named or inspect.Parameter.VAR_KEYWORD in kinds:
            parts = [part for part in base.modules() if hasattr(part, "config")]
            self._parts = [part for part in parts if _ARGUMENT in _parameters(part)]

    def applied(self, call: Call) -> Call:
        """Return the call, without a cache in its output; warn once if the caller asked for one.

        A call with a cache in its arguments is left as it is.
        """
        if not self._parts:
            return call
        given = {**dict(zip(self._names, call.args, strict=False)), **call.kwargs}
        asked = given.get(_ARGUMENT)
        is_settled = asked is not None and not asked
        if is_settled or any(given.get(name) is not None for name in _GIVEN):
            return call
        if asked or any(map(_makes_cache, self._parts)):
            self._warn()
        elif not self._is_named:
            return call
        if _ARGUMENT in call.kwargs or _ARGUMENT not in self._names[: len(call.args)]:
            return dataclasses.replace(call, kwargs={**call.kwargs, _ARGUMENT: False})
        place = self._names.index(_ARGUMENT)
        return dataclasses.replace(call, args=(*call.args[:place], False, *call.args[place + 1 :]))

    def _warn(self) -> None:
        limit = self._context.settings.present_limit
        of_limit = "" if limit is None else f" of {exact_bytes(limit)}"
        self._context.warn(
            "cache",
            f"training steps under the limit{of_limit} run with use_cache=False: keys and values "
            "would be kept to the end of the step, and the cache in the output is None. Set "
            "model.config.use_cache = False; a loop that reads the cache trains without a limit",
        )


def _parameters(module: nn.Module) -> Any:
    return inspect.signature(inspect.unwrap(type(module).forward)).parameters


def _makes_cache(part: Any) -> bool:
    config = part.config
    decodes = getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", True)
    return decodes and getattr(config, _ARGUMENT, False) is True
