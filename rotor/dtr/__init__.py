"""Dynamic rematerialization: any eager program within a memory budget.

``with rotor.dtr.budget("2GiB"):`` watches every operator that runs, evicts results that can be
computed again when memory gets short, and computes them again when they are read. Results are those
of the plain program, bit for bit. The method is that of Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021.
"""

from __future__ import annotations

from rotor.dtr.context import budget, current
from rotor.dtr.recall import Observer, Stats
from rotor.dtr.runtime import Session
from rotor.errors import BudgetError

__all__ = ["BudgetError", "Observer", "Session", "Stats", "budget", "current"]
