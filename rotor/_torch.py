"""Every private PyTorch name that rotor uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree


# -- modules, hooks, nested values

Slot = tuple[dict[str, Any], str]


def parameter_slots(module: nn.Module) -> list[Slot]:
    """Where the parameters of a module itself stand: (its dictionary, the name)."""
    slots = module._parameters
    return [(slots, name) for name, value in slots.items() if value is not None]


def buffer_slots(module: nn.Module) -> list[Slot]:
    """Where the buffers of a module itself stand: (its dictionary, the name)."""
    slots = module._buffers
    return [(slots, name) for name, value in slots.items() if value is not None]


def child_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children by name, one used twice standing twice (``named_children`` drops it)."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module keeps its children."""
    return module._modules


def has_hooks(module: nn.Module) -> bool:
    """Whether forward or backward hooks are registered on the module itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


@contextmanager
def _without_hooks(hooked: list[Any]) -> Iterator[None]:
    kept = [(hooks, list(hooks.items())) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in kept:
            hooks.update(items)


def hidden_hooks(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Keep the hooks on these tensors from running: the outer backward runs them once."""
    hooked = [hooks for tensor in tensors if (hooks := tensor._backward_hooks)]
    return _without_hooks(hooked) if hooked else _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists and dictionaries, and what puts them together again."""
    return _pytree.tree_flatten(value)


def tree_unflatten(leaves: Iterable[Any], spec: Any) -> Any:
    """The nested value with other leaves."""
    return _pytree.tree_unflatten(leaves, spec)
