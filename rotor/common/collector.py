"""Pauses of Python's collector of cycles.

Memory that it frees would be taken for memory that metered code frees; and where many objects are
made that live on, as in a capture, it walks all objects again and again.
"""

from __future__ import annotations

import gc
import threading
from typing import Self

_lock = threading.Lock()
_pauses: set[CollectorPause] = set()
_was_enabled = False


class CollectorPause:
    """Pause of the collector from `begin` to `end`, or in a ``with`` block.

    Pauses may overlap, in any threads. Reference counts free memory as before. With `collects` the
    end collects what was made since the begin, unless another pause goes on: Python would soon do
    so, and walk all older objects too.
    """

    # Whether the program was once seen to freeze objects: it is not asked again, as their number is
    # found by a walk over all of them.
    finds_frozen = False

    def __init__(self, *, collects: bool = False) -> None:
        self._collects = collects
        self._sets_apart = False  # True while what was made before the begin is frozen.

    @property
    def is_on(self) -> bool:
        """True between `begin` and `end`."""
        return self in _pauses

    def begin(self) -> Self:
        """Keep the collector from running by itself; return this object."""
        global _was_enabled
        try:
            with _lock:
                if not _pauses:
                    _was_enabled = gc.isenabled()
                _pauses.add(self)
                gc.disable()
                if self._collects and _was_enabled and not self.finds_frozen:
                    CollectorPause.finds_frozen = gc.get_freeze_count() > 0
                    self._sets_apart = not self.finds_frozen
                if self._sets_apart:
                    gc.freeze()
            return self
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let the collector run again, as before the first pause; a second call does nothing."""
        if not self.is_on:
            return
        try:
            if self._collects and _was_enabled and len(_pauses) == 1:
                gc.collect(2 if self._sets_apart else 1)
        finally:
            with _lock:
                _pauses.discard(self)
                if self._sets_apart:
                    self._sets_apart = False
                    gc.unfreeze()
                if not _pauses and _was_enabled:
                    gc.enable()

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()
