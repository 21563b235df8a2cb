"""Costs of collective operations, which all ranks measure together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from rotor.common.ranks import Ranks, run_and_wait
from rotor.engines.graph.costs.profile import Arguments, Cost, isolated, keys_of
from rotor.engines.graph.costs.repeating import TESTED
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.meter import allocator

_RUNS = 4


def late_bytes(lowered: Lowered, costs: Sequence[Cost]) -> int:
    """Return the most bytes of a finished collective that a thread of gloo may still hold."""
    found = [0]
    for number in lowered.collectives:
        cost = costs[number]
        sizes = [lowered.storages[storage][0] for storage in lowered.tasks[number].inputs]
        found.append(max(cost.workspace_bytes, *sizes, *cost.made_bytes))
    return max(found)


def priced_together(
    ranks: Ranks, lowered: Lowered, costs: Sequence[Cost], device: torch.device
) -> list[Cost]:
    """Return the costs with those of collectives; every rank has captured the same operations.

    All ranks run each distinct collective a fixed number of times, in the order of the capture.
    The slowest median and the largest workspace of any rank hold for all.
    """
    keys = keys_of(lowered, device)
    first: dict[str, int] = {}
    for number in lowered.collectives:
        first.setdefault(keys[number], number)
    # Layouts may be alike on one rank and not on another.
    numbers = sorted({n for other in ranks.exchange(list(first.values())) for n in other})
    if not numbers:
        return list(costs)
    mine = _measured(lowered, numbers, device)
    everyone = zip(*ranks.exchange(mine), strict=True)
    found = {
        keys[n]: [max(c) for c in zip(*col, strict=True)]
        for n, col in zip(numbers, everyone, strict=True)
    }
    priced = list(costs)
    for number in lowered.collectives:
        ns, needed = found[keys[number]]
        workspace = max(needed - sum(costs[number].made_bytes), 0)
        priced[number] = replace(costs[number], ns=ns, workspace_bytes=workspace, flags=TESTED)
    return priced


def _measured(
    lowered: Lowered, numbers: Sequence[int], device: torch.device
) -> list[tuple[int, int]]:
    """Return the median nanoseconds, and the most bytes needed, of these collectives."""
    arguments = Arguments(lowered, ())
    arguments.are_shared = True
    times: dict[int, list[int]] = {number: [] for number in numbers}
    with isolated(device), allocator.meter(device) as meter:
        for number in numbers:
            function, args, kwargs = arguments.of(lowered.tasks[number])
            for _ in range(_RUNS):
                meter.mark(str(number))
                begun = time.perf_counter_ns()
                made = run_and_wait(function, *args, **kwargs)
                times[number].append(time.perf_counter_ns() - begun)
                meter.mark("between")
                del made
    needs = dict.fromkeys(map(str, numbers), 0)
    for segment in meter.segments:
        if segment.name in needs:
            needed = segment.peak_bytes - segment.start_bytes
            needs[segment.name] = max(needs[segment.name], needed)
    return [(sorted(times[n])[_RUNS // 2], needs[str(n)]) for n in numbers]
