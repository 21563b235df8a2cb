"""Dynamic rematerialization: any eager program within a memory budget.

``with rotor.dtr.budget("2GiB"):`` watches every operator that runs, evicts results that can be
computed again when memory gets short, and computes them again when they are read. The results equal
the plain program's bit for bit. The method is that of Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021.
"""

from __future__ import annotations

from rotor.dtr import published as _published
from rotor.dtr.context import budget, current
from rotor.dtr.log import ProgramLog
from rotor.dtr.published import *  # noqa: F403
from rotor.dtr.recall import Observer, Stats
from rotor.dtr.runtime import Session
from rotor.errors import BudgetError

__all__ = ["BudgetError", "Observer", "ProgramLog", "Session", "Stats", "budget", "current"]
__all__ += _published.__all__
