"""Base class of every algorithm: `DynamicAlgorithm`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain
from rotor.errors import InfeasibleError
from rotor.units import exact_bytes, parse_bytes

LARGEST_TABLE_BYTES = 4 << 30
_LARGEST_SLOTS = 1 << 28
_CURVE_POINTS = 40
_NEXT_BUDGET = 0.9

ProgressCallback = Callable[[int, int], object]
"""Called as ``progress(done, total)`` now and then during a long computation."""


class DynamicAlgorithm(ABC):
    """An algorithm that computes schedules of a chain.

    A new algorithm is a file with a subclass, a line in the registry of `rotor.algorithms`, and a
    page in the documentation. One of your own, given to `compute_sequence`, needs no more than
    ``solve(chain, budget)``, here or in any class. Budgets are in bytes and count the chain's input
    ``x_bytes[0]``. The simulator gives every figure of a returned sequence.

    Attributes
    ----------
    name
        The name in the registry.
    """

    name: ClassVar[str]

    @abstractmethod
    def solve(
        self,
        chain: Chain,
        budget_bytes: int | str,
        *,
        mem_slots: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> Sequence:
        """Return the algorithm's best schedule within a budget.

        Parameters
        ----------
        chain
            The chain to schedule.
        budget_bytes
            The most bytes live at any moment, ``chain.x_bytes[0]`` included: bytes, or text
            such as "700MiB".
        mem_slots
            Number of memory slots for algorithms that discretise memory; others ignore it.
        progress
            Called as ``progress(done, total)`` about every 0.05 s during a long computation.

        Returns
        -------
        Sequence
            The schedule priced on `chain`; its ``peak_bytes`` is at most `budget_bytes`.

        Raises
        ------
        InfeasibleError
            The algorithm has no schedule within the budget; ``minimum_bytes`` is the least budget
            in which it has one.
        ValueError, TypeError
            The budget is not a positive number of bytes.
        KeyboardInterrupt
            The computation was interrupted.
        """

    def curve(self, chain: Chain, *, progress: ProgressCallback | None = None) -> Curve:
        """Return the time of the algorithm's schedules against the budget.

        Returns
        -------
        Curve
            Points from the least memory of the algorithm to its fastest schedule; by default those
            of `solve` under budgets that fall by a tenth or more.
        """
        return curve_of_solutions(self, chain, progress=progress)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BuiltInAlgorithm(DynamicAlgorithm):
    """A `DynamicAlgorithm` that is asked for a budget in bytes, and names the least in its errors.

    `_best` returns the schedule, or raises InfeasibleError with the least budget of any.
    """

    def solve(
        self,
        chain: Chain,
        budget_bytes: int | str,
        *,
        mem_slots: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> Sequence:
        """Return the fastest schedule of the algorithm within a budget.

        See Also
        --------
        rotor.algorithms.DynamicAlgorithm.solve : Parameters and errors.
        """
        if not isinstance(chain, Chain):
            raise TypeError(f"expected a rotor.Chain to schedule, not {chain!r}")
        budget = parse_budget(budget_bytes)
        try:
            return self._best(chain, budget, mem_slots, progress)
        except InfeasibleError as error:
            raise infeasible(type(self).__name__, budget, error.minimum_bytes) from None

    @abstractmethod
    def _best(
        self, chain: Chain, budget: int, mem_slots: int | None, progress: ProgressCallback | None
    ) -> Sequence: ...


def solved(
    algorithm: Any,
    chain: Chain,
    budget_bytes: int,
    *,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Sequence:
    """Return an algorithm's schedule; its ``solve`` may take no slots and no progress."""
    taken = inspect.signature(algorithm.solve).parameters
    options["progress"] = progress
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for name in {"mem_slots", "progress"} - taken.keys():
            options.pop(name, None)
    found = algorithm.solve(chain, budget_bytes, **options)
    if not isinstance(found, Sequence):
        raise TypeError(
            f"solve() of {type(algorithm).__name__} returned {type(found).__name__}, expected a "
            "rotor.algorithms.Sequence"
        )
    sequence = found if found.chain is chain else Sequence(found.codes, chain)
    if sequence.peak_bytes > budget_bytes:
        raise InfeasibleError(
            f"{type(algorithm).__name__} has no schedule within {exact_bytes(budget_bytes)}: its "
            f"own needs {exact_bytes(sequence.peak_bytes)}",
            sequence.peak_bytes,
        )
    return sequence


def curve_of_solutions(
    algorithm: Any, chain: Chain, *, progress: ProgressCallback | None = None
) -> Curve:
    """Return the curve of what an algorithm finds under falling budgets."""
    sizes = [chain.x_bytes, chain.xbar_bytes, chain.grad_bytes, chain.pgrad_bytes]
    passing = [chain.forward_tmp_bytes, chain.forward_nograd_tmp_bytes, chain.backward_tmp_bytes]
    # More than all of it at once.
    budget = max(2 * sum(map(sum, [*sizes, *passing])) + abs(chain.loss_tmp_bytes), 1)
    points: list[tuple[int, float]] = []
    while len(points) < _CURVE_POINTS and budget > 0:
        try:
            sequence = solved(algorithm, chain, budget)
        except InfeasibleError:
            if not points:
                raise
            break
        points.append((sequence.peak_bytes, sequence.makespan))
        budget = min(int(budget * _NEXT_BUDGET), sequence.peak_bytes - 1)
        if progress is not None:
            progress(len(points), _CURVE_POINTS)
    return Curve.from_points(points)


def parse_budget(budget_bytes: int | str) -> int:
    """Return a budget as bytes; ValueError or TypeError if it is no positive number."""
    return parse_bytes(budget_bytes, name="budget_bytes")


def checked_slots(mem_slots: int) -> int:
    """Return a number of memory slots; ValueError if it is no whole number from 1 to 2^28."""
    if isinstance(mem_slots, bool) or not isinstance(mem_slots, int | np.integer):
        raise ValueError(f"mem_slots must be a whole number, got {mem_slots!r}")
    if not 1 <= mem_slots <= _LARGEST_SLOTS:
        raise ValueError(f"mem_slots = {mem_slots}, expected 1 to {_LARGEST_SLOTS}")
    return int(mem_slots)


# -- parts of the algorithms over the C core's tables


def table_bound(asked_bytes: int | None) -> int:
    """Return the requested bound; by default half of the available memory, 4 GiB at most."""
    if asked_bytes is not None:
        return asked_bytes
    import psutil

    return min(LARGEST_TABLE_BYTES, int(psutil.virtual_memory().available) // 2)


def priced(codes: bytearray, chain: Chain) -> Sequence:
    """Return the sequence of the core's operations, priced on its chain."""
    return Sequence(np.frombuffer(codes, dtype=np.int32).reshape(-1, 2), chain)


def curve_of(points: tuple[bytearray, bytearray]) -> Curve:
    """Return the curve of the core's points: bytes, and nanoseconds."""
    sizes, ns = (np.frombuffer(values, dtype=np.int64) for values in points)
    return Curve(sizes, ns / 1e9)


def infeasible(algorithm: str, budget_bytes: int, minimum_bytes: int) -> InfeasibleError:
    """Return the error to raise when `algorithm` has no schedule within a budget."""
    return InfeasibleError(
        f"{algorithm} has no schedule of this chain within {exact_bytes(budget_bytes)}; "
        f"the least budget in which it has one is {exact_bytes(minimum_bytes)}",
        minimum_bytes,
    )
