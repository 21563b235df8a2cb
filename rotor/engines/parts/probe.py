"""Forwards that only look: which modules are called with what, and what autograd would keep.

A probing forward runs with gradients enabled, but what autograd saves is thrown away at once, so it
needs no more memory than a forward without gradients. It leaves buffers, random states and the
modules' plain attributes as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.forward_patch import Replaced
from rotor.common.tensor_trees import tensors_of, tensors_within
from rotor.common.undisturbed import model_kept
from rotor.meter import allocator

__all__ = ["Call", "NeedsBackward", "Saves", "weigh"]


class NeedsBackward(Exception):
    """The forward computes gradients itself, so what it saves cannot be thrown away."""


@dataclass(eq=False)
class Call:
    """One call of a module in a forward.

    Attributes
    ----------
    path, module
        Which module.
    number
        How many calls of it came before in the same forward.
    outer
        The call that it is part of.
    saved
        Bytes by storage, of what autograd keeps from inside it.
    """

    path: str
    module: nn.Module
    number: int
    outer: Call | None
    saved: dict[int, int] = field(default_factory=dict)
    plannable_bytes: int = 0


class Saves:
    """Watches what autograd saves, and keeps none of it.

    Parameters
    ----------
    resident
        Tensors that are there before and after.
    note
        Called with the storage's identity and its bytes.
    """

    def __init__(self, resident: Iterable[torch.Tensor], note: Callable[[int, int], None]) -> None:
        self._references: dict[int, Any] = {}
        self._note = note
        self._resident = {core.storage_identity(t) for t in resident if _is_plain(t)}
        self._packing = self._pack

    def identities(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Bytes by storage of those tensors that are not resident."""
        found = {}
        for tensor in tensors:
            if not _is_plain(tensor):
                continue
            identity = core.storage_identity(tensor)
            if identity not in self._resident:
                if identity not in self._references:
                    self._references[identity] = core.storage_reference(tensor)
                found[identity] = allocator.rounded_bytes(
                    tensor.untyped_storage().nbytes(), tensor.device
                )
        return found

    def _pack(self, tensor: torch.Tensor) -> None:
        for identity, size in self.identities([tensor]).items():
            self._note(identity, size)

    @staticmethod
    def _unpack(_: None) -> torch.Tensor:
        raise NeedsBackward

    def on_top(self) -> bool:
        """Whether it sees what is saved now: the model's own hooks may stand before it."""
        return core.packs_with(self._packing)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while it lasts."""
        with torch.autograd.graph.saved_tensors_hooks(self._packing, self._unpack):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let autograd save as usual; only where `on_top` holds."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._packing, self._unpack)
        hooks.__exit__()
        try:
            yield
        finally:
            hooks.__enter__()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own; those of functorch have none that is seen."""
    if core.in_functorch():
        return False
    return tensor.layout == torch.strided and type(tensor) in (torch.Tensor, nn.Parameter)


def inner_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The modules inside a model, with their paths."""
    return {
        module: path
        for path, module in model.named_modules()
        if module is not model and not isinstance(module, torch.jit.ScriptModule)
    }


def weigh(
    model: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[list[Call], Call, set[nn.Module]]:
    """Run a probing forward and see what each call in it keeps.

    Returns
    -------
    list of Call, Call, set of Module
        The calls with gradients enabled, in the order in which they began; the whole forward as
        one; and every module that was called.

    Raises
    ------
    NeedsBackward
        The forward computes gradients itself.
    """
    paths = inner_modules(model)
    whole = Call("", model, 0, None)
    stack, calls = [whole], []
    counts: dict[nn.Module, int] = {}

    def note(identity: int, size: int) -> None:
        for call in stack:
            call.saved[identity] = size

    saves = Saves([*model.parameters(), *model.buffers(), *tensors_of((args, kwargs))], note)

    def watched(module: nn.Module, forward: Any) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            number = counts[module] = counts.get(module, -1) + 1
            if not torch.is_grad_enabled() or not saves.on_top():
                return forward(*given, **named)
            call = Call(paths[module], module, number, stack[-1])
            calls.append(call)
            stack.append(call)
            # Also after an exception, which the model may catch.
            try:
                output = forward(*given, **named)
            finally:
                while stack.pop() is not call:
                    pass
            outside = saves.identities([*tensors_of((given, named)), *tensors_within(output)])
            inside = [size for key, size in call.saved.items() if key not in outside]
            call.plannable_bytes = sum(inside)
            return output

        return run

    device = tensors_of((args, kwargs))[0].device
    with model_kept(model, device), Replaced(paths, watched), saves.watching():
        model.forward(*args, **kwargs)
    return calls, whole, set(counts)
