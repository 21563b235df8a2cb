"""The running backward: what it was asked for, and how to leave its transforms."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rotor._pytorch import core

__all__ = ["in_split_backward", "is_asked_for", "is_batched", "outside_transforms", "version_kept"]

core.check(
    (
        "_C._functorch.is_batchedtensor",
        "_C._functorch.is_legacy_batchedtensor",
        "_C._vmapmode_decrement_nesting",
        "_C._vmapmode_increment_nesting",
        "_C._will_engine_execute_node",
        "autograd._unsafe_preserve_version_counter",
    )
)


def in_split_backward() -> bool:
    """Return whether a pipeline's schedule runs the half of a backward in some thread."""
    name = "torch.distributed.pipelining._backward"
    return name in sys.modules and any(
        frame.f_globals.get("__name__") == name
        for start in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(start)
    )


def is_asked_for(tensor: torch.Tensor) -> bool:
    """Return whether the running backward makes the gradient of a tensor, or passes through it."""
    try:
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # PyTorch does not answer for the leaves that torch.autograd.grad was asked for.
        return True


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for a batch, as under ``is_grads_batched=True``."""
    functorch: Any = torch._C._functorch
    return bool(functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor))


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Leave all ``torch.func`` transforms, and batches of gradients, in the context."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    batches = torch._C._vmapmode_increment_nesting()
    for _ in range(batches):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(batches - 1):
            torch._C._vmapmode_increment_nesting()


version_kept: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""Context in which writes to a tensor leave its version as it was."""
