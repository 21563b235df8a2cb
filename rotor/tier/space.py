"""Space of a file or slab, from which areas are taken."""

from __future__ import annotations

import threading
from collections import deque


class Space:
    """Range of bytes in which areas are taken and given back.

    An area may be given back at any moment, by a garbage collection too: it is free at the next
    request. `end` is the end of the last area that was ever taken.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> tuple[int, int]:
        """Return begin and end of a free range: the first one that fits, or a new one."""
        with self._lock:
            self._collect()
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= nbytes:
                    self._free[index : index + 1] = (
                        [(begin + nbytes, end)] if end - begin > nbytes else []
                    )
                    return begin, begin + nbytes
            begin = self.end
            if self._free and self._free[-1][1] == begin:
                begin = self._free.pop()[0]
            self.end = begin + nbytes
            return begin, self.end

    def give_back(self, area: tuple[int, int]) -> None:
        """Free a range."""
        self._returned.append(area)

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(self._free):
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            elif end > begin:
                joined.append((begin, end))
        self._free = joined
