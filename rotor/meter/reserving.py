"""Level of the bytes that an accelerator's allocator has reserved, before a step and after it."""

from __future__ import annotations

import torch

from rotor._pytorch import devices

__all__ = ["Reserving"]

_NOISE_BYTES = 1 << 21
"""Change of the allocated bytes before a step that moves no level: a small segment."""


class Reserving:
    """Reserved bytes of a plan's steps above the level without cached memory.

    The level is taken before the first step of the plan, and again when other tensors have come to
    live on the device, such as the state of an optimizer: cached memory is given back then, so that
    what a step reserves depends on the step alone.
    """

    def __init__(self) -> None:
        self._level_bytes = 0
        self._allocated_bytes: int | None = None

    def begin(self, device: torch.device) -> None:
        """Prepare a step: take the level, if that is due."""
        allocated = devices.allocated_bytes(device)
        known = self._allocated_bytes
        if known is None or abs(allocated - known) > _NOISE_BYTES:
            devices.release_cached(device)
            self._allocated_bytes = allocated
            self._level_bytes = devices.reserved_bytes(device)

    def grown_bytes(self, device: torch.device) -> int:
        """Return the reserved bytes above the level; 0 if a level was never taken."""
        if self._allocated_bytes is None:
            return 0
        return max(devices.reserved_bytes(device) - self._level_bytes, 0)
