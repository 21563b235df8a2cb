"""Modes of PyTorch under which a forward runs, set again for its recomputation in a backward."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from rotor._pytorch import dispatch
from rotor.common.generators import AutocastState

__all__ = ["Modes"]


def _present() -> tuple[Any, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        dispatch.default_device(),
        dispatch.saving_hooks(),
        dispatch.backend_flags(),
        dispatch.attention_kernels(),
    )


class Modes:
    """Modes at construction; a context around a recomputation that sets them again."""

    __slots__ = ("_autocast", "_modes", "_stack")

    def __init__(self, device_type: str) -> None:
        self._autocast = AutocastState(device_type)
        self._modes = _present()

    @property
    def is_autocast(self) -> bool:
        """True if autocast was on."""
        return self._autocast.enabled

    def are_current(self) -> bool:
        """Return whether the modes hold now."""
        return self._autocast.is_current() and bool(_present() == self._modes)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._autocast)
            inference, dtype, device, hooks, flags, kernels = self._modes
            present = _present()
            if present[0] != inference:
                grad = torch.is_grad_enabled()
                stack.enter_context(torch.inference_mode(inference))
                torch.set_grad_enabled(grad)
            if present[1] != dtype:
                stack.callback(torch.set_default_dtype, present[1])
                torch.set_default_dtype(dtype)
            if present[2] != device:
                stack.enter_context(torch.device(device or "cpu"))
            if present[3] != hooks and hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            if present[4] != flags:
                stack.callback(dispatch.write_flags, present[4])
                dispatch.write_flags(flags)
            if present[5] != kernels:
                stack.callback(dispatch.set_attention_kernels, present[5])
                dispatch.set_attention_kernels(kernels)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
