"""Checkpointing by blocks, for models of which no graph can be captured.

Every block of the model runs under ``torch.utils.checkpoint``: what it keeps is its input. Random
numbers are those of the first forward, and buffers that a forward updates (running statistics) are
updated once. No limit is planned for: peaks are measured, and reported where they pass the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import nn
from torch.utils import checkpoint

from rotor import _torch

__all__ = ["Replaced", "checkpointed_blocks", "find_blocks"]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model: the members of its lists and sequences, else its children.

    Parameters
    ----------
    model
        Any module.

    Returns
    -------
    list of (str, Module)
        Disjoint modules by path, none inside another; those without children or parameters are
        left out.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module) -> bool:
        """Whether blocks were found inside."""
        children = _torch.child_modules(module)
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            members = [(f"{path}.{name}".lstrip("."), child) for name, child in children]
            chosen = [item for item in members if any(True for _ in item[1].parameters())]
            if len(chosen) > 1:
                found.extend(chosen)
                return True
        inside = [visit(f"{path}.{name}".lstrip("."), child) for name, child in children]
        return any(inside)

    if not visit("", model):
        found = [
            (name, child)
            for name, child in _torch.child_modules(model)
            if any(True for _ in child.parameters())
        ]
    unique: dict[int, tuple[str, nn.Module]] = {}
    for path, module in found:
        unique.setdefault(id(module), (path, module))
    return list(unique.values())


class _WithoutUpdates:
    """Buffers are, in the end, as they were. A block may be recomputed more than once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._kept = [
            (slots, name, slots[name], slots[name].detach().clone())
            for part in self._module.modules()
            for slots, name in _torch.buffer_slots(part)
        ]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for slots, name, buffer, value in self._kept:
                buffer.copy_(value)
                slots[name] = buffer
        self._kept = []


def _run(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint.checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _WithoutUpdates(module)),
        **kwargs,
    )


@contextmanager
def checkpointed_blocks(blocks: list[tuple[str, nn.Module]]) -> Iterator[None]:
    """While it lasts, a call of one of these modules is checkpointed.

    Parameters
    ----------
    blocks
        What `find_blocks` gives.
    """

    def checkpointed(module: nn.Module, forward: Any) -> Any:
        return lambda *args, **kwargs: _run(module, forward, args, kwargs)

    with Replaced([module for _, module in blocks], checkpointed):
        yield


class Replaced:
    """While it lasts, modules run something else as their forward.

    Parameters
    ----------
    modules
        Different modules.
    make
        Called with a module and its forward; gives what runs instead.
    """

    def __init__(
        self, modules: Iterable[nn.Module], make: Callable[[nn.Module, Any], Callable[..., Any]]
    ) -> None:
        self._own = [(m, m.__dict__.get("forward")) for m in modules]
        self._new = {id(m): (m, make(m, m.forward), own) for m, own in self._own}

    def __enter__(self) -> Self:
        for module, replacement, _ in self._new.values():
            module.__dict__["forward"] = replacement
        return self

    def __exit__(self, *_: object) -> None:
        for module, own in self._own:
            _restore(module, own)

    @contextmanager
    def paused(self, module: nn.Module | None = None) -> Iterator[None]:
        """While it lasts, one of the modules, or all, are as they were."""
        those = list(self._new.values()) if module is None else [self._new[id(module)]]
        for one, _, own in those:
            _restore(one, own)
        try:
            yield
        finally:
            for one, replacement, _ in those:
                one.__dict__["forward"] = replacement


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
