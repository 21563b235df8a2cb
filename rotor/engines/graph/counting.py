"""Choice of the bytes that a limit counts: allocated ones, or reserved ones."""

from __future__ import annotations

import torch

__all__ = ["COUNTS", "check_counts", "checked_counts"]

COUNTS = ("allocated", "reserved")
"""Accepted values of ``counts=``."""


def checked_counts(counts: str, engine: str, backend: str) -> str:
    """Return the bytes that a limit counts; raise ValueError if an option does not suit them."""
    if counts not in COUNTS:
        raise ValueError(f"unknown counts {counts!r}, expected one of {', '.join(COUNTS)}")
    if counts == "reserved" and (engine not in ("auto", "graph") or backend != "fx"):
        given = f'engine="{engine}"' if engine not in ("auto", "graph") else f'backend="{backend}"'
        raise ValueError(
            'counts="reserved" needs the order of all allocations before a step runs, which '
            f'{given} does not have: use engine="graph" and backend="fx", or leave counts at '
            '"allocated"'
        )
    return counts


def check_counts(counts: str, device: torch.device) -> None:
    """Raise ValueError if the allocator of a device reserves nothing that could be counted."""
    if counts == "reserved" and device.type == "cpu":
        raise ValueError(
            'counts="reserved" is for accelerators, and this step runs on the CPU, whose allocator '
            'reserves no memory: leave counts at "allocated"'
        )
