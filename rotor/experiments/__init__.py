"""Experiments on the simulator: settings, runs, files, figures.

Every experiment has a configuration, runs its cells in parallel, keeps each finished cell in a file
so that an interrupted run goes on where it was, and writes tables, text and figures.
``experiments.get("pareto")`` is the module of one; its ``Config`` and ``run`` are what the command
line uses. Nothing here needs PyTorch.

Files under the output directory: ``data/`` has JSON and CSV, and the cells under ``data/cells/``;
``summary/`` text; ``graph/`` figures. They hold no dates and no times of this machine: the same
settings give the same bytes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["get", "names"]

# One line per experiment; its module is rotor.experiments.<module>.
_REGISTRY = {
    "pareto": "sweeps",
    "ablation": "sweeps",
    "banishing": "sweeps",
    "accesses": "sweeps",
    "linear": "linear",
    "adversarial": "adversarial",
    "static": "static",
}


def names() -> list[str]:
    """Names of all experiments, for `get`."""
    return list(_REGISTRY)


def get(name: str) -> ModuleType:
    """The module of an experiment.

    Raises
    ------
    ValueError
        There is no experiment of that name; the message lists those there are.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"no experiment is named {name!r}, expected one of {', '.join(_REGISTRY)}")
    return importlib.import_module(f"rotor.experiments.{_REGISTRY[name]}")


def __getattr__(name: str) -> Any:
    if name in ("cells", "output", *_REGISTRY.values()):
        return importlib.import_module(f"rotor.experiments.{name}")
    raise AttributeError(f"module 'rotor.experiments' has no attribute {name!r}")
