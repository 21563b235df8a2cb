"""Settings of dynamo while it captures code that logs, prints or marks its inputs."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rotor._pytorch.draws import Draws

__all__ = ["capturing", "capturing_again"]


@contextmanager
def capturing(asked: Callable[[], object] | None, draws: Draws) -> Iterator[None]:
    """Let captured code log in the context: its loggers are silent, ``print`` is delayed.

    ``requires_grad_`` of inputs within a forward is ignored: gradients of parameters do not
    depend on it. Garbage is left to the caller.

    Parameters
    ----------
    asked
        Function called where the code asks whether it is compiled, and is told that it is not;
        ``None``: it is told that it is.
    draws
        Random numbers that the captured code draws.
    """
    from torch._dynamo import config, convert_frame

    names = [name for name in dir(logging.Logger) if not name.startswith("_")]
    ignored = {f for f in (getattr(logging.Logger, name) for name in names) if callable(f)}
    # Without decompositions, that round otherwise, of add_(alpha=), addcmul_ and addcdiv_.
    # A hook that is registered or removed later makes another graph.
    wanted = {
        "run_gc_after_compile": False,
        "enable_dynamo_decompositions": False,
        "skip_nnmodule_hook_guards": False,
    }
    kept: Any = {name: value for name, value in wanted.items() if hasattr(config, name)}
    settings = config.patch(
        ignore_logging_functions=config.ignore_logging_functions | ignored,
        reorderable_logging_functions=config.reorderable_logging_functions | {print},
        **kept,
    )
    with (
        convert_frame.compile_lock,  # Code captured by another thread would see what is patched.
        settings,
        warnings.catch_warnings(),
        _requires_grad_set_in_forward(),
        nullcontext() if asked is None else _branches_of_plain_execution(asked),
        draws.drawn_anew(),
        _unordered_settings(),
        _layouts_of_outputs(),
    ):
        # Dynamo reads the gradients of all tensors, also of those that are no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


@contextmanager
def _branches_of_plain_execution(asks: Callable[[], object]) -> Iterator[None]:
    """Have ``torch.compiler.is_compiling()`` and the like be false but in PyTorch's own code."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables import torch as variables

    asked = {f for f, answer in variables.tracing_state_functions().items() if answer}
    owner: Any = variables.TorchInGraphFunctionVariable
    call = owner.call_function

    def answered(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        caller = str(tx.f_globals.get("__name__", ""))
        if self.value in asked and caller.partition(".")[0] != "torch":
            asks()
            return ConstantVariable.create(False)
        return call(self, tx, args, kwargs)

    owner.call_function = answered
    try:
        yield
    finally:
        owner.call_function = call


@contextmanager
def capturing_again(asked: Callable[[], object] | None, draws: Draws) -> Iterator[None]:
    """Enter `capturing` if a call in the context is captured; else it costs next to nothing."""
    from torch._dynamo.callback import callback_handler as handler

    entered, me = ExitStack(), threading.get_ident()

    def enter(_: object) -> None:
        # Captures of other threads are announced too.
        if threading.get_ident() == me:
            entered.enter_context(capturing(asked, draws))

    def leave(_: object) -> None:
        if threading.get_ident() == me:
            entered.close()

    begin, end = handler.register_start_callback(enter), handler.register_end_callback(leave)
    try:
        yield
    finally:
        handler.remove_start_callback(begin)
        handler.remove_end_callback(end)


@contextmanager
def _layouts_of_outputs() -> Iterator[None]:
    """Have gradients of outputs laid out as the outputs, as PyTorch 2.13 does by itself.

    So they are without a capture, for most losses. Outputs whose elements share memory have no
    gradients of their layout.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    if getattr(config, "guess_tangent_strides_as_outputs", True):
        yield
        return
    given = MemoryFormatMeta.__dict__["from_tensor"]

    def from_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_strided = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
        is_shared = is_strided and torch._debug_has_internal_overlap(tensor) == 1
        with config.patch(guess_tangent_strides_as_outputs=not is_shared):
            return given.__func__(tensor, *args, **kwargs)

    owner: Any = MemoryFormatMeta
    owner.from_tensor = staticmethod(from_tensor)
    try:
        yield
    finally:
        owner.from_tensor = given


@contextmanager
def _unordered_settings() -> Iterator[None]:
    """Have dynamo's metrics say nothing of settings that they cannot write.

    PyTorch 2.11 sorts the functions of ``ignore_logging_functions``, and logs an error.
    """
    from torch._dynamo import utils

    name = "_get_dynamo_config_for_logging"
    written = getattr(utils, name, None)
    if written is None:
        yield
        return

    def written_if_possible() -> Any:
        try:
            return written()
        except TypeError:
            return None

    setattr(utils, name, written_if_possible)
    try:
        yield
    finally:
        setattr(utils, name, written)


@contextmanager
def _requires_grad_set_in_forward() -> Iterator[None]:
    from torch._dynamo.variables import builtin
    from torch._dynamo.variables.tensor import TensorVariable

    # The class and the name of its method differ between versions.
    owner = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
    name = "_call_setattr" if hasattr(owner, "_call_setattr") else "call_setattr"
    set_attribute = getattr(owner, name)
    require = TensorVariable.method_requires_grad_

    def quiet_set_attribute(self: Any, tx: Any, obj: Any, attribute: Any, value: Any) -> Any:
        if (
            isinstance(obj, TensorVariable)
            and attribute.is_python_constant()
            and attribute.as_python_constant() == "requires_grad"
            and value.is_python_constant()
            and value.as_python_constant() is True
        ):
            return value
        return set_attribute(self, tx, obj, attribute, value)

    def quiet_require(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        asked = requires_grad if isinstance(requires_grad, bool) else requires_grad.value
        return self if asked else require(self, tx, requires_grad)

    try:
        setattr(owner, name, quiet_set_attribute)
        TensorVariable.method_requires_grad_ = quiet_require  # type: ignore[method-assign]
        yield
    finally:
        setattr(owner, name, set_attribute)
        TensorVariable.method_requires_grad_ = require  # type: ignore[method-assign]
