"""Temporary replacement of the forward of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import nn

__all__ = ["PatchedForwards"]


class PatchedForwards:
    """Context, entered once, in which modules run a replacement of their forward.

    `make` returns the replacement for a module and its forward; no module may come twice.
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
        # The replacements would keep what refers to this context, such as a meter.
        self._new.clear()

    @contextmanager
    def paused(self, module: nn.Module | None = None) -> Iterator[None]:
        """Restore the forward of one of the modules, or of all, in the context."""
        patched = list(self._new.values()) if module is None else [self._new[id(module)]]
        for one, _, own in patched:
            _restore(one, own)
        try:
            yield
        finally:
            for one, replacement, _ in patched:
                one.__dict__["forward"] = replacement


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
