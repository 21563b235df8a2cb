"""Need of a plain step, found by a run on tensors without values, which take no memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, dispatch
from rotor.common.tensor_trees import output_tensors, replaced, result_tensors, tree_tensors
from rotor.common.undisturbed import trial

logger = logging.getLogger("rotor")

__all__ = ["plain_need"]


class _Count(dispatch.DispatchMode):
    """Count of the bytes of all tensors that operators make.

    Parameters
    ----------
    known
        Tensors that exist before.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = set(map(core.storage_identity, known))
        self._alive: dict[int, tuple[Any, int]] = {}
        self._current = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_tensors((args, kwargs or {}))
        if dispatch.schema_of(func).is_mutable and any(map(_has_values, given)):
            raise ValueError(f"{func} may write to a tensor that has values")
        result = func(*args, **(kwargs or {}))
        for tensor in result_tensors(result):
            key = core.storage_identity(tensor)
            if key not in self._known and key not in self._alive:
                size = tensor.untyped_storage().nbytes()
                self._alive[key] = (core.storage_reference(tensor), size)
                self._current += size
        if self._current > self.peak_bytes:
            self._forget_freed()
            self.peak_bytes = max(self.peak_bytes, self._current)
        return result

    def _forget_freed(self) -> None:
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            self._current -= self._alive.pop(key)[1]


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().device.type != "meta"


def plain_need(
    module: nn.Module, call: Callable[..., Any], value: Any, device: torch.device
) -> int | None:
    """Return the bytes of a plain step, gradients included; ``None`` where values decide.

    Parameters
    ----------
    module
        The model.
    call, value
        Function that runs it, and its arguments.
    device
        Device of the step.
    """
    mode = core.fake_mode()
    mode.allow_non_fake_inputs = True
    try:
        with trial(module, value, device, is_guarded=False) as made, torch.enable_grad():
            known = [mode.from_tensor(parameter) for parameter in module.parameters()]
            for where, name in [s for part in module.modules() for s in core.buffer_slots(part)]:
                where[name] = mode.from_tensor(where[name])
                known.append(where[name])
            given = {id(t): mode.from_tensor(t) for t in tree_tensors(made.arguments)}
            count = _Count([*known, *given.values()])
            with mode, count:
                outputs = output_tensors(call(*replaced(made.arguments, given)))
                outputs = [tensor for tensor in outputs if tensor.requires_grad]
                leaves = [p for p in module.parameters() if p.requires_grad]
                ones = [torch.ones_like(tensor) for tensor in outputs]
                torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
            return count.peak_bytes
    except Exception as error:
        logger.info("the need of a plain step is unknown: %s", error)
        return None
