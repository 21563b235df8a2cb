"""Costs of operations at a glance, for a first step, and their measurement while training runs.

Each distinct operation runs twice, alone, on made-up inputs of its layout. Both runs show whether
it repeats, the second one its sizes, its workspace and a rough time. Times are measured
later, a few operations between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core
from rotor.common import cache
from rotor.engines.graph.lowering import Lowered, Task
from rotor.engines.graph.profile import (
    FAILURES,
    Arguments,
    Cost,
    distinct_operations,
    environment_of,
    estimated_ns,
    holds_whole_numbers,
    in_order,
    isolated,
    keys_of,
    log_estimate,
    planned_bytes,
    sizes_of,
    timed,
)
from rotor.engines.graph.repeating import NOT_RUN, tested
from rotor.meter import allocator as memory
from rotor.meter.step_meter import check_idle
from rotor.timing import Clock, is_single

__all__ = ["Refinement", "glance"]


def glance(
    lowered: Lowered,
    device: torch.device,
    primals: Sequence[Any] = (),
    *,
    keys: Sequence[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[list[Cost], frozenset[str]]:
    """Return the cost of every operation by two runs, and the keys of those whose times are rough.

    Sizes, workspaces and the observations of the two runs are as exact as those of `profile`; a
    time is that of the second run. Operations that are kept on disk are not run.

    Parameters
    ----------
    lowered, device, primals, progress
        As of `profile`.
    keys
        Result of `keys_of`, if at hand.

    Raises
    ------
    MeterBusyError
        An operation has to be measured, and a profiler or another meter runs.
    """
    keys = keys_of(lowered, device) if keys is None else keys
    distinct, known = distinct_operations(lowered, keys, device)
    todo = [key for key in distinct if key not in known]
    if todo:
        check_idle(device)
        with isolated(device):
            found = _glance([distinct[key] for key in todo], lowered, device, primals, progress)
        known.update(zip(todo, found, strict=True))
    return in_order(lowered, keys, known), frozenset(todo)


def _glance(
    tasks: Sequence[Task],
    lowered: Lowered,
    device: torch.device,
    primals: Sequence[Any],
    progress: Callable[[int, int], object] | None,
) -> list[Cost]:
    arguments, clock = Arguments(lowered, primals), Clock(device)
    found: list[tuple[str, int, list[int], int] | None] = []
    with memory.meter(device) as meter:
        for index, task in enumerate(tasks):
            found.append(_seen_twice(task, f"operation {index}", arguments, clock, device, meter))
            if progress is not None:
                progress(index + 1, len(tasks))
    segments = {segment.name: segment for segment in meter.segments}
    costs = []
    for task, seen in zip(tasks, found, strict=True):
        if seen is None:
            made = planned_bytes(lowered, task)
            costs.append(Cost(estimated_ns(task), 0, tuple(made), NOT_RUN))
            continue
        name, ns, made, flags = seen
        segment = segments[name]
        workspace = max(segment.peak_bytes - segment.start_bytes - sum(made), 0)
        costs.append(Cost(ns, workspace, tuple(made), flags))
    return costs


class _Runs:
    """Runs of one operation on the same arguments: the second is metered and timed."""

    def __init__(
        self, task: Task, arguments: Arguments, name: str, clock: Clock, meter: memory.Meter
    ) -> None:
        self._task = task
        self._function, self._args, self._kwargs = arguments.of(task)
        self._planned = planned_bytes(arguments.lowered, task)
        self._clock = clock
        self._meter = meter
        self._count = 0
        self.name = name
        self.ns = 0
        self.sizes: list[int] = []

    def __call__(self) -> Any:
        self._count += 1
        if self._count == 1:
            return self._function(*self._args, **self._kwargs)
        self._meter.mark(self.name)
        self._clock.start()
        try:
            result = self._function(*self._args, **self._kwargs)
        finally:
            self.ns = self._clock.stop()
            self._meter.mark("between")
        self.sizes = sizes_of(self._task, result, (self._args, self._kwargs), self._planned)
        return result


def _seen_twice(
    task: Task,
    name: str,
    arguments: Arguments,
    clock: Clock,
    device: torch.device,
    meter: memory.Meter,
) -> tuple[str, int, list[int], int] | None:
    """Return the segment, time, sizes and flags of a second run; ``None`` if it does not run."""
    for arguments.whole in (0, 1):
        try:
            runs = _Runs(task, arguments, f"{name}, {arguments.whole}", clock, meter)
            flags = tested(task, runs, device)
        except torch.cuda.OutOfMemoryError:
            raise
        except FAILURES as error:
            reason = error
            continue
        return runs.name, runs.ns, runs.sizes, flags
    log_estimate(task, reason)
    return None


class Refinement:
    """Measurement of rough times, a few operations at a time, between training steps.

    Parameters
    ----------
    lowered, device
        As of `profile`.
    costs
        Costs of the operations, some of rough times.
    rough
        Keys of these.
    keys
        Result of `keys_of`.
    """

    def __init__(
        self,
        lowered: Lowered,
        device: torch.device,
        costs: Sequence[Cost],
        rough: frozenset[str],
        keys: Sequence[str],
    ) -> None:
        self._lowered = lowered
        self._device = device
        self._keys = keys
        self._known: dict[str, Cost] = {}
        self._todo: list[tuple[str, Task]] = []
        for key, task, cost in zip(self._keys, lowered.tasks, costs, strict=True):
            if key in rough and key not in self._known:
                self._todo.append((key, task))
            if key:
                self._known[key] = cost
        # A run that fails now would fail then.
        self._todo = [(key, task) for key, task in self._todo if self._known[key].flags != NOT_RUN]
        self._todo.reverse()
        self._rows: dict[str, list[int]] = {}
        self.total = len(self._todo)

    @property
    def is_done(self) -> bool:
        """True if no rough time is left."""
        return not self._todo

    def advance(self, count: int, primals: Mapping[fx.Node, Any], limit_bytes: int) -> None:
        """Measure some operations; put the random states back.

        Parameters
        ----------
        count
            Number of operations.
        primals
            Inputs of the joint graph, as far as they are known; they are read, not changed.
        limit_bytes
            Most bytes that a measurement may take: an operation that needs more keeps its time.
        """
        arguments = Arguments(self._lowered, ())
        arguments.real.update(primals)
        with isolated(self._device):
            for _ in range(min(count, len(self._todo))):
                key, task = self._todo.pop()
                if self._needed_bytes(task, self._known[key], primals) > limit_bytes:
                    continue
                ns = timed(task, arguments, self._device)
                if ns is not None:
                    self._known[key] = replace(self._known[key], ns=ns)
                    self._rows[key] = self._known[key].to_row()

    def _needed_bytes(self, task: Task, cost: Cost, primals: Mapping[fx.Node, Any]) -> int:
        """Return the bytes of an operation's made-up arguments, results and workspace."""
        assert task.node is not None
        return _made_up_bytes(task.node, primals) + sum(cost.made_bytes) + cost.workspace_bytes

    def costs(self) -> list[Cost]:
        """Return the cost of every operation as it is known now; the loss's is zero."""
        return in_order(self._lowered, self._keys, self._known)

    def keep(self) -> None:
        """Keep the measured costs on disk."""
        if self._rows and not is_single():
            cache.store("profile", environment_of(self._device), self._rows)
            self._rows = {}


def _made_up_bytes(node: fx.Node, primals: Mapping[fx.Node, Any], depth: int = 1) -> int:
    """Return the bytes of an operation's arguments, whole numbers with what makes them."""
    total = 0
    for source in node.all_input_nodes:
        if source in primals:
            continue
        found = source.meta.get("val")
        tensors = [t for t in core.tree_flatten(found)[0] if isinstance(t, torch.Tensor)]
        total += sum(memory.rounded_bytes(t.untyped_storage().nbytes(), t.device) for t in tensors)
        if depth and holds_whole_numbers(found):
            total += _made_up_bytes(source, primals, depth - 1)
    return total
