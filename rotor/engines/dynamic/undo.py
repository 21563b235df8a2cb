"""State of a model before a forward under a session of `rotor.dtr`."""

from __future__ import annotations

import torch
from torch import nn

from rotor._pytorch import core, dispatch


class Undo:
    """Saved values of tensors that a forward writes to."""

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self._device = device
        self._modules = modules
        self._slots = [
            (where, name, where[name], where[name].shape)
            for m in modules
            for where, name in core.buffer_slots(m)
        ]
        self._keys: set[int] | None = None
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._is_open = True
        self.inputs: list[torch.Tensor] = []
        self.random_state = core.get_generator_state(device)

    def save(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Keep a copy of a storage of the model or its inputs; return the new copy."""
        if not self._is_open:
            return None
        if self._keys is None:
            parameters = [
                where[name] for m in self._modules for where, name in core.parameter_slots(m)
            ]
            tensors = [*parameters, *(b for _, _, b, _ in self._slots), *self.inputs]
            self._keys = {
                dispatch.storage_key(t.untyped_storage())
                for t in tensors
                if t.layout is torch.strided
            }
        key = dispatch.storage_key(storage)
        if key not in self._keys or key in self._saved:
            return None
        copied: torch.UntypedStorage = storage.clone()
        self._saved[key] = (storage, copied)
        return copied

    def run(self) -> None:
        """Restore everything."""
        for storage, saved in self._saved.values():
            storage.resize_(saved.nbytes())
            storage.copy_(saved)
        for where, name, buffer, shape in self._slots:
            where[name] = buffer
            if buffer.shape != shape:
                buffer.resize_(shape)
        core.set_generator_state(self._device, self.random_state)

    def clear(self) -> None:
        """Drop all copies."""
        self._is_open = False
        self._saved = {}
        self._slots = []
        self.inputs = []
        self.random_state = torch.empty(0)
