"""Checked settings of the simulator, and the baseline of a log."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rotor import _core
from rotor.simrd import heuristics, runtimes
from rotor.simrd.heuristics import HeuristicLike
from rotor.units import check_count

MAX_EVENTS = 10_000_000
"""Events of a trace, 32 bytes each, beyond which `simulate` gives up; a default."""

_NO_BUDGET = (1 << 63) - 1
_LARGEST_SEED = (1 << 64) - 1


@dataclass(frozen=True)
class Baseline:
    """A log run without a budget, releases freeing memory for good: what ratios refer to.

    Attributes
    ----------
    compute_ns
        Time of all its operations.
    max_memory
        The most bytes in memory at once.
    const_memory
        Bytes of its constants.
    bottleneck_memory
        Bytes of the outputs and inputs of the operation where these are largest: no budget below
        this can do.
    n_ops
        Its operations, constants included.
    """

    compute_ns: int
    max_memory: int
    const_memory: int
    bottleneck_memory: int
    n_ops: int


@dataclass(frozen=True)
class Settings:
    """A checked setting of the simulator: what a `_core.Replay` takes, in its order."""

    runtime: runtimes.Runtime
    ignores_releases: bool
    budget_bytes: int | None
    remat_limit_ns: float
    heuristic: HeuristicLike
    seed: int
    rebuild_classes_every: int
    sample: bool
    ignore_small: bool
    count_accesses: bool = False
    stats: bool = False
    trace: bool = False
    max_events: int = MAX_EVENTS
    stop_at_execution: int = -1

    def replay(self, core: _core.Log) -> _core.Replay:
        """Return a replay of a log at its beginning."""
        runtime, ignores, budget, *others = vars(self).values()
        most = _NO_BUDGET if budget is None else budget
        return _core.Replay(core, runtime.code, ignores, most, *others)


def forwarded(path: str, text: str) -> Any:
    """Return a property with a docstring that reads an attribute by its path, of the C core."""
    return property(operator.attrgetter(path), doc=text)


def check_flag(value: object, name: str) -> bool:
    """Return a bool, or an error that says which."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def make_settings(
    heuristic: HeuristicLike,
    runtime: str,
    *,
    budget_bytes: int | None,
    remat_limit_ns: float,
    seed: int,
    no_dealloc: bool,
    rebuild_classes_every: int,
    sample: bool,
    ignore_small: bool,
    count_accesses: bool = False,
    stats: bool = False,
    trace: bool = False,
    max_events: int = MAX_EVENTS,
) -> tuple[str, Settings]:
    """Return the name of the heuristic and the setting; check all but the budget and the limit.

    Raises ValueError or TypeError for wrong values, and for those that do not suit each other.
    """
    found = runtimes.get(runtime)
    name = heuristics.check(heuristic, found.serves, found.name)
    return name, Settings(
        heuristic=heuristics.resolve(heuristic),
        runtime=found,
        ignores_releases=check_flag(no_dealloc, "no_dealloc") or found.ignores_releases,
        budget_bytes=budget_bytes,
        remat_limit_ns=remat_limit_ns,
        seed=check_count(seed, "seed", 0, _LARGEST_SEED),
        rebuild_classes_every=check_count(rebuild_classes_every, "rebuild_classes_every", 0),
        sample=check_flag(sample, "sample"),
        ignore_small=check_flag(ignore_small, "ignore_small"),
        count_accesses=check_flag(count_accesses, "count_accesses"),
        stats=check_flag(stats, "stats"),
        trace=check_flag(trace, "trace"),
        max_events=check_count(max_events, "max_events", 1),
    )


_BASELINE = Settings(
    heuristic="LRU",
    runtime=runtimes.get("V1"),
    ignores_releases=False,
    budget_bytes=None,
    remat_limit_ns=math.inf,
    seed=0,
    rebuild_classes_every=0,
    sample=False,
    ignore_small=False,
)


def compute_baseline(core: _core.Log) -> Baseline:
    """Return the baseline of a log that was read to its end."""
    replay = _BASELINE.replay(core)
    replay.run()
    return Baseline(
        compute_ns=replay.model_compute_ns,
        max_memory=replay.max_memory,
        const_memory=replay.const_bytes,
        bottleneck_memory=replay.bottleneck_bytes,
        n_ops=replay.model_executions,
    )
