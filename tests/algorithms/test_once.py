"""Stages that may run only once: every solver against searches that leave their forwards out."""

from __future__ import annotations

import random

import pytest
from oracles import exhaustive
from oracles import floating as floating_oracle
from oracles.machine import Costs, Op, Production, best_of_grammar, run
from random_chains import random_chain, realistic_chain

from rotor.algorithms import (
    ChenSqrt,
    Floating,
    Griewank,
    GriewankHeterogeneous,
    NoCheckpoint,
    Persistent,
    RecomputeAll,
    Sequence,
)
from rotor.chain import Chain
from rotor.errors import InfeasibleError, InvalidSequenceError

NS = 1e-9


def with_once(chain: Chain, rng: random.Random) -> Chain:
    once = [rng.random() < 0.4 for _ in range(len(chain))]
    return Chain.from_dict(chain.to_dict() | {"once": once})


def is_permitted(ops: list[Op], once: list[bool]) -> bool:
    return not any(kind in ("Fn", "Fck") and once[i] for kind, i in ops)


def expected_frontier(chain: Chain) -> list[tuple[int, int]]:
    costs = Costs.of(chain)
    points: list[tuple[int, int]] = []
    permitted = [
        ops for ops in exhaustive.schedules(costs.n, 0, costs.n) if is_permitted(ops, chain.once)
    ]
    for peak, time in sorted(run(costs, ops)[::-1] for ops in permitted):
        if not points or time < points[-1][1]:
            points.append((peak, time))
    return points


def test_exact_curve_and_slots_are_the_best_of_what_is_permitted() -> None:
    rng = random.Random(4)
    restricted = 0
    for _ in range(250):
        free = random_chain(rng, 1, 5)
        chain = with_once(free, rng)
        expected = expected_frontier(chain)
        curve = Persistent().curve(chain)
        assert list(curve.bytes) == [peak for peak, _ in expected]
        assert [round(s / NS) for s in curve.seconds] == [time for _, time in expected]
        restricted += expected != exhaustive.frontier(Costs.of(free))
        for peak, time in expected[:3]:
            for algorithm in (Persistent(), Persistent(max(1, peak - chain.x_bytes[0]))):
                found = algorithm.solve(chain, max(peak, 1))
                assert round(found.makespan / NS) == time
                assert found.peak_bytes <= max(peak, 1)
        least = expected[0][0]
        if least > 1:
            for algorithm in (Persistent(), Persistent(8)):
                with pytest.raises(InfeasibleError) as caught:
                    algorithm.solve(chain, least - 1)
                assert caught.value.minimum_bytes == least
    assert restricted > 60


def test_floating_is_the_best_of_its_class_that_is_permitted() -> None:
    rng = random.Random(5)
    compared = 0
    for _ in range(200):
        chain = with_once(random_chain(rng, 1, 4), rng)
        costs = Costs.of(chain)

        def permitted(n: int, *task: int, once: list[bool] = chain.once) -> list[Production]:
            return [
                made
                for made in floating_oracle.productions(n, *task)
                if is_permitted(made[0], once)
            ]

        most = next(NoCheckpoint().candidates(chain)).peak_bytes
        for budget in {rng.randint(1, most + 1) for _ in range(3)}:
            best = best_of_grammar(costs, budget, (0, 0, costs.n), permitted)
            algorithm = Floating(max(1, budget - chain.x_bytes[0]))
            if best is None:
                with pytest.raises(InfeasibleError):
                    algorithm.solve(chain, budget)
            else:
                assert round(algorithm.solve(chain, budget).makespan / NS) == best[0]
                compared += 1
    assert compared > 60


def test_long_chains_keep_what_runs_once() -> None:
    rng = random.Random(6)
    chain = realistic_chain(rng, 60)
    once = [i % 13 == 5 for i in range(60)]
    marked = Chain.from_dict(chain.to_dict() | {"once": once})
    curve = Persistent().curve(marked)
    budget = int(curve.bytes[len(curve.bytes) // 3])
    for algorithm in (Persistent(), Persistent(500)):
        sequence = algorithm.solve(marked, budget)
        counts = sequence.count_forwards()
        assert all(counts[i] == 1 for i, flag in enumerate(once) if flag)
        assert max(counts.values()) > 1
        assert sequence.peak_bytes <= budget
    assert curve.minimum_bytes > Persistent().curve(chain).minimum_bytes


def test_simulator_refuses_a_second_run() -> None:
    chain = Chain([1, 1], [1, 1], [1, 1, 1], [2, 2], [0, 0], [0, 0], once=[True, False])
    Sequence.parse("Fe_0 Fn_1 L Fe_1 B_1 B_0", chain)
    with pytest.raises(InvalidSequenceError, match="only once"):
        Sequence.parse("Fck_0 Fe_1 L B_1 Fe_0 B_0", chain)


def test_algorithms_without_a_permitted_schedule_say_so() -> None:
    chain = Chain(
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1] * 5,
        [2] * 4,
        [0] * 4,
        [0] * 4,
        names=list("abcd"),
        once=[False, True, False, False],
    )
    for algorithm in (RecomputeAll(), Griewank(), GriewankHeterogeneous(), ChenSqrt(4)):
        with pytest.raises(ValueError, match=r"stage b .*only once"):
            algorithm.solve(chain, 1000)
        with pytest.raises(ValueError, match=r"stage b .*only once"):
            algorithm.curve(chain)
    assert set(ChenSqrt().solve(chain, 1000).count_forwards().values()) == {1}
    last = Chain.from_dict(chain.to_dict() | {"once": [False, False, False, True]})
    assert GriewankHeterogeneous().solve(last, 1000).count_forwards()[3] == 1


def test_flags_are_checked_and_stored() -> None:
    chain = Chain([1], [1], [1, 1], [1], [0], [0], once=[True])
    assert Chain.from_json(chain.to_json()) == chain
    assert "once" not in Chain([1], [1], [1, 1], [1], [0], [0]).to_dict()
    with pytest.raises(ValueError, match="once has 2 entries, expected 1"):
        Chain([1], [1], [1, 1], [1], [0], [0], once=[True, False])
