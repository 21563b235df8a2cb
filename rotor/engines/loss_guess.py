"""Reserve for an unknown loss, which never makes a feasible limit infeasible.

Before the first step a loss is assumed to need 4 times the output. If no plan fits beside that
amount, the largest reserve that leaves room for one is taken: the first step is metered, and shows
the real need of the loss.
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

    `plan_with` makes a plan beside a reserve, which is at most `guess_bytes`. Raises
    InfeasibleError if no plan fits beside `least_bytes`; its ``minimum_bytes`` is the need of one
    beside them.
    """
    reserve = max(guess_bytes, least_bytes)
    for _ in range(_MOST_TRIES):
        try:
            plan = plan_with(reserve)
        except InfeasibleError as error:
            if reserve == least_bytes:
                raise
            # At the loss the whole reserve counts: the peak falls by as much as the reserve.
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
