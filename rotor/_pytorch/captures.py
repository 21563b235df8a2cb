"""Private names of PyTorch for what a capture has among its nodes, and leaves behind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core
from rotor._pytorch.asked_gradients import check_outputs
from rotor._pytorch.casts import autocast_dtypes, cast_once
from rotor._pytorch.drawn_numbers import check_numbers
from rotor._pytorch.looped import keep_whole

__all__ = [
    "LINALG_CHECK",
    "as_eager",
    "check",
    "checks_kept",
    "for_emitted",
    "forget_compiled",
    "is_effect",
    "is_token",
    "memory_format_of",
]

_REQUIRED = (
    "_dynamo.callback.callback_handler.register_end_callback",
    "_dynamo.callback.callback_handler.register_start_callback",
    "_dynamo.config.reorderable_logging_functions",
    "_dynamo.convert_frame.compile_lock",
    "_dynamo.eval_frame.cached_backends",
    "_dynamo.eval_frame.remove_from_cache",
    "_C._ForceDispatchKeyGuard",
    "_C._create_function_from_graph",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_dynamo.guards.GuardBuilder.ID_MATCH",
    "_dynamo.guards.install_guard",
    "_dynamo.source.RandomValueSource",
    "_dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table",
    "_dynamo.utils.numpy_method_wrapper",
    "_dynamo.utils.numpy_operator_wrapper",
    "_dynamo.utils.numpy_to_tensor_wrapper",
    "_dynamo.variables.ConstantVariable.create",
    "_dynamo.variables.SkipFunctionVariable.call_function",
    "_dynamo.variables.TensorVariable.as_proxy",
    "_dynamo.variables.builder.VariableBuilder._type_dispatch",
    "_dynamo.variables.builder.VariableBuilder._wrap",
    "_dynamo.variables.builtin.BuiltinVariable",
    "_dynamo.variables.tensor.TensorVariable.call_method",
    "_dynamo.variables.misc.DebuggingVariable.call_function",
    "_dynamo.variables.misc.LoggingLoggerVariable.call_method",
    "_dynamo.variables.torch.TorchInGraphFunctionVariable.call_function",
    "_dynamo.variables.torch.tracing_state_functions",
    "_functorch._aot_autograd.descriptors.BackwardTokenAOTInput",
    "_functorch._aot_autograd.descriptors.ForwardTokenAOTInput",
    "_functorch.config.backward_pass_autocast",
    "_guards.TracingContext.try_get",
    "_guards.detect_fake_mode",
    "_higher_order_ops.effects._EffectType.ORDERED",
    "_higher_order_ops.effects._get_effect",
    "_higher_order_ops.effects._register_effectful_op",
    "_higher_order_ops.effects.with_effects",
    "_prims_common.suggest_memory_format",
)

LINALG_CHECK = torch.ops.aten._linalg_check_errors.default
"""Operator that raises the errors of others, which are among their results."""


def check() -> None:
    """Raise ImportError if a private name that every capture needs is missing."""
    importlib.import_module("torch._dynamo.convert_frame")
    core.check(_REQUIRED)


def as_eager(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler of dynamo's graphs that has them compute as eager PyTorch does."""

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        check_outputs(module.graph)
        check_numbers(module.graph)
        in_autocast = bool(autocast_dtypes())
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                if not in_autocast:
                    keep_whole(part)
                cast_once(part)
        return compiler(module, inputs)

    return compiled


class _AnyExtents:
    """Sizes or strides that equal all others."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def for_emitted(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler of forwards whose backwards take modes and gradients as they come.

    PyTorch refuses a backward where the deterministic mode was switched on after the forward, and
    copies gradients of outputs into the layout of the outputs. Without a capture they have the
    layout that the loss gives them, and sums over them are rounded by it.
    """
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
    from torch._guards import TracingContext

    extents: Any = _AnyExtents()
    as_it_comes = MemoryFormatMeta(size=extents, stride=extents)

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.deterministic = None
            for given in context.fw_metadata.subclass_tangent_meta:
                if isinstance(given, PlainTensorMeta):
                    given.memory_format = as_it_comes
        return compiler(module, inputs)

    return compiled


@contextmanager
def checks_kept() -> Iterator[None]:
    """Have captures keep `LINALG_CHECK`, which returns nothing: PyTorch 2.11 would drop it."""
    from torch._higher_order_ops import effects

    kept = None
    if effects._get_effect(LINALG_CHECK) is None:
        kept = effects._register_effectful_op(LINALG_CHECK, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        if kept is not None:
            kept.destroy()


def is_effect(node: Any) -> bool:
    """Return whether a node of a joint graph is an operation that takes a token first."""
    return node.target is torch._higher_order_ops.effects.with_effects


def is_token(node: Any, *, of_backward: bool = False) -> bool:
    """Return whether an input of a joint graph is a token of its forward, or of its backward."""
    from torch._functorch._aot_autograd import descriptors

    kinds = descriptors.ForwardTokenAOTInput, descriptors.BackwardTokenAOTInput
    return isinstance(node.meta.get("desc"), kinds[of_backward])


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that PyTorch reads from a tensor's strides."""
    found: torch.memory_format = torch._prims_common.suggest_memory_format(tensor)
    return found


def forget_compiled(code: Any, backend: int, modes: list[Any]) -> None:
    """Drop what dynamo keeps of a function's compiled code, and of a backend, by its ``id``.

    Dynamo keeps a function's compiled code as long as the function's own code, and this as long as
    the compiled code. Fake tensors with gradients are in cycles, through their modes, that no
    collector sees.
    """
    from torch._dynamo import eval_frame

    for mode in modes:
        mode.shape_env.tracked_fakes = []

    eval_frame.remove_from_cache(code)
    known = eval_frame.cached_backends
    for key in [k for k, one in known.items() if id(getattr(one, "compiler_fn", one)) == backend]:
        del known[key]
