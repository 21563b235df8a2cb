"""Outermost training forwards of a program: calls of modules that no other module makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from rotor._pytorch import core

Handler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function of a module, the function that calls it, and the arguments; returns the output."""

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module within wrappers for several devices, or for `torch.compile`."""
    while True:
        inner = vars(module).get("_modules", {})
        if isinstance(module, _WRAPPERS):
            module = inner["module"]
        elif "_orig_mod" in inner:
            module = inner["_orig_mod"]
        else:
            return module


class OutermostCalls:
    """Context in which a handler makes the outermost calls of modules that train.

    A call counts if the module is in training mode, gradients are enabled, and one of its
    parameters needs one. Calls within the handler, and in other threads, are plain; if
    `in_any_thread`, the thread is the one that makes the first such call.
    """

    def __init__(self, handler: Handler, *, in_any_thread: bool = False) -> None:
        self._handler = handler
        self._in_any_thread = in_any_thread
        self._plain: Any = None
        self._thread: int | None = None
        self._is_busy = False

    def __enter__(self) -> Self:
        self._plain = plain = nn.Module.__call__
        self._thread = None if self._in_any_thread else threading.get_ident()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # In code that torch.compile reads, no call is outermost.
            is_inner = torch.compiler.is_compiling() or self._plain is None
            if is_inner or not self._is_outermost(module):
                return plain(module, *args, **kwargs)
            self._is_busy, self._thread = True, threading.get_ident()
            try:
                return self._handler(module, plain, args, kwargs)
            finally:
                self._is_busy = False

        nn.Module.__call__ = call  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Make calls plain from now on."""
        if self._plain is not None:
            nn.Module.__call__ = self._plain  # type: ignore[method-assign]
            self._plain = None

    def _is_outermost(self, module: nn.Module) -> bool:
        return (
            not self._is_busy
            and self._thread in (None, threading.get_ident())
            and module.training
            and torch.is_grad_enabled()
            and not core.in_backward()
            and any(parameter.requires_grad for parameter in module.parameters())
        )
