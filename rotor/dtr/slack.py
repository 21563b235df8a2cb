"""Bytes that an accelerator's allocator counts beside the storages of a session."""

from __future__ import annotations

import torch

from rotor._pytorch import devices

_SLACK_BYTES = 1 << 20
"""Most that a caching allocator keeps with a block above 1 MiB."""


class Slack:
    """Counter of what a device has allocated above the level on entry, and a session does not know.

    It is the slack of segments that the caching allocator keeps with large blocks, and what code
    outside the operators allocates. The device is an accelerator; reading waits for nothing.
    `nbytes` are the bytes beyond the session's storages when the counter was read last, 0 for
    fewer; `most_per_block` is the most that the allocator keeps with one block above 1 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._level, self._peak = devices.counters(device)
        self.nbytes = 0
        self.most_per_block = 0 if devices.expandable_segments() else _SLACK_BYTES

    def read(self, current: int) -> int:
        """Read the counter, where a session's storages are `current` bytes; return `nbytes`."""
        found = devices.allocated_bytes(self._device) - self._level
        self.nbytes = max(found - current, 0)
        return self.nbytes

    def peak_bytes(self) -> int | None:
        """Return the most that was allocated above the level on entry.

        ``None`` if the device's counter has not risen, since it was higher before the entry.
        """
        peak = devices.counters(self._device)[1]
        return None if peak == self._peak else peak - self._level
