"""Choice between PyTorch's operators and Inductor's kernels, by measurement (``backend="auto"``).

A kernel whose operators, run one by one, are faster and need no more memory runs as these. The
graph of kernels is taken if it is faster, and no limit that it can keep has a faster program of
PyTorch's own operators. No limit has a part in the choices, which are kept: all limits give the
same bits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rotor.common import cache
from rotor.common.frames import release
from rotor.common.progress import progress
from rotor.engines.graph.capture import Capture, Unplanned
from rotor.engines.graph.code.pricing import build_graph
from rotor.engines.graph.costs.glance import profile
from rotor.engines.graph.costs.profile import Cost, environment_of, keys_of
from rotor.engines.graph.costs.repeating import DIFFERS, NOT_RUN
from rotor.engines.graph.tracing.groups import Group, Operators, groups_among
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import CaptureError
from rotor.graph import planner
from rotor.graph.graph import Graph
from rotor.graph.program import Program
from rotor.timing import is_single

logger = logging.getLogger("rotor")

_KIND = "choices"
"""Table on disk: 1 for a kernel that runs as its operators, and for a graph of kernels."""

POINTS = 8
"""Limits at which the programs of two graphs are compared."""

_FASTER = 0.95
"""Ratio of times from which operators are faster than their kernel."""

_SLOWER = 1.01
"""Ratio of times from which a program is slower than another one."""

_GAIN = 0.97
"""Mean ratio of times up to which kernels are faster, whatever the errors of measurement."""

made_here: dict[tuple[str, str], int] = {}
"""Choices of this process, by environment and name."""

Found = tuple[Capture, Unplanned]


def _kept(environment: str) -> dict[str, int]:
    """Return the choices that were made in an environment, by name."""
    kept = {name: row[0] for name, row in cache.load(_KIND, environment).items() if len(row) == 1}
    return kept | {name: made for (where, name), made in made_here.items() if where == environment}


def _keep(environment: str, choices: dict[str, int]) -> None:
    made_here.update({(environment, name): made for name, made in choices.items()})
    if choices and not is_single():
        cache.store(_KIND, environment, {name: [made] for name, made in choices.items()})


class Choices:
    """Backends that were chosen for the kinds of calls of one model."""

    def __init__(self) -> None:
        self._backends: dict[Any, str] = {}
        self.texts: dict[Any, str] = {}
        """Choices as text, by the kind of call."""

    def known(self, kind: Any) -> str:
        """Return the backend that was chosen for a kind of call; empty before."""
        return self._backends.get(kind, "")

    def of(
        self, kind: Any, plain: Found, device: torch.device, compiled: Callable[[], Found]
    ) -> Found:
        """Return the capture to run: `plain`, or that of kernels, which `compiled` makes.

        The inputs of the other one are dropped.
        """
        try:
            return self._of(kind, plain, device, compiled)
        except BaseException:
            plain[1].drop()
            raise

    def _of(
        self, kind: Any, plain: Found, device: torch.device, compiled: Callable[[], Found]
    ) -> Found:
        lowered, primals = plain[1].captured.lowered, plain[1].primals
        environment = environment_of(device)
        digest = hashlib.sha256("\n".join(keys_of(lowered, device)).encode()).hexdigest()
        kept = _kept(environment).get(digest)
        if kept == 0:
            return self._take(kind, "fx", "as kept on disk", plain)
        other: Found | None = None
        try:
            other = compiled()
            choose_groups(other[1].captured.lowered, device, other[1].primals)
        except CaptureError as error:
            if other is not None:
                other[1].drop()
            reason = str(error).splitlines()[-1]
            release(error)
            return self._take(kind, "fx", f"Inductor has no kernels for them: {reason}", plain)
        if kept == 1:
            return self._take(kind, "inductor", "as kept on disk", other, plain)
        pairs = ((lowered, primals), (other[1].captured.lowered, other[1].primals))
        with progress(1, "comparing operators with kernels"):
            first, second = (build_graph(one, profile(one, device, p), 0) for one, p in pairs)
            ratios = ratios_of((first, second))
        is_faster = max(ratios) <= _SLOWER and sum(ratios) / len(ratios) <= _GAIN
        _keep(environment, {digest: int(is_faster)})
        text = f"kernels take {min(ratios):.3f} to {max(ratios):.3f} of the operators' time"
        if is_faster:
            return self._take(kind, "inductor", text, other, plain)
        return self._take(kind, "fx", text, plain, other)

    def _take(
        self, kind: Any, backend: str, reason: str, taken: Found, left: Found | None = None
    ) -> Found:
        if left is not None:
            left[1].drop()
        self._backends[kind] = backend
        name = "Inductor's kernels" if backend == "inductor" else "PyTorch's operators"
        unfused = [
            target
            for task in taken[1].captured.lowered.tasks
            if isinstance(target := task.node and task.node.target, Operators)
        ]
        some = f", {len(set(unfused))} of them as their operators" if unfused else ""
        self.texts[kind] = f'backend="auto" took {name}{some}: {reason}'
        logger.info("%s", self.texts[kind])
        return taken


def choose_groups(lowered: Lowered, device: torch.device, primals: Sequence[Any] = ()) -> None:
    """Have those kernels of a graph run as their operators that are faster so."""
    environment = environment_of(device)
    groups = groups_among(task.node for task in lowered.tasks)
    kept = _kept(environment)
    new = [group for group in groups if repr(group) not in kept]
    if new:
        with progress(1, "comparing kernels with their operators"):
            chosen = _chosen(lowered, new, device, primals)
        _keep(environment, chosen)
        kept |= chosen
    _exchange(lowered, {g: Operators(g) for g in groups if kept[repr(g)] == 1})


def _chosen(
    lowered: Lowered, groups: Sequence[Group], device: torch.device, primals: Sequence[Any]
) -> dict[str, int]:
    """Return 1 for each group that is faster as its operators, else 0, by name."""
    compiled = _costs(lowered, device, primals)
    apart = {group: Operators(group) for group in groups if group.can_part}
    _exchange(lowered, apart)
    try:
        parted = _costs(lowered, device, primals)
    finally:
        _exchange(lowered, {operators: group for group, operators in apart.items()})
    return {
        repr(group): int(group in apart and is_better(parted[apart[group]], compiled[group]))
        for group in groups
    }


def _exchange(lowered: Lowered, others: dict[Any, Any]) -> None:
    """Have the operations of a graph call other functions."""
    for task in lowered.tasks:
        if task.node is not None and isinstance(task.node.target, Group | Operators):
            task.node.target = others.get(task.node.target, task.node.target)


def _costs(lowered: Lowered, device: torch.device, primals: Sequence[Any]) -> dict[Any, Cost]:
    """Return the measured costs of a graph's operations, by function."""
    costs = profile(lowered, device, primals)
    pairs = zip(lowered.tasks, costs, strict=True)
    return {task.node.target: cost for task, cost in pairs if task.node is not None}


