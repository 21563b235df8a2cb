"""Removal of a storage's bytes, and their return."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rotor import _core
from rotor._pytorch import pointers

StorageRef = _core.StorageRef


class Store(Protocol):
    """Second tier of memory, as a session uses it (`rotor.tier.TierStore`)."""

    limit_bytes: int | None
    """Most bytes in the tier; ``None`` for any."""
    traffic: Any
    """Figures of what was written and fetched (`rotor.tier.Traffic`)."""

    @property
    def waited_ns(self) -> int:
        """Time that was waited for the tier."""

    def link_on(self, device: torch.device) -> tuple[Any, ...]:
        """Return the link to a device's memory (`rotor.graph.Link.core`)."""

    def write(self, storage: torch.UntypedStorage) -> object:
        """Return a copy of a storage's bytes in the tier, once it is complete.

        Its place is free again when the copy is dropped.
        """

    def extra_bytes(self, nbytes: int) -> int:
        """Return the bytes that a fetch takes for a moment beside the fetched ones."""

    def fetch(self, copy: Any) -> torch.UntypedStorage:
        """Return a new storage with the bytes of a copy."""


class Swapping:
    """Method that exchanges pointers, without copies: PyTorch 2.13."""

    copies = False
    """True if giving bytes back takes a second copy of them for a moment."""
    views = True
    """True if view operators work on a storage without bytes."""

    def take(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Take the bytes of a storage, which stays the same object; leave a shell of the same size.

        They are free once the result is dropped.
        """
        shell = pointers.empty_shell(storage.device, storage.nbytes())
        pointers.swap_bytes(storage, shell)
        pointers.forbid_access(storage)
        return shell

    def give(self, storage: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """Give a storage the bytes of another one, which is not used any more."""
        pointers.swap_bytes(storage, source)


class Resizing:
    """Method that resizes to nothing and back, and copies: any PyTorch."""

    copies = True
    views = False

    def take(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Resize to nothing, unless NumPy has the address: then the bytes stay where they are."""
        if storage.resizable():
            storage.resize_(0)
            pointers.forbid_access(storage)
        return torch.UntypedStorage(0)

    def give(self, storage: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """Resize back and copy."""
        if storage.resizable():
            pointers.allow_access(storage)
            storage.resize_(source.nbytes())
        storage.copy_(source)


def bytes_of(swap: bool | None) -> Swapping | Resizing:
    """Return the method of eviction: swapping where PyTorch can, unless `swap` decides."""
    if swap is None:
        swap = pointers.has_storage_swap()
    if swap and not pointers.has_storage_swap():
        raise ValueError(
            f"PyTorch {torch.__version__} cannot swap the bytes of storages: leave storage_swap "
            "out, or pass False to resize and copy"
        )
    return Swapping() if swap else Resizing()
