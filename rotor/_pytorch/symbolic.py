"""Symbolic tracing by torch.fx: noticed, and joined as one node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from rotor._pytorch import core

core.check(["fx._symbolic_trace._is_fx_tracing_flag"])
_traces: Any = fx._symbolic_trace


def is_tracing() -> bool:
    """Return whether torch.fx runs a model on symbols, which no compiler reads."""
    return _traces._is_fx_tracing_flag and not torch.compiler.is_compiling()


def call_node(module: nn.Module, args: Any, kwargs: Any) -> fx.Proxy | None:
    """Return the result of a call at the place of a module as a symbol; ``None`` without one."""
    given = core.tree_flatten((args, kwargs))[0]
    tracer: Any = next((value.tracer for value in given if isinstance(value, fx.Proxy)), None)
    if tracer is None:
        return None
    proxy: fx.Proxy = tracer.create_proxy(
        "call_module", tracer.path_of_module(module), args, kwargs
    )
    return proxy
