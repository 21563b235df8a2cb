"""Pauses of Python's collector of cycles.

Its frees would be taken for those of metered code; and it walks all objects again and again where
many are made that live on, as in a capture.
"""

from __future__ import annotations

import gc
import threading
from typing import Self

__all__ = ["CollectorPause"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


class CollectorPause:
    """Pause of the collector from `begin` to `end`, or in a ``with`` block.

    Pauses may overlap, in any threads. Reference counts free memory as before.

    Parameters
    ----------
    collects
        True to collect at the end what was made since the begin, unless another pause goes on.
        Python would soon do so, and walk all older objects too.
    """

    def __init__(self, *, collects: bool = False) -> None:
        self._collects = collects
        self._sets_apart = False  # True while what was made before the begin is frozen.
        self.is_on = False
        """True between `begin` and `end`."""

    def begin(self) -> None:
        """Keep the collector from running by itself."""
        global _pauses, _was_enabled
        with _lock:
            if not _pauses:
                _was_enabled = gc.isenabled()
                gc.disable()
            _pauses += 1
            self.is_on = True
            if self._collects and _was_enabled and not gc.get_freeze_count():
                self._sets_apart = True
                gc.freeze()

    def end(self) -> None:
        """Let the collector run again, as it did before the first pause; do nothing twice."""
        global _pauses
        with _lock:
            if not self.is_on:
                return
            self.is_on = False
            _pauses -= 1
            is_last = not _pauses and _was_enabled
        if is_last and self._collects:
            gc.collect(2 if self._sets_apart else 1)
        if self._sets_apart:
            self._sets_apart = False
            gc.unfreeze()
        with _lock:
            if not _pauses and _was_enabled:
                gc.enable()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
