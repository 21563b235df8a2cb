"""Checkmate's integer program against a search of all executions."""

from __future__ import annotations

import itertools
import random

import pytest

from rotor.algorithms._integer_program import Operations, solve

pytest.importorskip("scipy")


def peak(given: Operations, runs: list[list[int]]) -> int | None:
    """The least memory of some runs; ``None`` where a value is read that no run has made."""
    order = [(t, k) for t, stage in enumerate(runs) for k in stage]
    n = len(given.costs)
    most = 0
    last_needed: list[dict[int, int]] = []
    makes = [dict.fromkeys(given.makes[k]) for _, k in order]
    for position, (_, k) in enumerate(order):
        made_before = set(itertools.chain(*makes[:position]))
        if not set(given.reads[k]) <= made_before:
            return None
        last_needed.append(dict.fromkeys((*given.reads[k], *given.makes[k]), position))
    live: set[int] = set()
    for position, (_, k) in enumerate(order):
        new = sum(given.sizes[v] for v in given.makes[k])
        most = max(most, sum(given.sizes[v] for v in live) + new + given.workspaces[k])
        live |= set(given.makes[k])
        for v in list(live):
            if v in given.resident_from and given.resident_from[v] <= n:
                continue
            later = [p for p in range(position + 1, len(order)) if v in given.reads[order[p][1]]]
            made = [p for p in range(position + 1, len(order)) if v in makes[p]]
            if not later or (made and made[0] <= later[0]):
                live.discard(v)
    return most


def best(given: Operations, budget: int) -> int | None:
    """The least time of any execution in stages within a budget."""
    n = len(given.costs)
    choices = []
    for t in range(n):
        again = [k for k in range(t) if given.repeatable[k]]
        choices.append(
            [
                [*chosen, t]
                for size in range(len(again) + 1)
                for chosen in itertools.combinations(again, size)
            ]
        )
    times = [
        sum(given.costs[k] for stage in runs for k in stage)
        for runs in itertools.product(*choices)
        if (found := peak(given, list(runs))) is not None and found <= budget
    ]
    return min(times, default=None)


def drawn(seed: int) -> Operations:
    """Five operations with one value each, of which the last is kept and one runs only once."""
    draw = random.Random(seed)
    reads = [sorted(draw.sample(range(k), min(k, draw.randint(1, 2)))) for k in range(5)]
    reads[4] = sorted({3, *reads[4]})
    once = draw.randrange(5)
    return Operations(
        reads=reads,
        makes=[(k,) for k in range(5)],
        costs=[draw.randint(1, 9) for _ in range(5)],
        workspaces=[draw.randint(0, 3) for _ in range(5)],
        repeatable=[k != once for k in range(5)],
        sizes=[draw.randint(1, 6) for _ in range(5)],
        resident_from={4: 5},
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_answer_is_the_best_of_all_executions(seed):
    given = drawn(seed)
    times = set()
    for budget in range(4, 26):
        least = best(given, budget)
        found = solve(given, budget)
        assert found.status == ("infeasible" if least is None else "optimal")
        if found.runs is not None:
            time = sum(given.costs[k] for stage in found.runs for k in stage)
            assert time == least == round(found.bound)
            assert (peak(given, found.runs) or 0) <= budget
            times.add(time)
    assert times


def test_a_value_kept_within_another_keeps_that_one_too():
    # The second operation makes a view of the first value; the fourth reads the view.
    given = Operations(
        reads=[(), (0,), (), (0, 1)],
        makes=[(0,), (1,), (2,), (3,)],
        costs=[10, 1, 1, 1],
        workspaces=[0, 0, 3, 0],
        repeatable=[True] * 4,
        sizes=[4, 0, 1, 1],
        within={1: [0]},
    )
    kept, again = solve(given, 8), solve(given, 7)
    assert kept.runs == [[0], [1], [2], [3]]
    assert again.runs == [[0], [1], [2], [0, 1, 3]]


def test_a_resident_value_stays_from_its_stage_on():
    given = Operations(
        reads=[(), (0,), ()],
        makes=[(0,), (1,), (2,)],
        costs=[1, 1, 1],
        workspaces=[0, 0, 0],
        repeatable=[True] * 3,
        sizes=[4, 1, 4],
        resident_from={0: 3},
    )
    assert solve(given, 7).status == "infeasible"
    found = solve(given, 8)
    assert found.runs is not None
    assert found.runs[0] == [0]
