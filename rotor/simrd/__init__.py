"""The simulator of dynamic rematerialization: replays logs of eager programs under a budget.

``simrd.simulate(path, "DTR", ratio=0.5)`` answers for one setting; ``simrd.parse(path)`` reads a
log once for many. Nothing here needs PyTorch.

References
----------
.. [1] M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock,
   "Dynamic Tensor Rematerialization", ICLR 2021.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rotor.simrd import heuristics, runtimes
from rotor.simrd.interactive import Interactive
from rotor.simrd.log_writer import LogWriter
from rotor.simrd.logs import Log, parse
from rotor.simrd.results import Failure, LockedSet, Result, results_to_csv
from rotor.simrd.settings import Baseline
from rotor.simrd.simulate import baseline, simulate

if TYPE_CHECKING:
    from rotor.simrd import checkmate, networks, static

__all__ = [
    "Baseline",
    "Failure",
    "Interactive",
    "LockedSet",
    "Log",
    "LogWriter",
    "Result",
    "baseline",
    "checkmate",
    "heuristics",
    "networks",
    "parse",
    "results_to_csv",
    "runtimes",
    "simulate",
    "static",
]

_LAZY = ("checkmate", "networks", "static")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"rotor.simrd.{name}")
    raise AttributeError(f"module 'rotor.simrd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
