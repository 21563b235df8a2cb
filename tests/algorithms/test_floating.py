"""Floating against its recurrence, a search over its class, and a search over everything."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import floating as oracle
from oracles.machine import Costs, best_of_all, run
from random_chains import budgets, chains, random_chain, realistic_chain

from rotor.algorithms import Floating, NoCheckpoint, Persistent, Sequence, get
from rotor.chain import Chain
from rotor.errors import InfeasibleError

NS = 1e-9


def everything(chain: Chain) -> Sequence:
    return next(NoCheckpoint().candidates(chain))


def solve(chain: Chain, budget: int, slots: int) -> Sequence | int:
    """A schedule, or the least budget in which there is one."""
    try:
        return Floating(slots).solve(chain, budget)
    except InfeasibleError as error:
        return error.minimum_bytes


def least_bytes(chain: Chain) -> int:
    """The least budget of the class; 0 where a byte is enough."""
    answer = solve(chain, 1, 1)
    return answer if isinstance(answer, int) else 0


def interesting_budget(rng: random.Random, chain: Chain) -> int:
    """Mostly between the least memory and that of no recomputation."""
    low = least_bytes(chain)
    return max(1, rng.randint(low - 1, max(low, everything(chain).peak_bytes) + 1))


def nanoseconds(chain: Chain, budget: int, slots: int) -> float:
    answer = solve(chain, budget, slots)
    if isinstance(answer, int):
        assert answer > budget
        return oracle.INFINITE
    assert answer.peak_bytes <= budget
    return round(answer.makespan / NS)


def check_against_search(seed: int, count: int, n_max: int) -> None:
    """Slots of one byte: the optimum of the class, by search over its grammar."""
    rng = random.Random(seed)
    feasible = recomputing = 0
    for _ in range(count):
        chain = random_chain(rng, 1, n_max)
        costs = Costs.of(chain)
        budget = interesting_budget(rng, chain)
        found = oracle.best_of_class(costs, budget)
        expected = oracle.INFINITE if found is None else found[0]
        assert oracle.recurrence(costs, budget - costs.x[0]) == expected
        got = nanoseconds(chain, budget, max(1, budget - costs.x[0]))
        assert got == expected, (chain.to_json(), budget)
        feasible += found is not None
        recomputing += oracle.INFINITE > expected > round(chain.ideal_time / NS)
    assert feasible > count / 2
    assert recomputing > count / 10


def test_equals_search_over_its_class() -> None:
    check_against_search(1, 900, 4)


@pytest.mark.slow
def test_equals_search_over_its_class_long() -> None:
    check_against_search(2, 30_000, 4)
    check_against_search(3, 1_000, 5)


def check_on_slots(seed: int, count: int) -> None:
    """On any number of slots, never slower than the recurrences on as many."""
    rng = random.Random(seed)
    feasible = 0
    for _ in range(count):
        chain = random_chain(rng, 1, 4)
        costs = Costs.of(chain)
        memory = interesting_budget(rng, chain) - costs.x[0]
        if memory < 1:
            continue
        slots = rng.choice([1, 2, 5, 11, 30, 100])
        got = nanoseconds(chain, memory + costs.x[0], slots)
        floating = oracle.recurrence(costs, memory, slots=slots)
        persistent = oracle.recurrence(costs, memory, slots=slots, persistent=True)
        assert oracle.recurrence(costs, memory) <= got <= floating <= persistent
        feasible += persistent < oracle.INFINITE
    assert feasible > count / 10


def test_never_slower_than_persistent_on_as_many_slots() -> None:
    check_on_slots(4, 1000)


def test_never_slower_than_persistent_in_bytes() -> None:
    rng = random.Random(11)
    feasible = 0
    for _ in range(500):
        chain = random_chain(rng, 1, 8)
        budget = interesting_budget(rng, chain)
        try:
            persistent = Persistent().solve(chain, budget).makespan
        except InfeasibleError:
            continue
        slots = max(1, budget - chain.x_bytes[0])
        assert Floating(slots).solve(chain, budget).makespan <= persistent
        feasible += 1
    assert feasible > 250


def test_no_sequence_at_all_beats_it_often() -> None:
    """Every sequence that the simulator accepts is tried: the class leaves next to nothing out."""
    rng = random.Random(5)
    feasible = missed = 0
    for _ in range(400):
        chain = random_chain(rng, 1, 4)
        costs = Costs.of(chain)
        budget = interesting_budget(rng, chain)
        found = best_of_all(costs, budget)
        got = nanoseconds(chain, budget, max(1, budget - costs.x[0]))
        if found is None:
            assert got == oracle.INFINITE
            continue
        sequence = Sequence(found[1], chain)
        assert run(costs, found[1]) == (round(sequence.makespan / NS), sequence.peak_bytes)
        assert found[0] <= got
        feasible += 1
        missed += found[0] < got
    assert feasible > 200
    assert missed <= feasible / 100


def floats() -> Chain:
    """Zero-time backwards, gradients as large as activations, nothing held: 6 bytes."""
    return Chain(
        [3 * NS, 1 * NS, 2 * NS, 1 * NS],
        [0.0] * 4,
        [0, 1, 2, 1, 1],
        [3, 2, 1, 2],
        [0] * 4,
        [0] * 4,
        hold_output=False,
    )


def test_a_checkpoint_moves_where_no_persistent_schedule_can() -> None:
    sequence = Floating(6).solve(floats(), 6)
    assert str(sequence) == "Fck_0 Fck_1 Fn_2 Fe_3 L B_3 Fn_1 Fe_2 B_2 Fck_0 Fe_1 B_1 Fe_0 B_0"
    assert sequence.makespan == pytest.approx(17 * NS)
    assert sequence.peak_bytes == 6
    costs = Costs.of(floats())
    assert oracle.recurrence(costs, 6, persistent=True) == 20
    assert oracle.recurrence(costs, 6) == 17


def test_large_forward_temporaries_stay_within_the_budget() -> None:
    """Where the published conditions let a second Fe_0 reach 18 bytes of 17."""
    chain = Chain(
        [1 * NS, 4 * NS, 1 * NS],
        [3 * NS, 1 * NS, 1 * NS],
        [1, 2, 3, 1],
        [3, 4, 6],
        [11, 1, 5],
        [0, 2, 1],
        hold_output=False,
    )
    for slots in (16, 17, 500):
        assert Floating(slots).solve(chain, 17).peak_bytes <= 17


@settings(max_examples=300, deadline=None)
@given(chain=chains(1, 7), slots=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_any_chain_any_budget(chain: Chain, slots: int, seed: int) -> None:
    for budget in budgets(random.Random(seed), chain):
        answer = solve(chain, budget, slots)
        if isinstance(answer, int):
            assert answer > budget
            assert Floating(slots).solve(chain, answer).peak_bytes == answer
        else:
            assert answer.peak_bytes <= budget
            assert answer.makespan >= chain.ideal_time * (1 - 1e-12)


@pytest.mark.parametrize("slots", [1, 7, 500])
def test_nothing_is_recomputed_where_everything_fits(slots: int) -> None:
    rng = random.Random(6)
    for _ in range(20):
        chain = realistic_chain(rng, rng.randint(1, 12))
        plain = everything(chain)
        assert Floating(slots).solve(chain, plain.peak_bytes).makespan == plain.makespan


def test_curve_reaches_from_the_least_memory_to_no_recomputation() -> None:
    rng = random.Random(7)
    chain = realistic_chain(rng, 14)
    plain = everything(chain)
    curve = Floating(100).curve(chain)
    assert curve.minimum_bytes == least_bytes(chain)
    assert curve.bytes[-1] <= plain.peak_bytes
    assert curve.seconds[-1] == plain.makespan
    assert len(curve) > 20
    for _ in range(20):
        chain = random_chain(rng, 1, 6)
        curve = Floating(30).curve(chain)
        assert curve.minimum_bytes == least_bytes(chain)
        assert curve.at(max(1, everything(chain).peak_bytes)) == pytest.approx(chain.ideal_time)


def test_more_slots_come_closer() -> None:
    chain = realistic_chain(random.Random(8), 16)
    budget = int(0.4 * everything(chain).peak_bytes)
    times = [Floating(slots).solve(chain, budget).makespan for slots in (10, 100, 1000)]
    assert times[2] <= times[1] <= times[0]
    assert times[2] < times[0]
    assert Floating(10).solve(chain, budget, mem_slots=1000).makespan == times[2]
    assert Floating(10).solve(chain, f"{budget} B").makespan == times[0]


def test_what_it_refuses() -> None:
    chain = floats()
    for wrong in (0, -3, True, 2.5, None):
        with pytest.raises(ValueError, match="mem_slots"):
            Floating(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mem_slots"):
        Floating().solve(chain, 6, mem_slots=0)
    with pytest.raises(ValueError, match="budget_bytes"):
        Floating().solve(chain, 0)
    with pytest.raises(InfeasibleError, match=r"Floating .* 5 bytes.* 6 bytes") as caught:
        Floating().solve(chain, 5)
    assert caught.value.minimum_bytes == 6
    long = realistic_chain(random.Random(9), 30)
    for ask in (lambda algo: algo.solve(long, "8 GB"), lambda algo: algo.curve(long)):
        with pytest.raises(MemoryError, match=r"500 memory slots .* 30 stages .* 1048576 b"):
            ask(Floating(max_table_bytes=1 << 20))
    assert repr(Floating()) == "Floating(mem_slots=500)"
    assert get("floating") is Floating


def test_progress_is_told_and_may_stop() -> None:
    chain = realistic_chain(random.Random(10), 70)
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        Floating(1000).solve(chain, everything(chain).peak_bytes // 3, progress=progress)
    assert np.all(np.diff([done for done, _ in told]) >= 0)
    assert all(0 <= done <= total for done, total in told)
