"""Test for operations that do not repeat: two runs from the same state, compared bit by bit.

An operation that draws from PyTorch's default generator repeats when the generator's state is
restored. An operation that differs all the same is never computed again: its outputs are kept. So
are the outputs of an operation that could not be run, unless it is PyTorch's own.

On an accelerator, events tell the order of the allocations and frees within an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core, devices, profiler
from rotor.common.checksums import (
    EMPTY_OPERATORS,
    PARTLY_WRITTEN,
    UNSPECIFIED_OUTPUTS,
    checksum,
)
from rotor.engines.graph.tracing.fetches import is_collective
from rotor.engines.graph.tracing.lowering import Lowered, Task, tensors_by_path
from rotor.graph.blocks import RESULT

UNTESTED, TESTED, DRAWS, DIFFERS, NOT_RUN = 0, 1, 2, 4, 8
"""Flags of an operation: it ran twice; drew from the default generator; gave other bits;
could not run on made-up arguments."""

_NAMED = ("aten", "rotor_cudnn")
_OWN_NAMESPACES = (*_NAMED, "prims", "prim", "mkldnn", "mkl", "quantized", "torchvision")
_UNSPECIFIED = UNSPECIFIED_OUTPUTS | {"running_mean_out", "running_var_out"}
"""With new running statistics, which a repetition computes from changed ones, and discards."""

_MOST_NAMES = 3


def _name_of(target: Any) -> str:
    return str(getattr(target, "__name__", target)).split(".")[0]


def is_empty(target: Any) -> bool:
    """Return whether an operator of PyTorch's returns memory that it never wrote."""
    return getattr(target, "namespace", "") == "aten" and _name_of(target) in EMPTY_OPERATORS


def is_unspecified(node: fx.Node, path: Sequence[int]) -> bool:
    """Return whether the output at a path may hold memory that its operation never wrote."""
    if getattr(node.target, "namespace", "") not in _NAMED:
        return False
    if is_empty(node.target):
        return True
    if path and (_name_of(node.target), path[0]) in PARTLY_WRITTEN:
        return True
    names = core.schema_return_names(node.target)
    return bool(path) and path[0] < len(names) and names[path[0]] in _UNSPECIFIED


def _sums(node: fx.Node, result: Any) -> list[Any]:
    return [
        (tuple(tensor.shape), str(tensor.dtype), checksum(tensor))
        for path, tensor in tensors_by_path(result)
        if tensor.layout == torch.strided and not is_unspecified(node, path)
    ]


def _read(sums: list[Any]) -> list[Any]:
    return [(*rest, int(one)) for *rest, one in sums]


def tested(task: Task, call: Callable[[], Any], device: torch.device) -> int:
    """Run an operation twice, by `call`, from the same state and arguments; return its flags."""
    assert task.node is not None
    cpu = torch.device("cpu")
    states = {here: devices.generator_of(here).get_state() for here in {device, cpu}}
    first = _sums(task.node, call())
    drawn = {
        here
        for here, state in states.items()
        if not torch.equal(state, devices.generator_of(here).get_state())
    }
    for here, state in states.items():
        devices.generator_of(here).set_state(state)
    again = _sums(task.node, call())
    flags = TESTED
    if drawn:
        flags |= DRAWS
    # Only the generator of the step's own device is restored when an operation runs again.
    if drawn - {device} or _read(first) != _read(again):
        flags |= DIFFERS
    return flags


def _is_own(target: Any) -> bool:
    """Return whether an operation is PyTorch's own; these repeat unless they are tagged."""
    namespace = getattr(target, "namespace", None)
    return namespace is None or namespace in _OWN_NAMESPACES


def keep_unrepeatable(lowered: Lowered, flags: Iterable[int]) -> None:
    """Mark operations that draw numbers, and those that must not run twice, by their flags."""
    lowered.unrepeatable.clear()
    for task, found in zip(lowered.tasks, flags, strict=True):
        if task.node is None or is_collective(task.node):
            continue
        is_unknown = not found & TESTED and not _is_own(task.node.target)
        if found & DIFFERS or is_unknown:
            task.random, task.once = False, True
            lowered.unrepeatable.append(task)
        elif found & DRAWS and not task.once:
            task.random = True


