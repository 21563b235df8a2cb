"""Bytes that a part of a step needs when it runs again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rotor._pytorch import backwards, devices
from rotor.common.accounting import NEW_MAXIMUM

__all__ = ["Needs"]


class Needs:
    """Largest number of bytes in use while a part of a step runs again, and is differentiated.

    `report` is called with the bytes, and with whether the plan keeps others beside them (``None``
    if these are all). `start_bytes` are the bytes in use before the step, if the part is all of it.
    """

    def __init__(self, device: torch.device, report: Callable[[int, bool | None], object]) -> None:
        self._device, self._report = device, report
        self._level = self._most = self._told = 0
        self._is_kept: bool | None = None
        self.start_bytes: int | None = None

    def begin(self) -> None:
        """Begin to count, at the start of the step or now."""
        level = devices.level(self._device)
        backwards.load_checks()
        self._level, self._most, self._told = devices.level(self._device), 0, 0
        if self.start_bytes is not None:
            self.start_bytes = self._level = self.start_bytes + self._level - level

    def note(self, more_bytes: int = 0) -> None:
        """Note the bytes in use where a part needs most, and more that follow."""
        needed = devices.level(self._device) - self._level + more_bytes
        self._most = max(needed, self._most)
        if 0 < self._told * NEW_MAXIMUM < needed:
            self.tell(self._is_kept)

    def tell(self, is_kept: bool | None) -> None:
        """Report the bytes; a larger need that is noted later is reported when it is noted."""
        self._told = self._most
        self._is_kept = is_kept if self.start_bytes is None else None
        self._report(self._most, self._is_kept)
