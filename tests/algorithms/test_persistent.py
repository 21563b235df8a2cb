"""Persistent: exhaustive search, recurrences, published schedules; budgets, slots, interruption."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import exhaustive, published, recurrence
from oracles.machine import Costs, run
from random_chains import budgets, chains, large_temporaries, random_chain, realistic_chain

from rotor import Chain, InfeasibleError, _core
from rotor.algorithms import NoCheckpoint, Persistent, Sequence

AMPLE = 1 << 32


def everything(chain: Chain) -> Sequence:
    return next(NoCheckpoint().candidates(chain))


def ns(sequence: Sequence) -> int:
    return round(sequence.makespan * 1e9)


def solve(algorithm: Persistent, chain: Chain, budget: int) -> Sequence | InfeasibleError:
    try:
        return algorithm.solve(chain, budget)
    except InfeasibleError as error:
        return error


def minimum(chain: Chain) -> int:
    return _core.persistent_minimum(chain.core, 0, AMPLE, None)[0]


def points_of(chain: Chain) -> list[tuple[int, int]]:
    points = _core.frontier(chain.core, AMPLE, None).curve()
    assert points is not None
    sizes, times = (np.frombuffer(values, dtype=np.int64).tolist() for values in points)
    return list(zip(sizes, times, strict=True))


# -- exactness


def check_frontier(chain: Chain) -> None:
    """The exact solver against every schedule, and its schedules against both simulators."""
    costs = Costs.of(chain)
    expected = exhaustive.frontier(costs)
    assert points_of(chain) == expected
    assert minimum(chain) == expected[0][0]
    algorithm = Persistent()
    for budget, time in expected:
        sequence = algorithm.solve(chain, max(1, budget))
        assert run(costs, [(op.kind, op.stage) for op in sequence]) == (time, budget)
        assert (ns(sequence), sequence.peak_bytes) == (time, budget)


def test_number_of_persistent_schedules() -> None:
    assert [len(exhaustive.schedules(n, 0, n)) for n in range(6)] == [1, 2, 6, 22, 90, 394]


@settings(max_examples=150, deadline=None)
@given(chains(1, 4))
def test_equals_exhaustive_search(chain: Chain) -> None:
    check_frontier(chain)


@pytest.mark.parametrize("scale", [1, 1000])
def test_equals_exhaustive_search_on_many(scale: int) -> None:
    rng = random.Random(scale)
    for _ in range(700):
        check_frontier(random_chain(rng, 1, 4, scale=scale))


@settings(max_examples=60, deadline=None)
@given(chains(1, 7, scale=3), st.integers(1, 400))
def test_equals_the_recurrence(chain: Chain, budget: int) -> None:
    costs = Costs.of(chain)
    expected = recurrence.best_time(costs, budget)
    found = solve(Persistent(), chain, budget)
    if isinstance(found, InfeasibleError):
        assert expected == math.inf
        assert recurrence.best_time(costs, found.minimum_bytes) < math.inf
        assert recurrence.best_time(costs, found.minimum_bytes - 1) == math.inf
    else:
        assert ns(found) == expected


@settings(max_examples=40, deadline=None)
@given(chains(1, 12))
def test_slots_of_a_byte_are_exact(chain: Chain) -> None:
    for budget, time in points_of(chain):
        if budget > chain.x_bytes[0]:
            sequence = Persistent(budget - chain.x_bytes[0]).solve(chain, budget)
            assert ns(sequence) == time


def test_never_worse_than_the_published_recurrence() -> None:
    """Where that keeps its limit; it does not always, and misses schedules that fit."""
    rng = random.Random(3)
    better = missed = over = 0
    for index in range(2500):
        if index % 2 == 0:
            chain = random_chain(rng, 1, 6, published=True)
        else:
            chain = large_temporaries(rng, rng.randint(3, 5))
        costs = Costs.of(chain)
        points = points_of(chain)
        for budget in [*budgets(rng, chain, 1), rng.choice(points)[0]]:
            found = [time for size, time in points if size <= budget]
            theirs = published.solve(costs, budget)
            if theirs is None:
                missed += bool(found)
                continue
            time, peak = run(costs, theirs[1])
            assert time == theirs[0]
            if peak > budget:
                over += 1
            else:
                assert found
                assert found[-1] <= time
                better += found[-1] < time
    assert better > 0
    assert missed > 0
    assert over > 0


def test_published_schedule_that_breaks_its_limit() -> None:
    """The smallest one known: 18 bytes within a limit of 17."""
    chain = Chain(
        [1e-9, 4e-9, 1e-9],
        [3e-9, 1e-9, 1e-9],
        [1, 2, 3, 1],
        [3, 4, 6],
        [11, 1, 5],
        [0, 2, 1],
        hold_output=False,
    )
    theirs = published.solve(Costs.of(chain), 17)
    assert theirs is not None
    assert Sequence(theirs[1], chain).peak_bytes == 18
    assert exhaustive.frontier(Costs.of(chain)) == [(17, 16), (18, 12), (19, 11)]
    assert ns(Persistent().solve(chain, 17)) == 16
    assert Persistent().solve(chain, 17).peak_bytes == 17


def test_never_worse_than_published_on_slots() -> None:
    """A need is rounded as a whole, and not term by term: the same slots, the same limit."""
    rng = random.Random(4)
    compared = 0
    for _ in range(600):
        chain = random_chain(rng, 2, 6, published=True, scale=50)
        costs = Costs.of(chain)
        room = rng.choice(points_of(chain))[0] - chain.x_bytes[0]
        slots = rng.randint(5, 60)
        unit = room // slots + 1
        limit = chain.x_bytes[0] + slots * unit
        theirs = published.solve(costs, -(-limit // unit) * unit, -(-limit // unit))
        if theirs is None or run(costs, theirs[1])[1] > limit:
            continue
        assert ns(Persistent(slots).solve(chain, limit)) <= theirs[0]
        compared += 1
    assert compared > 100


# -- slots


def check_slots(chain: Chain, budget: int, slots: int) -> None:
    best = [time for size, time in points_of(chain) if size <= budget]
    found = solve(Persistent(slots), chain, budget)
    if isinstance(found, InfeasibleError):
        assert not best
        assert found.minimum_bytes == minimum(chain) > budget
        assert str(found.minimum_bytes) in str(found)
    else:
        assert found.peak_bytes <= budget
        assert ns(found) >= best[-1]


@settings(max_examples=150, deadline=None)
@given(chains(1, 8), st.integers(1, 500), st.integers(1, 60))
def test_slots_keep_the_budget_and_find_what_exists(chain: Chain, budget: int, slots: int) -> None:
    check_slots(chain, budget, slots)


def test_slots_on_many() -> None:
    rng = random.Random(11)
    for _ in range(500):
        chain = random_chain(rng, 1, 12, scale=rng.choice([1, 100]))
        least = minimum(chain)
        for budget in [*budgets(rng, chain), least, least - 1, least + 1]:
            check_slots(chain, max(1, budget), rng.choice([1, 2, 3, 10, 77, 500]))


def test_tight_budgets_are_met_by_more_slots_or_the_least_memory() -> None:
    rng = random.Random(6)
    for n in (20, 60):
        chain = realistic_chain(rng, n)
        least = minimum(chain)
        for slots in (1, 5, 50, 500):
            for algorithm in (Persistent(slots), Persistent(exact_table_bytes=0)):
                assert algorithm.solve(chain, least).peak_bytes == least
                assert algorithm.solve(chain, least + least // 50).peak_bytes <= 1.02 * least
        with pytest.raises(InfeasibleError, match=str(least)) as error:
            Persistent(50).solve(chain, least - 1)
        assert error.value.minimum_bytes == least


def test_slots_given_in_either_place() -> None:
    chain = realistic_chain(random.Random(1), 12)
    budget = everything(chain).peak_bytes // 2
    assert Persistent(30).solve(chain, budget) == Persistent().solve(chain, budget, mem_slots=30)
    assert Persistent(3).solve(chain, budget, mem_slots=200) == Persistent(200).solve(chain, budget)


def test_stretching_uses_what_rounding_leaves() -> None:
    rng = random.Random(9)
    gained = 0
    for _ in range(5):
        chain = realistic_chain(rng, 60)
        budget = everything(chain).peak_bytes * 3 // 10
        exact = Persistent().solve(chain, budget)
        slots = Persistent(500).solve(chain, budget)
        stretched = Persistent(exact_table_bytes=0).solve(chain, budget)
        assert stretched.peak_bytes <= budget
        assert exact.makespan <= stretched.makespan <= slots.makespan
        gained += stretched.makespan < slots.makespan
    assert gained > 0


@pytest.mark.parametrize("slots", [0, -1, True, 1.5, "10", 1 << 40, float("nan")])
def test_refuses_wrong_slots(slots: Any) -> None:
    chain = realistic_chain(random.Random(1), 5)
    with pytest.raises(ValueError, match="mem_slots"):
        Persistent(slots)
    with pytest.raises(ValueError, match="mem_slots"):
        Persistent().solve(chain, 1 << 30, mem_slots=slots)


def test_refuses_tables_beyond_memory_with_the_figure() -> None:
    chain = realistic_chain(random.Random(1), 60)
    budget = everything(chain).peak_bytes // 2
    with pytest.raises(MemoryError, match=r"100000000 memory slots on a chain of 60 stages take"):
        Persistent(100_000_000).solve(chain, budget)
    with pytest.raises(MemoryError, match=r"and 50000 bytes may be used"):
        Persistent(500, max_table_bytes=50_000).solve(chain, budget)


def test_exact_where_cheap_slots_otherwise() -> None:
    chain = realistic_chain(random.Random(1), 40)
    budget = everything(chain).peak_bytes // 2
    exact = Persistent()
    assert exact.solve(chain, budget) == exact.solve(chain, budget)
    small = Persistent(exact_table_bytes=1 << 18)
    assert small.solve(chain, budget).makespan >= exact.solve(chain, budget).makespan
    assert len(exact.curve(chain)) > 50
    assert len(small.curve(chain)) < 12


# -- curves


@settings(max_examples=40, deadline=None)
@given(chains(1, 4, scale=7))
def test_exact_curve(chain: Chain) -> None:
    curve = Persistent().curve(chain)
    expected = exhaustive.frontier(Costs.of(chain))
    assert curve.bytes.tolist() == [size for size, _ in expected]
    assert curve.seconds.tolist() == pytest.approx([time * 1e-9 for _, time in expected])


def test_curve_on_slots() -> None:
    rng = random.Random(2)
    for n in (1, 2, 8, 30):
        chain = realistic_chain(rng, n)
        exact = Persistent().curve(chain)
        curve = Persistent(200).curve(chain)
        assert curve.minimum_bytes == exact.minimum_bytes
        assert curve.bytes[-1] == exact.bytes[-1] == everything(chain).peak_bytes
        assert curve.seconds[-1] == chain.ideal_time
        for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
            assert seconds >= exact.at(int(size))


def test_curve_of_nothing() -> None:
    chain = Chain([1], [1], [0, 0], [0], [0], [0])
    assert Persistent().curve(chain) == Persistent(10).curve(chain)
    assert Persistent().solve(chain, 1) == Persistent(10).solve(chain, 1)
    assert Persistent().curve(chain).minimum_bytes == 0


# -- what is kept


def test_a_new_budget_takes_no_new_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = realistic_chain(random.Random(1), 30)
    other = realistic_chain(random.Random(2), 30)
    algorithm = Persistent()
    solves = []
    frontier = _core.frontier
    monkeypatch.setattr(_core, "frontier", lambda *a: solves.append(1) or frontier(*a))
    half = everything(chain).peak_bytes // 2
    expected = algorithm.solve(chain, half)
    algorithm.solve(Chain.from_dict(chain.to_dict()), half + half // 3)
    named = Chain.from_dict({**chain.to_dict(), "names": [str(i) for i in range(30)]})
    assert algorithm.solve(named, half).chain is named
    algorithm.curve(chain)
    assert len(solves) == 1
    algorithm.solve(other, everything(other).peak_bytes // 2)
    assert len(solves) == 2
    assert algorithm.solve(chain, half) == expected
    assert len(solves) == 3


def test_copies_carry_no_table() -> None:
    chain = realistic_chain(random.Random(1), 10)
    algorithm = Persistent(exact_table_bytes=1 << 20)
    budget = everything(chain).peak_bytes * 3 // 4
    expected = algorithm.solve(chain, budget)
    for other in (copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm))):
        assert other.exact_table_bytes == 1 << 20
        assert other.solve(chain, budget) == expected
    assert repr(Persistent(7)) == "Persistent(mem_slots=7)"


def test_a_table_outlives_its_chain() -> None:
    chain = realistic_chain(random.Random(1), 20)
    budget = everything(chain).peak_bytes
    table = _core.frontier(chain.core, AMPLE, None)
    expected = bytes(table.sequence(budget))
    del chain
    gc.collect()
    assert bytes(table.sequence(budget)) == expected


# -- interruption and progress


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "algorithm", [Persistent(exact_table_bytes=1 << 40), Persistent(20_000)], ids=["exact", "slots"]
)
def test_ctrl_c(algorithm: Persistent) -> None:
    """Each would take minutes."""
    chain = realistic_chain(random.Random(1), 330)
    algorithm = copy.copy(algorithm)
    with interrupted_after(0.2), pytest.raises(KeyboardInterrupt):
        algorithm.solve(chain, everything(chain).peak_bytes // 3)
    small = realistic_chain(random.Random(1), 3)
    assert algorithm.solve(small, everything(small).peak_bytes).makespan == small.ideal_time


@pytest.mark.parametrize("algorithm", [Persistent(exact_table_bytes=1 << 40), Persistent(2000)])
def test_progress(algorithm: Persistent) -> None:
    chain = realistic_chain(random.Random(1), 300)
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 4:
            raise RuntimeError("that will do")

    with pytest.raises(RuntimeError, match="that will do"):
        algorithm.solve(chain, everything(chain).peak_bytes // 3, progress=progress)
    assert len(calls) == 4
    assert all(0 <= done <= total for done, total in calls)
    assert calls == sorted(calls)


def test_progress_of_a_curve_never_goes_back() -> None:
    chain = realistic_chain(random.Random(1), 150)
    shares: list[float] = []
    Persistent(1000).curve(chain, progress=lambda done, total: shares.append(done / total))
    assert len(shares) > 1
    assert shares == sorted(shares)


# -- the binding

ANYTHING = st.one_of(
    st.none(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-3, 3000),
    st.floats(),
    st.text(max_size=2),
    st.just(print),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["frontier", "persistent", "persistent_minimum"]),
    st.booleans(),
    chains(1, 5),
    st.lists(ANYTHING, max_size=5),
)
def test_binding_refuses_anything(
    name: str, with_chain: bool, chain: Chain, arguments: list[Any]
) -> None:
    function = getattr(_core, name)
    arguments = [chain.core, *arguments] if with_chain else arguments
    try:
        answer = function(*arguments)
    except (TypeError, ValueError, OverflowError, MemoryError):
        return
    assert answer is None or isinstance(answer, bytearray | tuple | _core.Table)


@settings(max_examples=100, deadline=None)
@given(chains(1, 5), ANYTHING)
def test_table_refuses_anything(chain: Chain, budget: Any) -> None:
    table = _core.frontier(chain.core, AMPLE, None)
    try:
        codes = table.sequence(budget)
    except (TypeError, ValueError, OverflowError):
        return
    assert Sequence(np.frombuffer(codes, np.int32).reshape(-1, 2), chain).peak_bytes <= budget


def test_tables_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="cannot create"):
        _core.Table()
    table = _core.frontier(realistic_chain(random.Random(1), 3).core, AMPLE, None)
    for arguments in ((), (1, 2)):
        with pytest.raises(TypeError, match=r"one (positional )?argument"):
            table.sequence(*arguments)


def test_nothing_leaks() -> None:
    chain = realistic_chain(random.Random(1), 6)
    budget = everything(chain).peak_bytes

    def use() -> None:
        table = _core.frontier(chain.core, AMPLE, None)
        table.sequence(budget)
        table.curve()
        with pytest.raises(InfeasibleError):
            table.sequence(1)
        with pytest.raises(MemoryError):
            _core.frontier(chain.core, 10, None)
        _core.persistent(chain.core, budget, 20, AMPLE, None)
        _core.persistent(chain.core, chain.x_bytes[0] + 1, 20, AMPLE, None)
        _core.persistent_minimum(chain.core, budget, AMPLE, None)
        _core.persistent_minimum(chain.core, 1, AMPLE, None)

    def blocks() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    for _ in range(20):
        use()
    before = blocks()
    core = chain.core
    references = sys.getrefcount(core)
    for _ in range(200):
        use()
    after = sys.getrefcount(core)
    assert after == references
    assert blocks() <= before + 20
