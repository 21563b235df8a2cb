"""Warnings about habits that cost memory or time under a limit, each once for a model."""

from __future__ import annotations

from typing import Any

import torch

from rotor._pytorch import devices
from rotor.common.tensor_trees import output_tensors
from rotor.engines.contract import Context
from rotor.meter import allocator
from rotor.units import exact_bytes
from rotor.wrapper.caches import cache_field

__all__ = [
    "refuse_graph_capture",
    "warn_of_cache",
    "warn_of_checkpointing",
    "warn_of_searches",
]

_SHARE = 0.05
"""Share of the limit from which a cache is worth a warning."""


def refuse_graph_capture() -> None:
    """Raise RuntimeError if an accelerator's graph is being captured."""
    if devices.is_capturing():
        raise RuntimeError(
            "a training step under a limit cannot be captured as an accelerator's graph (such as "
            "torch.cuda.graph): it restores random states and measures memory. Capture the plain "
            "model, chk.module, or train without a capture"
        )


def warn_of_cache(context: Context, limit_bytes: int, output: Any) -> None:
    """Warn if the output of a training step holds a cache of keys and values."""
    name = cache_field(output)
    cache = None if name is None else getattr(output, name)
    if cache is None or "cache" in context.warned:
        return
    size = allocator.storage_bytes(output_tensors(cache))
    if size < _SHARE * limit_bytes:
        return
    context.warn(
        "cache",
        f"the model returns a cache in training: {exact_bytes(size)} of the limit of "
        f"{exact_bytes(limit_bytes)} are kept for it to the end of the step. If nothing reads "
        "them, call the model with use_cache=False, or set model.config.use_cache = False",
    )


def warn_of_checkpointing(context: Context) -> None:
    """Warn if layers of the model recompute by themselves, as Hugging Face's can."""
    if any(getattr(module, "gradient_checkpointing", False) for module in context.module.modules()):
        context.warn(
            "checkpointing",
            "gradient checkpointing is on: layers that recompute by themselves leave less to "
            "choose, and the limit decides what is recomputed. Call "
            "model.gradient_checkpointing_disable(), or leave gradient_checkpointing=True out",
        )


def warn_of_searches(context: Context) -> None:
    """Warn if convolutions, which the model has, may take another algorithm when they run again."""
    has_some = any(hasattr(module, "transposed") for module in context.module.modules())
    if has_some and torch.backends.cudnn.benchmark:
        context.warn(
            "searches",
            "torch.backends.cudnn.benchmark is on: each thread searches the algorithms of "
            "convolutions for itself, so that a convolution that is computed again may give other "
            "bits than at first. Turn it off under a limit",
        )
