"""Replays a log under a budget: `simulate` and `baseline`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rotor import _core
from rotor.common.progress import progress as show_progress
from rotor.simrd.heuristics import HeuristicLike
from rotor.simrd.logs import Log, LogSource, parse
from rotor.simrd.results import EVENT, OPERATION, STORAGE, Failure, LockedSet, LockedStorage, Result
from rotor.simrd.settings import MAX_EVENTS, Baseline, Settings, check_flag, make_settings
from rotor.units import LARGEST_BYTES, parse_bytes

_STATUS = ("ok", "oom", "thrash")


def _real(value: object, name: str, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}; expected {expected}")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{name} is NaN; expected {expected}")
    return number


def _check_overhead_limit(value: object) -> float:
    expected = "a number above 1 (2 allows twice the time of the log), or math.inf"
    number = _real(value, "overhead_limit", expected)
    if number <= 1:
        raise ValueError(f"overhead_limit = {value}; expected {expected}")
    return number


def _budget(log: Log, ratio: object, budget_bytes: object) -> tuple[float | None, int | None]:
    if ratio is None:
        if budget_bytes is None:
            return None, None
        return None, parse_bytes(budget_bytes, "budget_bytes")
    if budget_bytes is not None:
        raise ValueError(f"ratio = {ratio!r} and budget_bytes = {budget_bytes!r}: give one of them")
    expected = "a number above 0: the budget as a part of the memory of the baseline"
    number = _real(ratio, "ratio", expected)
    if not 0 < number < math.inf:
        raise ValueError(f"ratio = {ratio}; expected {expected}")
    most = log.baseline.max_memory
    if most * number > LARGEST_BYTES:
        raise ValueError(f"ratio = {ratio} of {most} bytes is more than {LARGEST_BYTES} bytes")
    budget = int(most * number)
    if budget < 1:
        raise ValueError(f"ratio = {ratio} of {most} bytes, which the log needs, leaves no byte")
    return number, budget


def baseline(log: Log | LogSource) -> Baseline:
    """Return the figures of a log run by V1 without a budget, as published.

    Parameters
    ----------
    log
        A log, or what `rotor.simrd.parse` takes. ``log.baseline`` keeps the answer.

    Returns
    -------
    Baseline
        Times and bytes that ratios refer to.

    Raises
    ------
    ValueError
        The log was not read to its end.
    MalformedLogError
        It cannot be read.
    """
    return (log if isinstance(log, Log) else parse(log)).baseline


def simulate(
    log: Log | LogSource,
    heuristic: HeuristicLike = "DTREqClass",
    *,
    ratio: float | None = None,
    budget_bytes: int | str | None = None,
    runtime: str = "V2EagerOptimized",
    overhead_limit: float = 2.0,
    seed: int = 0,
    no_dealloc: bool = False,
    rebuild_classes_every: int = 0,
    sample: bool = False,
    ignore_small: bool = False,
    count_accesses: bool = False,
    stats: bool = False,
    trace: bool = False,
    max_events: int = MAX_EVENTS,
    progress: bool | Callable[[int, int], object] = False,
) -> Result:
    """Replay a log under a budget, evicting and rematerializing storages.

    Parameters
    ----------
    log
        A log, or what `rotor.simrd.parse` takes; parse it once for many settings.
    heuristic
        A name out of `rotor.simrd.heuristics.names`, or a function that is given a candidate and
        returns its cost, a real number: the least goes, of equal ones the last, and a cost of 0 at
        once. A candidate has ``storage``, ``bytes``, ``compute_ns``, ``last_access``,
        ``now``, ``staleness``, and, found when read, ``evicted_after_ns``, ``evicted_before_ns``,
        ``class_ns`` (not on V1); it is good during the call only.
    ratio
        The budget as a part of the baseline's memory.
    budget_bytes
        The budget, a number of bytes or text such as "700MiB". Without it and `ratio`: none.
    runtime
        A name out of `rotor.simrd.runtimes.names`.
    overhead_limit
        The run is given up as "thrash" once rematerializations took (`overhead_limit` - 1) times
        the time of the log; ``math.inf`` for never.
    seed
        Seed of heuristics that draw random numbers, and of `sample`. The draws differ from those of
        the published simulator.
    no_dealloc
        Takes releases out of the log.
    rebuild_classes_every
        Classes of evicted storages are rebuilt at every such return of a storage to memory: 0
        never, as published (a storage that returns does not split its class), 1 makes them exact.
    sample
        Looks at about 2 sqrt(n) of n candidates, as the prototype does.
    ignore_small
        Never evicts what is below 1 % of the mean size, as the prototype does.
    count_accesses
        Counts what the published algorithms read and write (``n_access``): slower.
    stats
        Counts per storage and per operation.
    trace
        Keeps every event, 32 bytes each.
    max_events
        Of the trace, at most.
    progress
        A bar, if it takes long; or a function of (commands done, all).

    Returns
    -------
    Result
        Also where the memory did not suffice or the run was given up: see its ``status``.

    Raises
    ------
    ValueError
        A value is out of range; `ratio` and `budget_bytes` are both given; a heuristic or runtime
        is unknown (the message lists the known ones); V1 cannot serve the heuristic; the log was
        not read to its end; the function returned NaN.
    TypeError
        A value is of a wrong type.
    MalformedLogError
        The log cannot be read.
    MemoryError
        The trace passed `max_events`.

    Notes
    -----
    The semantics follow Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021,
    section 2 and appendix C: eviction costs nothing, memory does not fragment, the clock counts
    executions only. A log read with ``output_condition="preallocate"`` leaves its outputs
    (``log.output_bytes``) to the caller: take them off the budget where they should count.

    Examples
    --------
    >>> from rotor.simrd import LogWriter, parse, simulate
    >>> writer = LogWriter()
    >>> writer.constant("x", 4)
    >>> writer.call("relu", ["x"], ["y"], 10, bytes=[4], aliases=[-1])
    >>> simulate(parse(writer.getvalue()), "DTR", ratio=1.0).status
    'ok'
    """
    limit = _check_overhead_limit(overhead_limit)
    name, settings = make_settings(
        heuristic,
        runtime,
        budget_bytes=None,
        remat_limit_ns=math.inf,
        seed=seed,
        no_dealloc=no_dealloc,
        rebuild_classes_every=rebuild_classes_every,
        sample=sample,
        ignore_small=ignore_small,
        count_accesses=count_accesses,
        stats=stats,
        trace=trace,
        max_events=max_events,
    )
    found = log if isinstance(log, Log) else parse(log)
    base = found.baseline.compute_ns
    number, budget = _budget(found, ratio, budget_bytes)
    remat_limit = math.inf if math.isinf(limit) else base * (limit - 1)
    settings = replace(settings, budget_bytes=budget, remat_limit_ns=remat_limit)
    replay = settings.replay(found.core)
    if callable(progress):
        replay.run(progress)
    elif check_flag(progress, "progress"):
        with show_progress(found.core.command_count, f"simulating {found.name}") as update:
            replay.run(update)
    else:
        replay.run()
    status = _STATUS[replay.outcome]
    return Result(
        log=found.name,
        heuristic=name,
        runtime=settings.runtime.name,
        no_dealloc=settings.ignores_releases,
        seed=settings.seed,
        ratio=number,
        budget=budget,
        overhead_limit=limit,
        rebuild_classes_every=settings.rebuild_classes_every,
        sample=settings.sample,
        ignore_small=settings.ignore_small,
        base_compute=base,
        status=status,
        clock=replay.clock,
        model_compute=replay.model_compute_ns,
        remat_compute=replay.remat_compute_ns,
        max_memory=replay.max_memory,
        const_memory=replay.const_bytes,
        bottleneck_memory=replay.bottleneck_bytes,
        n_evict=replay.evictions,
        n_remat=replay.remats,
        n_model_ops=replay.model_executions,
        n_eval=replay.evaluations,
        n_access=replay.accesses if settings.count_accesses else None,
        max_locked_bytes=replay.max_locked_bytes,
        max_locked_execution=replay.max_locked_execution,
        memory_bytes=replay.footprint_bytes,
        failure=None if status == "ok" else failure_of(found.core, replay),
        storages=_array(replay.storage_stats(), STORAGE),
        operations=_array(replay.operation_stats(), OPERATION),
        events=_array(replay.events(), EVENT),
        rerun=_Rerun(found, settings, replay.max_locked_execution),
    )


def _array(data: bytearray | None, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    return None if data is None else np.frombuffer(data, dtype=dtype)


def locked_set(core: _core.Log, replay: _core.Replay) -> LockedSet:
    """Return the storages that a replay cannot evict now."""
    sizes = np.frombuffer(core.storages()[0], dtype=np.int64)
    roots = np.frombuffer(core.storages()[1], dtype=np.int64)
    found = np.frombuffer(replay.locked(), dtype=np.int64)
    order = found[np.lexsort((found, -sizes[found]))].tolist()
    return LockedSet(
        execution=replay.executions,
        clock=replay.clock,
        command=replay.next_command,
        bytes=int(sizes[found].sum()),
        count=len(order),
        storages=tuple(
            LockedStorage(i, core.tensor_name(int(roots[i])), int(sizes[i])) for i in order
        ),
    )


def failure_of(core: _core.Log, replay: _core.Replay) -> Failure:
    """Return the reason why a replay whose outcome is not ok ended."""
    operation = replay.failed_operation
    tensor = int(np.frombuffer(core.operations()[4], dtype=np.int64)[operation])
    return Failure(
        kind=_STATUS[replay.outcome],
        operation=core.operation_name(operation),
        tensor=core.tensor_name(tensor),
        needed_bytes=replay.failed_bytes,
        memory_bytes=replay.memory,
        locked=locked_set(core, replay),
    )


@dataclass(frozen=True)
class _Rerun:
    log: Log
    settings: Settings
    execution: int

    def __call__(self) -> LockedSet:
        silent: dict[str, Any] = dict.fromkeys(("count_accesses", "stats", "trace"), False)
        settings = replace(self.settings, stop_at_execution=self.execution, **silent)
        replay = settings.replay(self.log.core)
        replay.run()
        return locked_set(self.log.core, replay)
