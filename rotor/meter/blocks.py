"""Live blocks of the CPU's memory, from the events that its allocator reports."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from rotor._pytorch.profiler import Allocation

__all__ = ["Blocks"]


class Blocks:
    """Live blocks of memory by address, and their total bytes.

    A block freed on an unprofiled thread counts as freed once a new block overlaps it. Where totals
    are known, it counts as freed as soon as the total has fallen by more than unprofiled threads
    had allocated, although the block itself remains unknown.

    Parameters
    ----------
    resident
        Addresses of blocks from before the start whose release is reported separately.
    """

    def __init__(self, resident: Collection[int] = ()) -> None:
        self._resident = resident
        self._sizes: dict[int, int] = {}
        self._addresses: list[int] = []
        self._bytes = 0
        self._total = -1
        self._elsewhere = 0

    def add(self, event: Allocation) -> int:
        """Record an allocation or a release; return the total bytes of the live blocks."""
        if event.total_bytes >= 0:
            if self._total >= 0:
                self._elsewhere += event.total_bytes - self._total - event.nbytes
            self._total = event.total_bytes
        if event.nbytes > 0:
            self._begin(event.address, event.nbytes)
        else:
            self._end(event.address, -event.nbytes)
        return self._bytes + min(self._elsewhere, 0)

    def _begin(self, address: int, nbytes: int) -> None:
        place = bisect_left(self._addresses, address)
        if place and self._end_of(place - 1) > address:
            place -= 1
        last = bisect_left(self._addresses, address + nbytes, place)
        gone = sum(self._sizes.pop(other) for other in self._addresses[place:last])
        self._addresses[place:last] = [address]
        self._sizes[address] = nbytes
        self._bytes += nbytes - gone
        if self._total >= 0:
            self._elsewhere += gone

    def _end(self, address: int, nbytes: int) -> None:
        size = self._sizes.pop(address, None)
        if size is not None:
            del self._addresses[bisect_left(self._addresses, address)]
            self._bytes -= size
        elif address not in self._resident and nbytes <= self._elsewhere:
            # Allocated by another thread. Otherwise it is from before the start, and its size as
            # reported by PyTorch may be wrong.
            self._elsewhere -= nbytes

    def _end_of(self, place: int) -> int:
        address = self._addresses[place]
        return address + self._sizes[address]
