"""Results of a simulation: figures, failures, telemetry."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rotor.chain import Saved, check_header, write_text
from rotor.units import format_bytes, format_seconds

__all__ = ["EVENT_KINDS", "Failure", "LockedSet", "LockedStorage", "Result", "results_to_csv"]

FORMAT = "rotor.simulation"
VERSION = 1
EVENT_KINDS = ("compute", "evict", "lock", "unlock", "pending", "pin", "banish", "pressure")
"""Kinds of the events of a trace, in the order of their numbers."""

EVENT = np.dtype(
    [("clock", "i8"), ("bytes", "i8"), ("memory", "i8"), ("kind", "i4"), ("index", "i4")]
)
_COUNTS = ("materialized", "evicted", "first_clock", "last_clock", "resident_ns")
STORAGE = np.dtype([(name, "i8") for name in _COUNTS])
OPERATION = np.dtype([("executions", "i8"), ("executions_by_model", "i8")])

_CHANGES = [EVENT_KINDS.index("compute"), EVENT_KINDS.index("evict")]
_MOST_LOCKED_IN_JSON = 32
_MOST_LOCKED_IN_TEXT = 5


@dataclass(frozen=True)
class LockedStorage:
    """A storage that could not be evicted: its number, the name of its root tensor, its bytes."""

    storage: int
    name: str
    bytes: int


@dataclass(frozen=True)
class LockedSet:
    """The storages that could not be evicted at a moment.

    Attributes
    ----------
    execution
        Number of executions of operations before it.
    clock
        The clock, ns.
    command
        Number of commands of the log before it.
    bytes
        Their size in all.
    count
        Number of storages.
    storages
        They, largest first.
    """

    execution: int
    clock: int
    command: int
    bytes: int
    count: int
    storages: tuple[LockedStorage, ...]

    def describe(self) -> str:
        """Return the set as text, its largest storages one by one."""
        lines = [
            f"{self.count} storage{'' if self.count == 1 else 's'} of {format_bytes(self.bytes)} "
            f"in all could not be evicted (locked or pinned), after {self.execution} executions"
        ]
        shown = self.storages[:_MOST_LOCKED_IN_TEXT]
        lines += [f"  {storage.name}: {format_bytes(storage.bytes)}" for storage in shown]
        if self.count > len(shown):
            lines.append(f"  and {self.count - len(shown)} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class Failure:
    """Place and reason of a simulation that ended early.

    Attributes
    ----------
    kind
        "oom": an operation did not fit beside what could not be evicted. "thrash":
        rematerializations took more time than the limit.
    operation
        Name of the operation that was being run.
    tensor
        Name of its first output.
    needed_bytes
        Size of its outputs.
    memory_bytes
        Bytes that were in memory.
    locked
        The moment, and what could not be evicted then.
    """

    kind: str
    operation: str
    tensor: str
    needed_bytes: int
    memory_bytes: int
    locked: LockedSet

    @property
    def command(self) -> int:
        """The command of the log that failed, from 0."""
        return self.locked.command

    @property
    def clock(self) -> int:
        """The clock at the failure, ns."""
        return self.locked.clock

    def describe(self) -> str:
        """Return the failure as text."""
        where = f"at command {self.command}, clock {self.clock} ns"
        if self.kind == "oom":
            first = (
                f"out of memory {where}: {self.operation} (making {self.tensor}) needs "
                f"{format_bytes(self.needed_bytes)} beside {format_bytes(self.memory_bytes)} that "
                "cannot be evicted"
            )
        else:
            first = (
                f"rematerializations passed their limit {where}: in {self.operation} (making "
                f"{self.tensor}), with {format_bytes(self.memory_bytes)} in memory"
            )
        return f"{first}\n{self.locked.describe()}"


@dataclass(frozen=True)
class Result(Saved):
    """The answer of `rotor.simrd.simulate`.

    Attributes
    ----------
    log
        Name of the log.
    heuristic, runtime, no_dealloc, seed, overhead_limit
        The setting.
    rebuild_classes_every, sample, ignore_small
        The rest of it.
    ratio
        The budget as a part of the baseline's memory, where it was given so.
    budget
        Bytes; None for no budget.
    base_compute
        Time of the log without rematerialization, ns.
    status
        "ok", "oom" (out of memory) or "thrash" (`overhead_limit` was exceeded). A failed run has
        the figures at its end.
    clock
        Time at the end, ns; it began at 1.
    model_compute, remat_compute
        Time of executions by the model, and of rematerializing ones, ns.
    max_memory
        The most bytes in memory.
    const_memory, bottleneck_memory
        Bytes of constants, and of the outputs and inputs of the largest operation.
    n_evict
        Evictions, eager releases included.
    n_remat, n_model_ops
        Rematerializing executions, and executions by the model.
    n_eval
        Evaluations of the heuristic.
    n_access
        Accesses to storages' metadata that the published algorithms would have made; None unless
        they were counted.
    max_locked_bytes, max_locked_execution
        The most bytes that could not be evicted, and after how many executions that was so first.
    memory_bytes
        Memory of the simulation itself.
    failure
        None where the run is ok.
    storages
        With ``stats=True``: times that each storage came to memory (``materialized``) and went
        (``evicted``), its ``first_clock`` and ``last_clock`` (-1 for never), and the time that it
        spent in memory (``resident_ns``); of the storages that were made.
    operations
        With ``stats=True``: ``executions`` and ``executions_by_model`` of each operation.
    events
        With ``trace=True``: ``clock``, ``kind`` (a number of `EVENT_KINDS`), ``index`` (a tensor
        for "compute", "pending", "pressure", else a storage), ``bytes``, and ``memory`` after it.
    rerun
        Runs the simulation again for `largest_locked`; None in a result that was loaded.
    """

    log: str
    heuristic: str
    runtime: str
    no_dealloc: bool
    seed: int
    ratio: float | None
    budget: int | None
    overhead_limit: float
    rebuild_classes_every: int
    sample: bool
    ignore_small: bool
    base_compute: int
    status: str
    clock: int
    model_compute: int
    remat_compute: int
    max_memory: int
    const_memory: int
    bottleneck_memory: int
    n_evict: int
    n_remat: int
    n_model_ops: int
    n_eval: int
    n_access: int | None
    max_locked_bytes: int
    max_locked_execution: int
    memory_bytes: int
    failure: Failure | None = None
    storages: npt.NDArray[Any] | None = field(default=None, compare=False, repr=False)
    operations: npt.NDArray[Any] | None = field(default=None, compare=False, repr=False)
    events: npt.NDArray[Any] | None = field(default=None, compare=False, repr=False)
    rerun: Callable[[], LockedSet] | None = field(default=None, compare=False, repr=False)

    @property
    def slowdown(self) -> float:
        """(base + rematerializing) / base compute time."""
        return _quotient(self.base_compute + self.remat_compute, self.base_compute)

    @property
    def overhead(self) -> float:
        """The clock at the end / base compute time, as published: 1 ns more than was computed."""
        return _quotient(self.clock, self.base_compute)

    def largest_locked(self) -> LockedSet:
        """Largest set of storages that could not be evicted: the least memory that this run needs.

        Runs the simulation again up to that moment.

        Raises
        ------
        ValueError
            The result was loaded, or comes from another process: it has no log any more.
        """
        if self.rerun is None:
            raise ValueError(
                "largest_locked() runs the simulation again, and this result came without its log; "
                "call simulate() again with the same setting"
            )
        return self.rerun()

    def timeline(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (clock, memory): ns and bytes at every moment at which memory changes.

        Raises
        ------
        ValueError
            The simulation ran without a trace.
        """
        if self.events is None:
            raise ValueError("the timeline is read from the trace: simulate with trace=True")
        changes = self.events[np.isin(self.events["kind"], _CHANGES)]
        clock, after = changes["clock"], changes["memory"]
        before = np.concatenate([np.zeros(1, np.int64), after[:-1]])
        peak = np.where(changes["kind"] == 0, before + changes["bytes"], after)
        # Outputs that already exist are in memory twice for a moment.
        twice = 1 + (peak != after)
        clock, memory = np.repeat(clock, twice), np.repeat(after, twice)
        memory[(np.cumsum(twice) - twice)[twice == 2]] = peak[twice == 2]
        return clock, memory

    def describe(self) -> str:
        """Return the result as text."""
        budget = "no budget" if self.budget is None else f"budget {format_bytes(self.budget)}"
        if self.ratio is not None:
            budget += f" ({self.ratio:g} of the baseline)"
        dealloc = ", releases ignored" if self.no_dealloc else ""
        seconds = format_seconds(self.remat_compute * 1e-9)
        lines = [
            f"{self.log or 'log'}: {self.heuristic} on {self.runtime}{dealloc}, {budget}: "
            f"{self.status}",
            f"slow-down {self.slowdown:.4f}: {self.n_remat} rematerializations took {seconds} "
            f"beside {format_seconds(self.model_compute * 1e-9)} of the model",
            f"memory {format_bytes(self.max_memory)} at most, {self.n_evict} evictions, "
            f"{self.n_eval} evaluations of the heuristic",
        ]
        if self.failure is not None:
            lines.append(self.failure.describe())
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rerun": None}

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON, without telemetry; of locked storages the largest 32."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for name in _FIELDS:
            data[name] = getattr(self, name)
        if math.isinf(self.overhead_limit):
            data["overhead_limit"] = None
        if self.failure is not None:
            failure = dataclasses.asdict(self.failure)
            failure["locked"]["storages"] = failure["locked"]["storages"][:_MOST_LOCKED_IN_JSON]
            data["failure"] = failure
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Result:
        """Return the result that `to_dict` wrote, without telemetry.

        Raises
        ------
        ValueError
            The data is of another format or version, or a field is missing, unknown or wrong; the
            message says which.
        """
        fields = dict(check_header(data, FORMAT, VERSION))
        _check_fields("a simulation", fields, _TYPES)
        if fields["overhead_limit"] is None:
            fields["overhead_limit"] = math.inf
        if fields["status"] not in ("ok", "oom", "thrash"):
            raise ValueError(f"status is {fields['status']!r}, expected ok, oom or thrash")
        if (fields["status"] == "ok") != (fields["failure"] is None):
            raise ValueError(
                f"status is {fields['status']!r} and failure is {fields['failure']!r}: a failure "
                "goes with a status other than ok"
            )
        if fields["failure"] is not None:
            fields["failure"] = _load_failure(fields["failure"])
        return cls(**fields)


