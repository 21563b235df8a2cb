"""Probing forwards: calls of modules with their arguments, and tensors that autograd would keep.

A probing forward runs with gradients enabled, but drops at once what autograd saves, so it
needs no more memory than a forward without gradients. It restores buffers, random states and the
modules' plain attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.substitutes import PatchedForwards
from rotor.common.tensor_trees import device_of, output_tensors, tree_tensors
from rotor.common.undisturbed import trial
from rotor.meter import allocator


class NeedsBackward(Exception):
    """Signal that the forward computes gradients itself, and needs the saved tensors."""


@dataclass(eq=False)
class ModuleCall:
    """Call of a module in a forward."""

    path: str
    module: nn.Module
    number: int
    """Number of earlier calls of the module in the same forward."""
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes by storage that autograd keeps from inside it."""
    plannable_bytes: int = 0


class Saves:
    """Observer of the tensors that autograd saves, which keeps none of them.

    The tensors of the model and its arguments exist before and after. `note` is called with the
    identity of each other storage and its bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Any,
        note: Callable[[int, int], object] = lambda *_: None,
    ) -> None:
        resident = [*model.parameters(), *model.buffers(), *tree_tensors(arguments)]
        self._references: dict[int, Any] = {}
        self._note = note
        self._resident = {core.storage_identity(part) for t in resident for part in _parts(t)}
        self._packing: Any = None

    def identities(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Return the bytes by storage of these tensors, except resident ones."""
        found = {}
        for tensor in (part for one in tensors for part in _parts(one)):
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
        """Return whether it sees tensors saved now: the model's own hooks may come before it."""
        return core.packs_with(self._packing)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe in the context."""
        self._packing = self._pack
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packing, self._unpack):
                yield
        finally:
            self._packing = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let autograd save as usual; only valid if `on_top` holds."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._packing, self._unpack)
        hooks.__exit__()
        try:
            yield
        finally:
            hooks.__enter__()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense parts of a tensor; none of tensors of functorch, and of other layouts."""
    if core.in_functorch() or tensor.layout != torch.strided:
        return ()
    return tuple(p for p in core.strided_parts(tensor) if type(p) in (torch.Tensor, nn.Parameter))


def inner_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules inside a model, with their paths."""
    return {
        module: path
        for path, module in model.named_modules()
        if module is not model and not isinstance(module, torch.jit.ScriptModule)
    }


def weigh(
    model: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[list[ModuleCall], ModuleCall, set[nn.Module]]:
    """Run a probing forward, and weigh the tensors that each call in it keeps.

    Returns the calls with gradients enabled, in the order of their starts; the whole forward as
    one; and every called module. Raises NeedsBackward if the forward computes gradients itself.
    """
    paths = inner_modules(model)
    whole = ModuleCall("", model, 0)
    stack, calls = [whole], list[ModuleCall]()
    counts: dict[nn.Module, int] = {}

    def note(identity: int, size: int) -> None:
        for call in stack:
            call.saved[identity] = size

    def watched(module: nn.Module, forward: Any) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            number = counts[module] = counts.get(module, -1) + 1
            if not torch.is_grad_enabled() or not saves.on_top():
                return forward(*given, **named)
            call = ModuleCall(paths[module], module, number)
            calls.append(call)
            stack.append(call)
            # Also after an exception, which the model may catch.
            try:
                output = forward(*given, **named)
            finally:
                while stack.pop() is not call:
                    pass
            outside = saves.identities([*tree_tensors((given, named)), *output_tensors(output)])
            inside = [size for key, size in call.saved.items() if key not in outside]
            call.plannable_bytes = sum(inside)
            return output

        return run

    device = device_of((args, kwargs), model)
    with trial(model, (args, kwargs), device) as made, PatchedForwards(paths, watched):
        saves = Saves(model, made.arguments, note)
        args, kwargs = made.arguments
        with saves.watching():
            model.forward(*args, **kwargs)
    return calls, whole, set(counts)
