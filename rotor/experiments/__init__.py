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

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rotor.simrd.logs import shipped_logs

__all__ = ["get", "names", "run_all", "shipped_logs"]

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
    """Return the names of all experiments, for `get`."""
    return list(_REGISTRY)


def get(name: str) -> ModuleType:
    """Return the module of an experiment.

    Raises
    ------
    ValueError
        No experiment has that name; the message lists all names.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"no experiment is named {name!r}, expected one of {', '.join(_REGISTRY)}")
    return importlib.import_module(f"rotor.experiments.{_REGISTRY[name]}")


def run_all(
    directory: Path,
    *,
    jobs: int = 1,
    formats: tuple[str, ...] = ("pdf",),
    fresh: bool = False,
    **settings: Any,
) -> Iterator[tuple[str, Any]]:
    """Run every experiment, one after the other.

    Parameters
    ----------
    directory
        Directory of the output.
    jobs
        Processes.
    formats
        Of the figures, out of "pdf", "png", "svg"; none for no figures.
    fresh
        Run again what was run before.
    **settings
        Settings of the experiments' ``Config``; each takes its own. ``logs`` are the shipped ones
        by default.

    Yields
    ------
    tuple
        The name of an experiment and its `rotor.experiments.output.Output`, when it is done.

    Raises
    ------
    TypeError
        No experiment has such a setting.
    """
    settings.setdefault("logs", (str(shipped_logs()),))
    modules = {name: get(name) for name in names()}
    known = {
        name: {field.name for field in dataclasses.fields(module.Config)}
        for name, module in modules.items()
    }
    for key in settings:
        if key == "name" or not any(key in fields for fields in known.values()):
            raise TypeError(f"no experiment has a setting {key!r}")
    for name, module in modules.items():
        chosen = {key: value for key, value in settings.items() if key in known[name]}
        if "name" in known[name]:
            chosen["name"] = name
        config = module.Config(**chosen)
        yield name, module.run(config, directory, jobs=jobs, formats=formats, fresh=fresh)


def __getattr__(name: str) -> Any:
    if name in ("cells", "output", *_REGISTRY.values()):
        return importlib.import_module(f"rotor.experiments.{name}")
    raise AttributeError(f"module 'rotor.experiments' has no attribute {name!r}")
