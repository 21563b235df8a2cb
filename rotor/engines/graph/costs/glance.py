"""Costs of operations at a glance, for a first step, and their measurement, then or later.

Each distinct operation runs twice, alone, on made-up inputs of its layout. Both runs show whether
it repeats, the second run its sizes, its workspace and a rough time. On the CPU, PyTorch's own
products, convolutions, normalizations and elementwise operations run once if they take long: the
first planned steps are verified, which proves that they repeat. A profile measures the times at
once. Otherwise, between training steps, times are measured, and operations that ran once are
tested, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from rotor.common import cache
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.graph.costs.profile import (
    Arguments,
    Cost,
    choose_kernels,
    cost_of_row,
    distinct_operations,
    environment_of,
    estimated_ns,
    found_alone,
    holds_whole_numbers,
    in_order,
    isolated,
    keys_of,
    orders_of,
    planned_bytes,
    sizes_of,
    tested_alone,
    timed,
)
from rotor.engines.graph.costs.repeating import DIFFERS, NOT_RUN, UNTESTED, tested
from rotor.engines.graph.tracing.lowering import Lowered, Task
from rotor.meter import allocator as memory
from rotor.meter.step_meter import check_idle
from rotor.timing import Clock, is_single

_KIND = "glances"
"""Table on disk of rough times."""

_LONG_NS = 100_000
_PLAIN = frozenset(
    [
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "addmm",
        "baddbmm",
        "bmm",
        "convolution",
        "convolution_backward",
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
        "mm",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
    ]
)


def glance(
    lowered: Lowered,
    device: torch.device,
    primals: Sequence[Any] = (),
    *,
    keys: Sequence[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
    proves: bool = False,
) -> tuple[list[Cost], frozenset[str]]:
    """Return the cost of every operation by a run or two, and the keys of those with rough times.

    Sizes and workspaces, and the observations of two runs, are those of a `profile`; a time is that
    of the latest run. Operations that are kept on disk are not run. `keys` are those
    of `keys_of`. With `proves`, the first planned steps are verified, and some operations run only
    once. Raise MeterBusyError if an operation has to be measured while a profiler or another meter
    runs.
    """
    keys = keys_of(lowered, device) if keys is None else keys
    distinct, known = distinct_operations(lowered, keys, device)
    rough = frozenset(key for key in distinct if key not in known)
    store = cache.load(_KIND, environment_of(device)) if rough else {}
    for key in rough:
        cost = cost_of_row(store.get(key), len(distinct[key].made))
        if cost is not None and (proves or cost.flags != UNTESTED):
            known[key] = cost
    todo = [key for key in distinct if key not in known]
    choose_kernels(distinct.values(), lowered, device, primals)
    if todo:
        check_idle(device)
        tasks = [distinct[key] for key in todo]
        with isolated(device):
            found = _glance(tasks, lowered, device, primals, progress, proves)
        known.update(zip(todo, found, strict=True))
    return in_order(lowered, keys, known), rough


def _glance(
    tasks: Sequence[Task],
    lowered: Lowered,
    device: torch.device,
    primals: Sequence[Any],
    progress: Callable[[int, int], object] | None,
    proves: bool,
) -> list[Cost]:
    arguments, clock = Arguments(lowered, primals), Clock(device)
    found: list[tuple[str, int, list[int], int] | None] = []
    with memory.meter(device) as meter:
        for index, task in enumerate(tasks):
            name = f"operation {index}"
            # None of its arguments and results is alive after a run.
            run = partial(_run, task, name, arguments, clock, device, meter, proves)
            found.append(found_alone(task, arguments, device, run))
            if progress is not None:
                progress(index + 1, len(tasks))
    segments = {segment.name: segment for segment in meter.segments}
    costs = []
    for task, row in zip(tasks, found, strict=True):
        if row is None:
            made = planned_bytes(lowered, task)
            costs.append(Cost(estimated_ns(task, device), 0, tuple(made), NOT_RUN))
            continue
        name, ns, made, flags = row
        segment = segments[name]
        workspace = max(segment.peak_bytes - segment.start_bytes - sum(made), 0)
        costs.append(Cost(ns, workspace, tuple(made), flags))
    return costs


def _is_plain(task: Task, device: torch.device) -> bool:
    """Return whether an operation is one of those that may run once."""
    assert task.node is not None
    target = task.node.target
    if device.type != "cpu" or task.random or getattr(target, "namespace", "") != "aten":
        return False
    name = str(getattr(target, "__name__", "")).split(".")[0]
    return name in _PLAIN or torch.Tag.pointwise in getattr(target, "tags", ())


def _run(
    task: Task,
    name: str,
    arguments: Arguments,
    clock: Clock,
    device: torch.device,
    meter: memory.Meter,
    proves: bool,
) -> tuple[str, int, list[int], int]:
    """Run an operation once or twice; return its name in the meter, time, sizes and flags."""
    function, args, kwargs = arguments.of(task)
    planned = planned_bytes(arguments.lowered, task)
    runs: list[tuple[str, int, list[int]]] = []

    def run() -> Any:
        segment = f"{name}, {arguments.whole}, run {len(runs) + 1}"
        meter.mark(segment)
        clock.start()
        try:
            result = function(*args, **kwargs)
        finally:
            ns = clock.stop()
            meter.mark("between")
        runs.append((segment, ns, sizes_of(task, result, (args, kwargs), planned)))
        return result

    flags = UNTESTED
    if not proves or not _is_plain(task, device):
        flags = tested(task, run, device)
    else:
        run()
        if runs[-1][1] < _LONG_NS:
            run()
    return *runs[-1], flags


class Refinement:
    """Measurement of rough times, a few operations at a time, between training steps.

    `rough` are keys of operations, out of `keys` (the result of `keys_of`), whose costs are rough.
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
        # An operation whose run has failed would fail again.
        self._todo = [(key, task) for key, task in self._todo if self._known[key].flags != NOT_RUN]
        self._todo.reverse()
        self._rows: dict[str, list[int]] = {}
        self.total = len(self._todo)
        """Number of operations to measure at the beginning."""
        self.differing: list[Task] = []
        """Operations that gave other bits in a second run, and were not known to."""
        self.wholes: dict[str, int] = {}
        """Made-up whole numbers that measured operations take (`Arguments.whole`)."""

    @property
    def left(self) -> int:
        """Number of operations that are left to measure."""
        return len(self._todo)

    def advance(self, count: int, primals: Mapping[fx.Node, Any], limit_bytes: int) -> None:
        """Measure the next `count` operations; put the random states back.

        `primals` are inputs of the joint graph, as far as they are known; they are read, not
        changed. An operation whose measurement needs more than `limit_bytes` keeps its rough time.
        """
        arguments = Arguments(self._lowered, ())
        arguments.real.update(primals)
        with isolated(self._device):
            for _ in range(min(count, len(self._todo))):
                key, task = self._todo.pop()
                known = self._known[key]
                assert task.node is not None
                made_up = _made_up_bytes(task.node, primals)
                if made_up + sum(known.made_bytes) + known.workspace_bytes > limit_bytes:
                    continue
                ns = timed(task, arguments, self._device)
                if ns is None:
                    continue
                self.wholes[key] = arguments.whole
                cost = replace(known, ns=ns)
                if cost.flags == UNTESTED:
                    cost = replace(cost, flags=tested_alone(task, arguments, self._device))
                    if cost.flags & DIFFERS:
                        self.differing.append(task)
                self._known[key] = cost
                self._rows[key] = cost.to_row()

    def costs(self) -> list[Cost]:
        """Return the present costs of all operations; the loss's is zero."""
        return in_order(self._lowered, self._keys, self._known)

    def keep_rough(self) -> None:
        """Keep the rough times of unmeasured operations on disk, for another run's glance."""
        if not is_single():
            rows = {key: self._known[key].to_row() for key, _ in self._todo}
            cache.store(_KIND, environment_of(self._device), rows)

    def keep(self) -> None:
        """Keep the measured costs on disk."""
        if self._rows and not is_single():
            cache.store("profile", environment_of(self._device), self._rows)
            self._rows = {}


