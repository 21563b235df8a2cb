"""Private names of PyTorch for what a capture has among its nodes, and leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rotor._pytorch.casts import autocast_dtypes, cast_once
from rotor._pytorch.looped import keep_whole

__all__ = ["LINALG_CHECK", "as_eager", "forget_compiled", "is_effect", "is_token"]

LINALG_CHECK = torch.ops.aten._linalg_check_errors.default
"""Operator that raises the errors of others, which are among their results."""


def as_eager(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler of dynamo's graphs that has them compute as eager PyTorch does."""

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        in_autocast = bool(autocast_dtypes())
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                if not in_autocast:
                    keep_whole(part)
                cast_once(part)
        return compiler(module, inputs)

    return compiled


def is_effect(node: Any) -> bool:
    """Return whether a node of a joint graph is an operation that takes a token first."""
    return node.target is torch._higher_order_ops.effects.with_effects


def is_token(node: Any, *, of_backward: bool = False) -> bool:
    """Return whether an input of a joint graph is a token of its forward, or of its backward."""
    from torch._functorch._aot_autograd import descriptors

    kinds = descriptors.ForwardTokenAOTInput, descriptors.BackwardTokenAOTInput
    return isinstance(node.meta.get("desc"), kinds[of_backward])


def forget_compiled(code: Any, backend: int, modes: list[Any]) -> None:
    """Drop what dynamo keeps of a function's compiled code, and of a backend, by its ``id``.

    It keeps the code that it made as long as the function's, and that as long as what it made.
    Fake tensors with gradients are in cycles, through their modes, that no collector sees.
    """
    from torch._dynamo import eval_frame

    for mode in modes:
        mode.shape_env.tracked_fakes = []

    eval_frame.remove_from_cache(code)
    known = eval_frame.cached_backends
    for key in [k for k, one in known.items() if id(getattr(one, "compiler_fn", one)) == backend]:
        del known[key]
