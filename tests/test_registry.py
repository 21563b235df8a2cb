"""What every algorithm in the registry owes, whatever it computes: a new one is tested here."""

from __future__ import annotations

import random

import pytest
from random_chains import budgets, random_chain

from rotor import algorithms
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain
from rotor.errors import InfeasibleError

CHAINS = 60


def chains(seed: int) -> list[tuple[Chain, list[int]]]:
    rng = random.Random(seed)
    made = []
    for _ in range(CHAINS):
        chain = random_chain(rng, 1, 6)
        made.append((chain, budgets(rng, chain)))
    return made


@pytest.mark.parametrize("name", algorithms.names())
def test_schedules_keep_the_budget_and_errors_name_the_least(name):
    algorithm = algorithms.get(name)()
    outcomes = set()
    for chain, sizes in chains(1):
        for budget in sizes:
            try:
                sequence = algorithm.solve(chain, budget)
            except InfeasibleError as error:
                least = error.minimum_bytes
                assert least > budget
                assert algorithm.solve(chain, least).peak_bytes == least
                with pytest.raises(InfeasibleError):
                    algorithm.solve(chain, least - 1)
                outcomes.add("infeasible")
            else:
                again = Sequence(sequence, chain)
                assert again.peak_bytes == sequence.peak_bytes <= budget
                assert again.makespan == sequence.makespan >= chain.ideal_time
                outcomes.add("feasible")
    assert outcomes == {"feasible", "infeasible"}


@pytest.mark.parametrize("name", algorithms.names())
def test_the_ends_of_the_curve_are_exact(name):
    algorithm = algorithms.get(name)()
    for chain, _ in chains(2):
        curve = algorithm.curve(chain)
        first, last = int(curve.bytes[0]), int(curve.bytes[-1])
        assert curve.minimum_bytes == first
        assert algorithm.solve(chain, first).peak_bytes == first
        assert algorithm.solve(chain, last).makespan <= curve.seconds[-1]
        if first > 1:
            with pytest.raises(InfeasibleError) as caught:
                algorithm.solve(chain, first - 1)
            assert caught.value.minimum_bytes == first
        for size in curve.bytes.tolist():
            assert algorithm.solve(chain, size).makespan <= curve.at(size) * (1 + 1e-12)


@pytest.mark.parametrize("name", algorithms.names())
def test_sequences_survive_text_and_json(name):
    algorithm = algorithms.get(name)()
    for chain, _ in chains(3)[:10]:
        sequence = algorithm.solve(chain, algorithm.curve(chain).minimum_bytes)
        assert Sequence.parse(str(sequence), chain) == sequence
        stored = Sequence.from_json(sequence.to_json())
        assert stored == sequence
        assert stored.makespan == sequence.makespan
        assert stored.peak_bytes == sequence.peak_bytes


@pytest.mark.parametrize("name", algorithms.names())
def test_progress_is_taken(name):
    chain = random_chain(random.Random(4), 6, 6)
    algorithm = algorithms.get(name)()
    budget = algorithm.curve(chain).minimum_bytes
    calls = []
    algorithm.solve(chain, budget, progress=lambda done, total: calls.append((done, total)))
    assert all(0 <= done <= total for done, total in calls)


@pytest.mark.parametrize("name", algorithms.names())
@pytest.mark.parametrize(
    "budget, kind",
    [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), (True, TypeError)],
)
def test_budgets_are_checked(name, budget, kind):
    chain = random_chain(random.Random(5), 2, 2)
    with pytest.raises(kind, match="budget_bytes"):
        algorithms.get(name)().solve(chain, budget)


@pytest.mark.parametrize("name", algorithms.names())
def test_representations_say_what_it_is(name):
    algorithm = algorithms.get(name)()
    assert repr(algorithm).startswith(f"{type(algorithm).__name__}(")