def profile(
    lowered: Lowered,
    device: torch.device,
    primals: Sequence[Any] = (),
    *,
    progress: Callable[[int, int], object] | None = None,
) -> list[Cost]:
    """Return the cost of every operation, by a glance and its refinement; the loss's is zero.

    `primals` are inputs of the joint graph, if available; they are read, not changed. `progress` is
    called with (operations measured, distinct operations). Raise MeterBusyError if an operation has
    to be measured while a profiler or another meter runs. The costs are kept on disk.
    """
    keys = keys_of(lowered, device)
    costs, rough = glance(lowered, device, primals, keys=keys)
    if not rough:
        return costs
    check_idle(device)
    refinement = Refinement(lowered, device, costs, rough, keys)
    given = dict(zip(lowered.primals, primals, strict=False))
    while refinement.left:
        refinement.advance(1, given, 1 << 62)
        if progress is not None:
            progress(refinement.total - refinement.left, refinement.total)
    known = dict(zip(keys, refinement.costs(), strict=True))
    if device.type != "cpu":
        wholes = refinement.wholes
        tasks = dict(zip(keys, lowered.tasks, strict=True))
        runs = [tasks[key] for key in wholes]
        sizes = [known[key].made_bytes for key in wholes]
        with isolated(device):
            arguments = Arguments(lowered, primals)
            orders = orders_of(runs, list(wholes.values()), sizes, arguments, device)
        known.update({key: replace(known[key], orders=()) for key in rough})
        for key, found in zip(wholes, orders, strict=True):
            known[key] = replace(known[key], orders=found)
    if not is_single():
        rows = {key: known[key].to_row() for key in rough}
        cache.store("profile", environment_of(device), rows)
    return in_order(lowered, keys, known)


def _made_up_bytes(node: fx.Node, primals: Mapping[fx.Node, Any], depth: int = 1) -> int:
    """Return the bytes of an operation's arguments.

    Arguments of whole numbers are computed by their operation, whose own arguments count too.
    """
    total = 0
    for source in node.all_input_nodes:
        if source in primals:
            continue
        found = source.meta.get("val")
        for t in tree_tensors(found):
            total += memory.rounded_bytes(t.untyped_storage().nbytes(), t.device)
        if depth and holds_whole_numbers(found):
            total += _made_up_bytes(source, primals, depth - 1)
    return total