_FIELDS = [
    f.name
    for f in dataclasses.fields(Result)
    if f.name not in ("storages", "operations", "events", "rerun")
]
_SPECIAL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("log", "heuristic", "runtime", "status"), (str,)),
    **dict.fromkeys(("no_dealloc", "sample", "ignore_small"), (bool,)),
    **dict.fromkeys(("ratio", "overhead_limit"), (float, int, type(None))),
    **dict.fromkeys(("budget", "n_access"), (int, type(None))),
    "failure": (dict, type(None)),
}
_TYPES = {name: _SPECIAL.get(name, (int,)) for name in _FIELDS}
_FAILURE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kind", "operation", "tensor"), (str,)),
    **dict.fromkeys(("needed_bytes", "memory_bytes"), (int,)),
    "locked": (dict,),
}
_LOCKED_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("execution", "clock", "command", "bytes", "count"), (int,)),
    "storages": (list, tuple),
}
_LOCKED_STORAGE_TYPES = {"storage": (int,), "name": (str,), "bytes": (int,)}


def _quotient(numerator: int, denominator: int) -> float:
    if denominator:
        return numerator / denominator
    return math.inf if numerator else 1.0


def _check_fields(what: str, fields: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    if not isinstance(fields, dict):
        raise ValueError(f"{what} must be an object, got {fields!r}")
    if missing := [name for name in types if name not in fields]:
        raise ValueError(f"{what} needs the field {missing[0]!r}, and it is missing")
    if unknown := sorted(set(fields) - set(types)):
        raise ValueError(f"{what} has no field {unknown[0]!r}")
    for name, expected in types.items():
        value = fields[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            wanted = " or ".join(t.__name__ for t in expected)
            raise ValueError(f"{name} of {what} is {value!r}, expected {wanted}")


def _load_failure(data: Any) -> Failure:
    _check_fields("a failure", data, _FAILURE_TYPES)
    _check_fields("a locked set", data["locked"], _LOCKED_TYPES)
    for entry in data["locked"]["storages"]:
        _check_fields("a locked storage", entry, _LOCKED_STORAGE_TYPES)
    storages = tuple(LockedStorage(**entry) for entry in data["locked"]["storages"])
    return Failure(**{**data, "locked": LockedSet(**{**data["locked"], "storages": storages})})


_COLUMNS = [name for name in _FIELDS if name != "failure"]


def results_to_csv(results: Iterable[Result], path: str | os.PathLike[str]) -> None:
    """Write results as a table, one row each.

    Columns are the fields of `Result` (empty for None, failures left out), then ``slowdown`` and
    ``overhead``. The file is written as a whole or not at all.

    Parameters
    ----------
    results
        In the order of the rows.
    path
        The file.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*_COLUMNS, "slowdown", "overhead"])
    for result in results:
        row = [getattr(result, name) for name in _COLUMNS]
        writer.writerow([*row, result.slowdown, result.overhead])
    write_text(buffer.getvalue(), Path(path))