def is_better(parted: Cost, compiled: Cost) -> bool:
    """Return whether operators one by one are faster than their kernel, and need no more."""
    is_same = parted.made_bytes == compiled.made_bytes
    is_small = parted.workspace_bytes <= compiled.workspace_bytes
    repeats = not parted.flags & (DIFFERS | NOT_RUN)
    return is_same and is_small and repeats and parted.ns <= _FASTER * compiled.ns


def ratios_of(graphs: tuple[Graph, Graph]) -> list[float]:
    """Return ratios of the times of two graphs' programs, the second over the first, at limits.

    They go from the least limit that both can keep to that without recomputation.
    """
    ends = [planner.curve(graph, 2, effort="fast").bytes for graph in graphs]
    least, most = max(end[0] for end in ends), max(end[-1] for end in ends)
    limits = np.geomspace(most, least, POINTS).astype(np.int64).clip(least).tolist()
    first, second = (_times(graph, limits) for graph in graphs)
    return [theirs / ours for theirs, ours in zip(second, first, strict=True)]


def _times(graph: Graph, limits: Sequence[int]) -> list[int]:
    """Return the times of programs within falling limits."""
    program: Program | None = None
    found = []
    for limit in limits:
        program = planner.plan(graph, limit, effort="fast", start=program)
        found.append(program.time_ns)
    return found
