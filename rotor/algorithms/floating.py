"""Checkpoints that float: weakly persistent schedules, by dynamic programming on memory slots.

A persistent schedule keeps a checkpointed activation until the backward of its stage. Here it may
be dropped earlier: it serves some stages, and is recomputed later from a checkpoint further left.
The class is defined in ``csrc/rotor/floating.h`` and in the documentation.

References
----------
.. [1] O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal re-materialization
   strategies for heterogeneous chains: How to train deep neural networks with limited memory",
   hal-02352969.
"""

from __future__ import annotations

from typing import ClassVar

from rotor import _core
from rotor.algorithms.curve import Curve
from rotor.algorithms.no_checkpoint import NoCheckpoint
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import (
    BuiltInAlgorithm,
    ProgressCallback,
    checked_slots,
    curve_of,
    priced,
    table_bound,
)
from rotor.chain import Chain

DEFAULT_SLOTS = 500


class Floating(BuiltInAlgorithm):
    """The fastest schedule whose checkpoints may be dropped and recomputed.

    Parameters
    ----------
    mem_slots
        Slots that the budget is divided into; every size is rounded up to whole slots.
    max_table_bytes
        The most that the solver may allocate; beyond it MemoryError. By default half of the memory
        that is available, and 4 GiB at most.

    Raises
    ------
    ValueError
        `mem_slots` is no positive number.

    Notes
    -----
    O(n^4 M / 24) time and O(n^3 M / 6) memory for n stages and M slots. A schedule that fits is
    found in every budget in which the class has one, also where slots are too coarse: the least
    memory is computed in bytes.
    """

    name: ClassVar[str] = "floating"

    def __init__(
        self, mem_slots: int = DEFAULT_SLOTS, *, max_table_bytes: int | None = None
    ) -> None:
        self.mem_slots = checked_slots(mem_slots)
        self.max_table_bytes = max_table_bytes

    def _best(
        self, chain: Chain, budget: int, mem_slots: int | None, progress: ProgressCallback | None
    ) -> Sequence:
        slots = self.mem_slots if mem_slots is None else checked_slots(mem_slots)
        bound = table_bound(self.max_table_bytes)
        try:
            return priced(_core.floating(chain.core, budget, slots, bound, progress), chain)
        except MemoryError:
            raise _too_large(chain, slots, bound) from None

    def curve(self, chain: Chain, *, progress: ProgressCallback | None = None) -> Curve:
        """Return time against memory from one solve, whose slots divide the largest useful budget.

        Its ends are exact. In between, `solve` divides its own budget, which is finer, and mostly
        finds a schedule as fast or faster.
        """
        everything = max(1, next(NoCheckpoint().candidates(chain)).peak_bytes)
        bound = table_bound(self.max_table_bytes)
        try:
            points = _core.floating_curve(chain.core, everything, self.mem_slots, bound, progress)
        except MemoryError:
            raise _too_large(chain, self.mem_slots, bound) from None
        return curve_of(points)

    def __repr__(self) -> str:
        return f"Floating(mem_slots={self.mem_slots})"


def _too_large(chain: Chain, slots: int, bound: int) -> MemoryError:
    n = len(chain)
    most = (n + 1) * (n + 2) * (n + 3) // 6 * (8 * (slots + n + 3) + 24)
    return MemoryError(
        f"{slots} memory slots on a chain of {n} stages take a table of up to {most} bytes, and "
        f"{bound} bytes may be used: give fewer mem_slots, or use Persistent"
    )
