"""Dynamic rematerialization: any eager program within a memory budget.

``with rotor.dtr.budget("2GiB"):`` watches every operator that runs, evicts results that can be
computed again when memory gets short, and computes them again when they are read. The results equal
the plain program's bit for bit. The method is that of Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021.
"""

from __future__ import annotations

from rotor.dtr.context import budget, current
from rotor.dtr.log import ProgramLog
from rotor.dtr.published import (
    annotate_log,
    base_compute_time,
    checkpoint,
    clear_checkpointpool,
    compute_time,
    cost_time,
    decheckpoint,
    install,
    is_checkpoint,
    loop_time,
    new_log,
    pin,
    remat_compute_time,
    reset_profile,
    search_time,
    set_memory_budget,
    toggle_ignore_small_tensors,
    toggle_log,
    toggle_profile,
    toggle_sampling,
    try_checkpoint,
    uncheckpoint,
    uninstall,
    unset_memory_budget,
)
from rotor.dtr.recall import Observer, Stats
from rotor.dtr.runtime import Session
from rotor.errors import BudgetError

__all__ = [
    "BudgetError",
    "Observer",
    "ProgramLog",
    "Session",
    "Stats",
    "annotate_log",
    "base_compute_time",
    "budget",
    "checkpoint",
    "clear_checkpointpool",
    "compute_time",
    "cost_time",
    "current",
    "decheckpoint",
    "install",
    "is_checkpoint",
    "loop_time",
    "new_log",
    "pin",
    "remat_compute_time",
    "reset_profile",
    "search_time",
    "set_memory_budget",
    "toggle_ignore_small_tensors",
    "toggle_log",
    "toggle_profile",
    "toggle_sampling",
    "try_checkpoint",
    "uncheckpoint",
    "uninstall",
    "unset_memory_budget",
]
