"""Order of the allocations and frees within an operation, by the events of an accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

from rotor._pytorch import profiler
from rotor.graph.blocks import RESULT

Orders = tuple[tuple[int, ...], ...]
"""Possible orders within an operation (`rotor.graph.blocks.Orders`); none where it is not known.

Events have no addresses: of several blocks of one size, the latest or the earliest may be the one
that is freed. Where both choices give the same order, it is listed once.
"""


class Recorded:
    """Events of a number of operations."""

    def __init__(self, trace: profiler.AllocationTrace) -> None:
        self._trace = trace
        self.events: list[list[int]] = []
        """By operation, the bytes of allocated blocks; negative for freed blocks."""

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Record the events of an operation."""
        self._trace.mark("begin")
        yield
        self._trace.mark("end")

    def orders(self, index: int, made: Sequence[int]) -> Orders:
        """Return the possible orders within an operation that makes storages of known sizes."""
        found = [_order(self.events[index], made, latest=latest) for latest in (True, False)]
        if None in found:
            return ()
        return tuple(order for order in dict.fromkeys(found) if order is not None)


@contextmanager
def record(device: torch.device) -> Iterator[Recorded]:
    """Record operations; their events are known afterwards."""
    trace = profiler.AllocationTrace(device_type=device.type)
    trace.start()
    recorded = Recorded(trace)
    try:
        yield recorded
    finally:
        events = trace.stop()
    sizes = events.nbytes.tolist()
    for mark, following in pairwise(events.marks):
        if mark.name == "begin":
            recorded.events.append(sizes[mark.position : following.position])


def _order(events: Sequence[int], made: Sequence[int], *, latest: bool) -> tuple[int, ...] | None:
    """Return one order; ``None`` if a result is not among the allocated blocks that stay."""
    sizes: list[int] = []
    entries: list[int] = []
    live: list[int] = []
    for nbytes in events:
        if nbytes > 0:
            live.append(len(sizes))
            entries.append(len(sizes))
            sizes.append(nbytes)
            continue
        same = [k for k in live if sizes[k] == -nbytes]
        if same:  # Otherwise a block from before the operation is freed.
            freed = same[-1] if latest else same[0]
            live.remove(freed)
            entries.append(-1 - freed)
    results: dict[int, int] = {}
    for number, nbytes in enumerate(made):
        fitting = [k for k in live if sizes[k] >= nbytes and k not in results]
        if nbytes and not fitting:
            return None
        if nbytes:
            results[min(fitting, key=lambda k: (sizes[k], k))] = number
    gone = {k for k in live if k not in results}
    places = {k: p for p, k in enumerate(k for k in range(len(sizes)) if k not in gone)}
    return tuple(
        -1 - places[-1 - entry]
        if entry < 0
        else RESULT + results[entry]
        if entry in results
        else sizes[entry]
        for entry in entries
        if entry not in gone
    )
