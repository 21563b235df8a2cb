"""The limit of a step where none is given."""

from __future__ import annotations

import logging

import torch

from rotor.common.accounting import FREE_PERCENT, default_limit
from rotor.common.ranks import sharers
from rotor.meter import allocator
from rotor.units import format_bytes

__all__ = ["free_limit"]

logger = logging.getLogger("rotor")


def free_limit(device: torch.device) -> int:
    """Return the limit of a step on a device from what is free now, shared with other processes.

    Parameters
    ----------
    device
        Where the step runs; processes that train on the same memory have equal parts of it.
    """
    count = sharers(device)
    limit = default_limit(allocator.free_bytes(device), count)
    logger.info(
        "no limit was given: %d %% of free memory%s, %s",
        FREE_PERCENT,
        f", shared by {count} processes" if count > 1 else "",
        format_bytes(limit),
    )
    return limit
