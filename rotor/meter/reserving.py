"""Level of the bytes that an accelerator's allocator has reserved, before a step and after it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from rotor._pytorch import devices
from rotor.units import exact_bytes

_NOISE_BYTES = 1 << 21
"""Change of the allocated bytes before a step that moves no level: a small segment."""

_latest: weakref.WeakValueDictionary[torch.device, Reserving] = weakref.WeakValueDictionary()
"""Plan that ran last, by device."""


class Reserving:
    """Reserved bytes of a plan's steps above the level without cached memory.

    The level is taken before the first step of the plan, and again when other tensors have come to
    live on the device, such as the state of an optimizer, or another plan ran in between: cached
    memory is given back then, so that what a step reserves depends on the step alone. The private
    pool of the plan, ``None`` without one, takes its segments from the device after that, before
    the step; there is one at a time on a device, of the plan that ran last.
    """

    def __init__(self) -> None:
        self.pool: devices.Pool | None = None
        self._level_bytes = 0
        self._allocated_bytes: int | None = None

    def begin(self, device: torch.device, blocks: Sequence[int] = ()) -> None:
        """Prepare a step: take the level, if that is due, and the segments of the pool.

        `blocks` are the sizes of the blocks that make the pool take its segments; the plan has no
        pool if there are none. Raises `torch.OutOfMemoryError` if the device has fewer bytes than
        the plan needs.
        """
        latest = _latest.get(device)
        if latest is not self:
            # Its segments do not suit this plan, and those of its pool cannot be used by others.
            if latest is not None:
                latest.pool = None
            self._allocated_bytes = None
            _latest[device] = self
        allocated = devices.allocated_bytes(device)
        known = self._allocated_bytes
        is_due = known is None or abs(allocated - known) > _NOISE_BYTES
        if is_due:
            self.pool = None
            devices.release_cached(device)
            self._allocated_bytes = allocated
            self._level_bytes = devices.reserved_bytes(device)
        if blocks and self.pool is None:
            self.pool = _pool(device, blocks)

    def grown_bytes(self, device: torch.device) -> int:
        """Return the reserved bytes above the level; 0 if a level was never taken."""
        if self._allocated_bytes is None:
            return 0
        return max(devices.reserved_bytes(device) - self._level_bytes, 0)


def _pool(device: torch.device, blocks: Sequence[int]) -> devices.Pool:
    try:
        return devices.Pool(device, blocks)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"the step was not begun: its plan takes {exact_bytes(sum(blocks))} from {device} "
            "beforehand, which has less: free what else is on the device, or give a lower "
            f"mem_limit ({error})"
        ) from error
