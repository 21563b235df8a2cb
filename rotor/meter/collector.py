"""Pauses of Python's collector of cycles, whose frees would be taken for those of metered code."""

from __future__ import annotations

import gc
import threading

__all__ = ["CollectorPause"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


class CollectorPause:
    """Pause of the collector from `begin` to `end`; pauses may overlap, in any threads."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether it has begun and not ended."""

    def begin(self) -> None:
        """Keep the collector from running by itself."""
        global _pauses, _was_enabled
        with _lock:
            if not _pauses:
                _was_enabled = gc.isenabled()
                gc.disable()
            _pauses += 1
            self.is_on = True

    def end(self) -> None:
        """Let the collector run again, as it did before the first pause; do nothing twice."""
        global _pauses
        with _lock:
            if not self.is_on:
                return
            self.is_on = False
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
