"""Rockmate's published solvers: each names what plans.

``Rockmate(model, sample, budget, top_solvers=[HILP()], bottom_solvers=[RK_rotor()])`` takes the
fastest plan that one of them finds for the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from rotor.common.frames import WithoutCounterpart, warn_of_ignored

__all__ = ["HILP", "CheapSolver", "FastSolver", "RK_rotor", "Solver", "TwRemat", "chosen"]


class Solver:
    """Choice of what plans a step; options are those published.

    Parameters
    ----------
    mem_unit, **options
        Published options, which have no effect: plans are in bytes, and made for the whole step.

    Warns
    -----
    UserWarning
        Options that have no effect.
    """

    algorithm: ClassVar[str]
    _published: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, mem_unit: int | None = None, **options: Any) -> None:
        name = type(self).__name__
        unknown = sorted(options.keys() - self._published)
        if unknown:
            expected = ", ".join(sorted({"mem_unit", *self._published}))
            raise TypeError(f"unknown option {unknown[0]!r} of {name}, expected {expected}")
        self.time_limit: float | None = options.pop("time_limit", None)
        given = options if mem_unit is None else {**options, "mem_unit": mem_unit}
        warn_of_ignored(name, given, "Plans are made in bytes, for the whole step")


class HILP(Solver):
    """The planner of operations, in place of the published integer program.

    Parameters
    ----------
    mem_unit, **options
        As for `Solver`; ``time_limit`` is of the planner, in seconds.
    """

    algorithm = "operations"
    _published = frozenset(
        [
            *("ilp_solver", "ilp_solver_params", "protected_names", "nb_total_sched", "offload"),
            *("nb_total_nodes", "nb_bdg_save", "nb_bdg_peak", "accurate_mem", "model_kwargs"),
            *("add_offload_sched", "activation_offload", "minor_offload_size", "time_limit"),
        ]
    )


class RK_rotor(Solver):
    """The chain's algorithm: whole blocks of the model are kept or repeated.

    Parameters
    ----------
    mem_unit, **options
        As for `Solver`.
    """

    algorithm = "blocks"
    _published = frozenset(["force_python"])


class CheapSolver(WithoutCounterpart):
    """Has no counterpart: the planner of operations repeats cheap ones first of itself."""

    instead = "HILP() plans by operations, and repeats cheap ones first"


class TwRemat(WithoutCounterpart):
    """Has no counterpart: `HILP` plans by operations, `RK_rotor` by blocks."""

    instead = "HILP() plans by operations, RK_rotor() by blocks"


class FastSolver(WithoutCounterpart):
    """Has no counterpart: a budget with room for everything repeats nothing."""

    instead = (
        "a budget with room for everything gives the schedule that repeats nothing, HILP() and "
        "RK_rotor() give the others"
    )


def chosen(solvers: Iterable[Any]) -> tuple[tuple[str, ...], float | None]:
    """Return the algorithms of solvers, each once, and the largest of their time limits.

    Raise TypeError if one of them is no `Solver`.
    """
    found = list(solvers)
    wrong = [solver for solver in found if not isinstance(solver, Solver)]
    if wrong:
        raise TypeError(
            f"{wrong[0]!r} is no solver: expected HILP() or RK_rotor() of rotor.rockmate.solvers"
        )
    limits = [solver.time_limit for solver in found if solver.time_limit is not None]
    names = tuple(dict.fromkeys(solver.algorithm for solver in found))
    return names, max(limits, default=None)
