"""Persistent schedules: a checkpoint stays until the backward of its stage.

The best persistent schedule is found exactly if that is cheap, and on memory slots otherwise. The
recurrence is that of Beaumont et al. [1]_, section 4, with the memory conditions of
``csrc/rotor/chain.h``.

References
----------
.. [1] O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
   heterogeneous chains: how to train deep neural networks with limited memory", hal-02352969.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from rotor import _core
from rotor.algorithms.curve import Curve
from rotor.algorithms.no_checkpoint import NoCheckpoint
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import (
    BuiltInAlgorithm,
    ProgressCallback,
    checked_slots,
    curve_of,
    infeasible,
    priced,
    table_bound,
)
from rotor.chain import Chain

DEFAULT_SLOTS = 500
"""Default number of memory slots, used if the exact solver is too expensive."""

EXACT_TABLE_BYTES = 64 << 20
"""The default of `Persistent`'s `exact_table_bytes`."""

_EXACT_BYTES_PER_TRIPLE = 16
_FINER = (2, 4, 8)
_STEPS = 1000
_STRETCHES = 3
_CURVE_POINTS = 8


class Persistent(BuiltInAlgorithm):
    """The fastest persistent schedule within a budget.

    Parameters
    ----------
    mem_slots
        Number of memory slots that the budget is divided into: one dense table, in which every
        table, while that stays within `exact_table_bytes`; else 500 slots, solved a few times to
        use the bytes that rounding left.
    exact_table_bytes
        The largest table of the exact solver, which bounds its time as well (about a second by
        default). 0 disables it. The table is kept for the next budgets on an equal chain.
    max_table_bytes
        The most bytes that any other table may take; by default half of the available memory,
        and 4 GiB at most.

    Raises
    ------
    ValueError
        `mem_slots` is no whole number from 1 to 2^28.

    Notes
    -----
    Where slots are too coarse for a schedule that exists, more slots are tried, and then the
    schedule of least memory: InfeasibleError means that no persistent schedule exists, and its
    ``minimum_bytes`` is exact. MemoryError means that the table for `mem_slots` would be too large.

    For n stages and M slots: O(n^3 M / 6) time and 2 n^2 M bytes at most. The exact solver takes
    O(n^3 P) time, where P, the points of a frontier, is about n^2 / 4 at most on measured
    profiles.
    """

    name: ClassVar[str] = "persistent"

    def __init__(
        self,
        mem_slots: int | None = None,
        *,
        exact_table_bytes: int = EXACT_TABLE_BYTES,
        max_table_bytes: int | None = None,
    ) -> None:
        self.mem_slots = None if mem_slots is None else checked_slots(mem_slots)
        self.exact_table_bytes = exact_table_bytes
        self.max_table_bytes = max_table_bytes
        self._solved: tuple[tuple[Any, ...], _core.Table | None] | None = None

    def _best(
        self, chain: Chain, budget: int, mem_slots: int | None, progress: ProgressCallback | None
    ) -> Sequence:
        progress = _part(progress, 0, 1)
        slots = self.mem_slots if mem_slots is None else checked_slots(mem_slots)
        fastest = next(NoCheckpoint().candidates(chain))
        if fastest.peak_bytes <= budget:
            return fastest
        if slots is not None:
            return self._on_slots(chain, budget, slots, progress)
        table = self._exact(chain, progress)
        if table is None:
            return self._stretched(chain, budget, 2 * fastest.peak_bytes, progress)
        return priced(table.sequence(budget), chain)

    def curve(self, chain: Chain, *, progress: ProgressCallback | None = None) -> Curve:
        """Return time against memory, with every point of the frontier from the exact solver.

        On slots the curve has a handful of points, each a simulated schedule: the two ends, the
        least memory and no recomputation, are exact; in between `solve` may do a little better or
        worse with other slots.
        """
        progress = _part(progress, 0, 1)
        if self.mem_slots is None and (table := self._exact(chain, progress)) is not None:
            return curve_of(table.curve())
        fastest = next(NoCheckpoint().candidates(chain))
        minimum, _ = self._minimum(chain, 0)
        _, codes = self._minimum(chain, minimum)
        assert codes is not None
        sequences = [fastest, priced(codes, chain)]
        budgets = np.geomspace(max(1, minimum), max(1, fastest.peak_bytes), _CURVE_POINTS)
        slots = DEFAULT_SLOTS if self.mem_slots is None else self.mem_slots
        inner = sorted({int(budget) for budget in budgets[1:-1] if budget >= max(1, minimum)})
        for index, budget in enumerate(inner):
            part = _part(progress, index, len(inner))
            sequences.append(self._on_slots(chain, budget, slots, part))
        return Curve.from_points((s.peak_bytes, s.makespan) for s in sequences)

    def _exact(self, chain: Chain, progress: ProgressCallback | None) -> _core.Table | None:
        """Return the exact solver's table, cached from the last call, or None if too large."""
        key = _key(chain)
        if self._solved is not None and self._solved[0] == key:
            return self._solved[1]
        table = None
        if len(chain) ** 3 * _EXACT_BYTES_PER_TRIPLE <= self.exact_table_bytes:
            with suppress(MemoryError):
                table = _core.frontier(chain.core, self.exact_table_bytes, progress)
        self._solved = (key, table)
        return table

    def _on_slots(
        self, chain: Chain, budget: int, slots: int, progress: ProgressCallback | None
    ) -> Sequence:
        """Return the best schedule on so many slots, or on more if none is found on them."""
        codes = self._dense(chain, budget, slots, progress)
        if codes is None:
            minimum, least = self._minimum(chain, budget)
            if least is None:
                raise infeasible(type(self).__name__, budget, minimum)
            with suppress(MemoryError, ValueError):
                finer = (self._dense(chain, budget, k * slots, progress) for k in _FINER)
                codes = next((found for found in finer if found is not None), None)
            codes = codes or least
        return priced(codes, chain)

    def _stretched(
        self, chain: Chain, budget: int, most: int, progress: ProgressCallback | None
    ) -> Sequence:
        """Return the best on 500 slots of more bytes than the budget has, if the peak stays within.

        Sizes are rounded up to slots, so that a schedule seldom uses all of its budget; the more
        stages, the less. The budget that is divided into slots is increased by the unused bytes, to
        `most` bytes at most.
        """
        solves = 1 + _STRETCHES
        best = self._on_slots(chain, budget, DEFAULT_SLOTS, _part(progress, 0, solves))
        fits = budget
        too_much: int | None = None
        stretched = budget * budget // max(1, best.peak_bytes)
        for index in range(1, solves):
            stretched = min(stretched, most)
            if stretched <= fits:
                break
            part = _part(progress, index, solves)
            codes = self._dense(chain, stretched, DEFAULT_SLOTS, part)
            sequence = best if codes is None else priced(codes, chain)
            if sequence.peak_bytes <= budget:
                fits = stretched
                best = min(best, sequence, key=lambda s: s.makespan)
                further = stretched * budget // max(1, sequence.peak_bytes)
                stretched = further if too_much is None else (fits + too_much) // 2
            else:
                too_much = stretched
                stretched = (fits + too_much) // 2
        return best

    def _dense(
        self, chain: Chain, budget: int, slots: int, progress: ProgressCallback | None
    ) -> bytearray | None:
        if budget <= chain.x_bytes[0]:
            return None
        bound = table_bound(self.max_table_bytes)
        try:
            return _core.persistent(chain.core, budget, slots, bound, progress)
        except MemoryError:
            n = len(chain)
            most = (n + 1) * (n + 2) // 2 * (4 * (slots + 1) + 24)
            raise MemoryError(
                f"{slots} memory slots on a chain of {n} stages take a table of up to {most} "
                f"bytes, and {bound} bytes may be used: give fewer mem_slots"
            ) from None

    def _minimum(self, chain: Chain, budget: int) -> tuple[int, bytearray | None]:
        bound = table_bound(self.max_table_bytes)
        return _core.persistent_minimum(chain.core, budget, bound, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_solved": None}

    def __repr__(self) -> str:
        return f"Persistent({'' if self.mem_slots is None else f'mem_slots={self.mem_slots}'})"


def _key(chain: Chain) -> tuple[Any, ...]:
    """Return a key of everything that a schedule depends on."""
    return tuple(
        tuple(value) if isinstance(value, list) else value
        for name, value in chain.to_dict().items()
        if name != "names"
    )


def _part(progress: ProgressCallback | None, index: int, count: int) -> ProgressCallback | None:
    """Return the progress of the index-th of `count` computations; it never falls."""
    if progress is None:
        return None
    most = 0.0

    def report(done: int, total: int) -> object:
        nonlocal most
        most = max(most, done / total)
        return progress(round((index + most) * _STEPS), count * _STEPS)

    return report