def keep_from_now_on(lowered: Lowered, tasks: Sequence[Task]) -> None:
    """Mark operations that gave other bits in a step, and others of the same custom operators."""
    targets = [task.node.target for task in tasks if task.node is not None]
    custom = [target for target in targets if not _is_own(target)]
    for task in lowered.tasks:
        is_alike = task.node is not None and task.node.target in custom
        if (is_alike or any(task is one for one in tasks)) and not task.once:
            task.random, task.once = False, True
            lowered.unrepeatable.append(task)


def described_unrepeatable(graphs: Iterable[Lowered]) -> str:
    """Return a warning about operations that are never recomputed, although plans could use it.

    Gradients of parameters, which are kept anyway, are not mentioned.
    """
    found: dict[str, None] = {}
    for lowered in graphs:
        for task in lowered.unrepeatable:
            if any(not lowered.storages[s][1] for s in task.made.values()):
                assert task.node is not None
                place = f"module {task.module!r}" if task.module else "the model"
                found[f"{task.node.target} in {place}"] = None
    if not found:
        return ""
    names = list(found)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (
        "operations that do not repeat bit for bit, or could not be tested, are never computed "
        f"again, and what they make is kept: {', '.join(names[:_MOST_NAMES])}{more}. Operators "
        "that draw from torch's default generator, or nothing at random, can be computed again"
    )


Orders = tuple[tuple[int, ...], ...]
"""Possible orders within an operation (`rotor.graph.blocks.Orders`); none where it is not known.

Events have no addresses: of several blocks of one size, the latest or the earliest may be the one
that is freed. Where both choices give the same order, it is listed once.
"""


def events_of(runs: Iterable[Callable[[], Any]], device: torch.device) -> list[list[int]]:
    """Return the events of runs on an accelerator: bytes of allocated blocks, negative for freed.

    Results are freed after their run.
    """
    trace = profiler.AllocationTrace(device_type=device.type)
    trace.start()
    try:
        for run in runs:
            trace.mark("begin")
            result = run()
            trace.mark("end")
            del run, result
    finally:
        events = trace.stop()
    sizes = events.nbytes.tolist()
    begun = [pair for pair in pairwise(events.marks) if pair[0].name == "begin"]
    return [sizes[begin.position : end.position] for begin, end in begun]


def orders_within(events: Sequence[int], made: Sequence[int]) -> Orders:
    """Return the possible orders within an operation that makes storages of known sizes."""
    found = [_order(events, made, latest=latest) for latest in (True, False)]
    if None in found:
        return ()
    return tuple(order for order in dict.fromkeys(found) if order is not None)


def _order(events: Sequence[int], made: Sequence[int], *, latest: bool) -> tuple[int, ...] | None:
    """Return one order; ``None`` if a result is not among the allocated blocks that stay."""
    sizes: list[int] = []
    entries: list[int] = []
    live: list[int] = []
    for nbytes in events:
        if nbytes > 0:
            live.append(len(sizes))
            entries.append(len(sizes))
            sizes.append(nbytes)
            continue
        same = [k for k in live if sizes[k] == -nbytes]
        if same:  # Otherwise a block from before the operation is freed.
            freed = same[-1] if latest else same[0]
            live.remove(freed)
            entries.append(-1 - freed)
    results: dict[int, int] = {}
    for number, nbytes in enumerate(made):
        fitting = [k for k in live if sizes[k] >= nbytes and k not in results]
        if nbytes and not fitting:
            return None
        if nbytes:
            results[min(fitting, key=lambda k: (sizes[k], k))] = number
    gone = {k for k in live if k not in results}
    places = {k: p for p, k in enumerate(k for k in range(len(sizes)) if k not in gone)}
    return tuple(
        -1 - places[-1 - entry]
        if entry < 0
        else RESULT + results[entry]
        if entry in results
        else sizes[entry]
        for entry in entries
        if entry not in gone
    )
