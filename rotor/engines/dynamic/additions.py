"""Gradients of a nested backward that are added to existing ones as soon as they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from rotor._pytorch import core, dispatch

__all__ = ["Additions", "Arrivals"]


class Additions:
    """What a backward of its own adds to gradients that exist.

    Autograd would hand over all gradients at the end, so that a second copy of them was in memory.
    Those of leaves that get nothing else in the running backward, and that no hook waits for, are
    added where they lie.

    Parameters
    ----------
    leaves
        The tensors whose gradients are asked for.
    waits
        Whether gradients are kept until `finish`, or `add`.
    prepare
        Called with a gradient before it is kept.

    Attributes
    ----------
    added
        How many gradients were.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        *,
        waits: bool,
        prepare: Callable[[torch.Tensor], object],
    ) -> None:
        self._waits = waits
        self._prepare = prepare
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._taken: set[int] = set()
        self.added = 0
        found = [leaf for leaf in leaves if _exists(leaf)]
        edges = dispatch.edges_of_leaves(dispatch.current_node()) if found else None
        self._leaves = [leaf for leaf in found if edges is not None and edges.get(id(leaf)) == 1]

    @property
    def is_holding(self) -> bool:
        """Whether gradients wait to be added."""
        return bool(self._held)

    def __enter__(self) -> Self:
        for leaf in self._leaves:
            self._hooks.append(leaf.register_hook(self._taker(leaf)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _taker(self, leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def take(gradient: torch.Tensor) -> torch.Tensor:
            if not _fits(leaf, gradient):
                return gradient
            if self._waits:
                self._prepare(gradient)
                self._held.append((leaf, gradient.detach()))
            else:
                self._add(leaf, gradient)
            self._taken.add(id(leaf))
            return _nothing(gradient)

        return take

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        assert leaf.grad is not None
        with torch.no_grad():
            leaf.grad += gradient
        self.added += 1

    def add(self) -> None:
        """Add what waits, outside any mode."""
        while self._held:
            self._add(*self._held.pop(0))

    def drop(self) -> None:
        """Forget what waits."""
        self._held.clear()

    def finish(
        self, asked: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Add what waits; the gradients that are left for autograd."""
        self.add()
        return [
            None if id(leaf) in self._taken else gradient
            for leaf, gradient in zip(asked, gradients, strict=True)
        ]


class Arrivals:
    """Gradients that a backward is still to make, while it runs.

    Parameters
    ----------
    leaves
        The tensors whose gradients are asked for; existing ones take no more memory.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.grad is None]
        self._missing = {id(leaf): leaf.nbytes for leaf in self._leaves}
        self._hooks: list[Any] = []

    @property
    def missing_bytes(self) -> int:
        """Bytes of the gradients that have not been made."""
        return sum(self._missing.values())

    def __enter__(self) -> Self:
        for key, leaf in zip(self._missing, self._leaves, strict=True):
            self._hooks.append(leaf.register_hook(self._taker(key)))
        return self

    def _taker(self, key: int) -> Callable[[torch.Tensor], None]:
        missing = self._missing

        def take(_: torch.Tensor) -> None:
            missing.pop(key, None)

        return take

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._leaves.clear()


def _exists(leaf: torch.Tensor) -> bool:
    """Return whether a tensor has a gradient that another can simply be added to."""
    gradient = leaf.grad if leaf.is_leaf else None
    return (
        gradient is not None
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and not gradient.requires_grad
        and not core.hooks_of([leaf])
        and not core.has_accumulation_hooks(leaf)
    )


def _fits(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    existing = leaf.grad
    return (
        existing is not None
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and gradient.dtype == existing.dtype
        and gradient.device == existing.device
        and gradient.shape == existing.shape
    )


def _nothing(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor like a gradient in the place of its bytes, for autograd to carry."""
    number = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return number.expand(gradient.shape)
