"""The reserve for a loss of which nothing is known yet: it never makes a feasible limit infeasible.

Before the first step a loss is assumed to need 4 times the output. Where no plan fits beside that
much, the largest reserve that leaves room for one is taken: the first step is metered, and shows
what the loss really needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from rotor.errors import InfeasibleError
from rotor.units import format_bytes

__all__ = ["plan_with_guess"]

logger = logging.getLogger("rotor")

_MOST_TRIES = 4

P = TypeVar("P")


def plan_with_guess(
    plan_with: Callable[[int], P], guess_bytes: int, limit_bytes: int, least_bytes: int = 0
) -> tuple[P, int]:
    """Return a plan beside the largest reserve for the loss that leaves room, and the reserve.

    Parameters
    ----------
    plan_with
        Makes a plan beside a reserve.
    guess_bytes
        The reserve that is assumed.
    limit_bytes
        The limit of the plan.
    least_bytes
        The least reserve that makes sense.

    Raises
    ------
    InfeasibleError
        No plan fits beside the least reserve; ``minimum_bytes`` is what one beside it needs.
    """
    reserve = max(guess_bytes, least_bytes)
    for _ in range(_MOST_TRIES):
        try:
            plan = plan_with(reserve)
        except InfeasibleError as error:
            if reserve == least_bytes:
                raise
            # At its moment the loss adds all of its reserve: as much less of it fits.
            over = max(error.minimum_bytes - limit_bytes, 1)
            reserve = max(reserve - over, least_bytes)
            continue
        break
    else:
        reserve = least_bytes
        plan = plan_with(reserve)
    if reserve < guess_bytes:
        logger.info(
            "the loss is assumed to need %s, of which %s fit in the limit of %s beside a plan: the "
            "first step shows what it needs",
            format_bytes(guess_bytes),
            format_bytes(reserve),
            format_bytes(limit_bytes),
        )
    return plan, reserve
