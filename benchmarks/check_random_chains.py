"""Check the persistent solvers on as many random chains as wanted; stops at the first error.

Run as ``python benchmarks/check_random_chains.py --count 1000000 --seed 1``, or with ``--minutes``.
For each chain of one to four stages, against every persistent schedule priced by the simulator:

- the exact solver has exactly the best (bytes, time) of all schedules;
- the least memory is the least of all, and its schedule attains it;
- on slots, at random budgets, a schedule exists if one does, keeps the budget, is not too good.

Of every 50th chain also: both simulators agree on all schedules; each point of the exact solver has
a schedule with its figures; where the published recurrence keeps its limit it is not better.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracles import exhaustive, published
from oracles.machine import Costs, run
from random_chains import budgets, large_temporaries, random_chain

from rotor import Chain, InfeasibleError, _core
from rotor.algorithms import Persistent, Sequence

AMPLE = 1 << 32
Codes = npt.NDArray[np.int32]


@cache
def all_codes(n: int) -> list[Codes]:
    """Every persistent schedule of n stages, as the core reads it."""
    return [Sequence(ops).codes for ops in exhaustive.schedules(n, 0, n)]


def best_of(priced: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those (bytes, ns) that no other beats."""
    points: list[tuple[int, int]] = []
    for peak, ns in sorted(priced):
        if not points or ns < points[-1][1]:
            points.append((peak, ns))
    return points


def solve(algorithm: Persistent, chain: Chain, budget: int) -> Sequence | InfeasibleError:
    """A schedule, or why there is none."""
    try:
        return algorithm.solve(chain, budget)
    except InfeasibleError as error:
        return error


def check(chain: Chain, rng: random.Random, thorough: bool, counts: dict[str, int]) -> None:
    """Every check on one chain; AssertionError where one fails."""
    core = chain.core
    priced = [core.simulate(codes)[1::-1] for codes in all_codes(len(chain))]
    points = best_of(priced)
    least = points[0][0]
    table = _core.frontier(core, AMPLE, None)
    found: Any = table.curve()
    sizes, times = (np.frombuffer(values, dtype=np.int64).tolist() for values in found)
    assert list(zip(sizes, times, strict=True)) == points
    minimum, codes = _core.persistent_minimum(core, least, AMPLE, None)
    assert minimum == least
    assert codes is not None
    assert core.simulate(codes)[1] == least
    for budget in [*budgets(rng, chain, 1), max(1, least - 1), max(1, least)]:
        within = [ns for peak, ns in points if peak <= budget]
        room = budget - chain.x_bytes[0]
        slots = rng.choice([1, 2, 5, 17, 60, 500, room if 0 < room < 2000 else 100])
        sequence = solve(Persistent(slots), chain, budget)
        if isinstance(sequence, InfeasibleError):
            assert not within
            assert sequence.minimum_bytes == least
            counts["infeasible"] += 1
            continue
        ns = core.simulate(sequence.codes)[0]
        assert sequence.peak_bytes <= budget
        assert within[-1] <= ns
        if slots == room:
            assert within[-1] == ns
        counts["on slots"] += 1
    if thorough:
        check_thoroughly(chain, points, counts)


def check_thoroughly(chain: Chain, points: list[tuple[int, int]], counts: dict[str, int]) -> None:
    """The slow checks: plain Python, and the published recurrence."""
    costs = Costs.of(chain)
    assert exhaustive.frontier(costs) == points
    algorithm = Persistent()
    for peak, ns in points:
        sequence = algorithm.solve(chain, max(1, peak))
        assert run(costs, [(op.kind, op.stage) for op in sequence]) == (ns, peak)
    counts["thorough"] += 1
    plain = not any(chain.pgrad_bytes) and min(costs.b_tmp) >= 0 <= costs.loss_tmp
    if chain.hold_output or costs.grad != costs.x or costs.fe_tmp != costs.fn_tmp or not plain:
        return
    for budget in range(1, 2 * points[-1][0] + 2, max(1, points[-1][0] // 8)):
        theirs = published.solve(costs, budget)
        if theirs is None:
            continue
        ns, peak = run(costs, theirs[1])
        counts["published"] += 1
        if peak > budget:
            counts["published over its limit"] += 1
            continue
        best = [time for size, time in points if size <= budget][-1]
        assert best <= ns
        counts["published beaten"] += best < ns


def draw(rng: random.Random) -> Chain:
    """One chain; a tenth each have large temporaries or keep to the published model."""
    kind = rng.randrange(10)
    if kind == 0:
        return large_temporaries(rng, rng.randint(3, 4))
    scale = rng.choice([1, 1, 7, 1000, 1 << 20])
    return random_chain(rng, 1, 4, published=kind == 1, scale=scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    counts = dict.fromkeys(
        (
            "on slots",
            "infeasible",
            "thorough",
            "published",
            "published over its limit",
            "published beaten",
        ),
        0,
    )
    begin = time.monotonic()
    done = 0
    while done < arguments.count and time.monotonic() - begin < 60 * arguments.minutes:
        chain = draw(rng)
        try:
            check(chain, rng, done % 50 == 0, counts)
        except AssertionError:
            print(f"chain {done} of seed {arguments.seed} fails:\n{chain.to_json()}")
            raise
        done += 1
    print(f"{done} chains, no error, {time.monotonic() - begin:.0f} s; of these:")
    for name, number in counts.items():
        print(f"  {name}: {number}")


if __name__ == "__main__":
    main()
