"""Private names of PyTorch for what holds in all of a process: modes, and hooks of all modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core

__all__ = ["GLOBAL_HOOKS", "global_hooks", "in_autocast", "kernel_choices"]

_CHOICES = ("math_sdp", "flash_sdp", "mem_efficient_sdp", "cudnn_sdp", "cudnn", "mkldnn")
core.check(f"_C._get_{name}_enabled" for name in _CHOICES)
_ASKED = [getattr(torch._C, f"_get_{name}_enabled") for name in _CHOICES]
GLOBAL_HOOKS = [
    getattr(nn.modules.module, f"_global_{name}")
    for name in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
]

in_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def kernel_choices() -> tuple[bool, ...]:
    """Return which implementations PyTorch may choose for attention, convolutions and the like."""
    return tuple([ask() for ask in _ASKED])


def global_hooks() -> list[Any]:
    """Return the hooks that run in calls of every module."""
    return [list(held.values()) for held in GLOBAL_HOOKS] if any(GLOBAL_HOOKS) else []
