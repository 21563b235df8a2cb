"""Revolve and the heterogeneous adjoint schedules against recurrences and searches."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from oracles import griewank as oracle
from oracles.machine import Costs
from random_chains import chains, random_chain, realistic_chain

from rotor.algorithms import (
    Floating,
    Griewank,
    GriewankHeterogeneous,
    NoCheckpoint,
    RecomputeAll,
    get,
)
from rotor.algorithms.griewank import revolve_sequence
from rotor.chain import Chain
from rotor.errors import InfeasibleError

NS = 1e-9


def equal_stages(n: int) -> Chain:
    """Stages of 1 ns whose tape is worth ten activations."""
    return Chain([NS] * n, [NS] * n, [1] * (n + 1), [10] * n, [0] * n, [0] * n)


def test_revolve_takes_the_least_forwards() -> None:
    for n in range(1, 31):
        chain = equal_stages(n)
        for checkpoints in range(0, 9):
            sequence = revolve_sequence(chain, checkpoints)
            forwards = sum(op.kind in ("Fn", "Fck") for op in sequence)
            assert forwards == oracle.revolve_forwards(n, checkpoints)


def test_each_tape_is_used_at_once() -> None:
    sequence = revolve_sequence(equal_stages(9), 2)
    operations = [str(op) for op in sequence]
    for i in range(8):
        assert operations[operations.index(f"Fe_{i}") + 1] == f"B_{i}"
    last = operations.index("Fe_8")
    assert operations[last : last + 3] == ["Fe_8", "L", "B_8"]
    assert (
        str(revolve_sequence(equal_stages(4), 1))
        == "Fck_0 Fck_1 Fn_2 Fe_3 L B_3 Fck_1 Fe_2 B_2 Fe_1 B_1 Fe_0 B_0"
    )


def test_no_checkpoints_is_to_recompute_all() -> None:
    for n in (1, 2, 7):
        chain = equal_stages(n)
        assert revolve_sequence(chain, 0) == next(RecomputeAll().candidates(chain))


def test_on_equal_stages_the_most_checkpoints_that_fit() -> None:
    chain = equal_stages(12)
    schedules = [revolve_sequence(chain, checkpoints) for checkpoints in range(12)]
    assert len({schedule.peak_bytes for schedule in schedules}) > 8
    for schedule in schedules:
        budget = schedule.peak_bytes
        most = max(c for c in range(12) if schedules[c].peak_bytes <= budget)
        assert Griewank().solve(chain, budget).makespan == schedules[most].makespan


def check_against_search(seed: int, count: int, n_max: int) -> None:
    rng = random.Random(seed)
    feasible = 0
    algorithm = GriewankHeterogeneous()
    for _ in range(count):
        chain = random_chain(rng, 1, n_max)
        costs = Costs.of(chain)
        curve = algorithm.curve(chain)
        top = max(curve.minimum_bytes, next(NoCheckpoint().candidates(chain)).peak_bytes)
        budget = max(1, rng.randint(curve.minimum_bytes - 1, top))
        found = oracle.best_of_class(costs, budget)
        expected = oracle.INFINITE if found is None else found[0]
        assert oracle.recurrence(costs, budget - costs.x[0]) == expected
        if found is None:
            assert budget < curve.minimum_bytes
            assert oracle.best_of_class(costs, curve.minimum_bytes) is not None
            with pytest.raises(InfeasibleError):
                algorithm.solve(chain, budget)
            continue
        sequence = algorithm.solve(chain, budget)
        assert sequence.peak_bytes <= budget
        assert round(sequence.makespan / NS) == expected
        assert sequence.makespan == curve.at(budget)
        feasible += 1
    assert feasible > count / 2


def test_heterogeneous_equals_search_over_its_class() -> None:
    check_against_search(1, 1200, 4)


@pytest.mark.slow
def test_heterogeneous_equals_search_over_its_class_long() -> None:
    check_against_search(2, 30_000, 4)
    check_against_search(3, 3_000, 6)


@settings(max_examples=200, deadline=None)
@given(chain=chains(1, 9))
def test_every_point_of_the_curves_is_simulated(chain: Chain) -> None:
    for algorithm in (GriewankHeterogeneous(), Griewank()):
        curve = algorithm.curve(chain)
        for bytes_, seconds in zip(curve.bytes.tolist(), curve.seconds.tolist(), strict=True):
            sequence = algorithm.solve(chain, max(1, bytes_))
            assert sequence.makespan == seconds
            assert sequence.peak_bytes == bytes_
        if curve.minimum_bytes > 1:
            with pytest.raises(InfeasibleError) as caught:
                algorithm.solve(chain, curve.minimum_bytes - 1)
            assert caught.value.minimum_bytes == curve.minimum_bytes


def test_heterogeneous_lies_between_revolve_and_floating() -> None:
    rng = random.Random(4)
    for _ in range(100):
        chain = random_chain(rng, 1, 6)
        exact = GriewankHeterogeneous()
        for sequence in Griewank().candidates(chain):
            budget = max(1, sequence.peak_bytes)
            time = exact.solve(chain, budget).makespan
            assert time <= sequence.makespan
            slots = max(1, budget - chain.x_bytes[0])
            assert Floating(slots).solve(chain, budget).makespan <= time


def test_what_they_refuse() -> None:
    chain = equal_stages(5)
    for wrong in (-1, True, 1.0, "2"):
        with pytest.raises(ValueError, match="checkpoints"):
            Griewank(checkpoints=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slots"):
        revolve_sequence(chain, -1)
    for algorithm in (Griewank(), GriewankHeterogeneous()):
        minimum = algorithm.curve(chain).minimum_bytes
        with pytest.raises(InfeasibleError, match=type(algorithm).__name__) as caught:
            algorithm.solve(chain, minimum - 1)
        assert caught.value.minimum_bytes == minimum
        with pytest.raises(ValueError, match="budget_bytes"):
            algorithm.solve(chain, -5)
        assert get(algorithm.name) is type(algorithm)
    with pytest.raises(MemoryError, match="5 stages needs more than the 100 bytes"):
        GriewankHeterogeneous(max_table_bytes=100).curve(chain)
    fixed = Griewank(checkpoints=2)
    assert fixed.solve(chain, "1 kB") == revolve_sequence(chain, 2)
    assert repr(fixed) == "Griewank(checkpoints=2)"
    assert repr(Griewank(np.int64(2))) == "Griewank(checkpoints=2)"
    assert Griewank(checkpoints=99).solve(chain, "1 kB") == revolve_sequence(chain, 4)


def test_progress_is_told_and_may_stop() -> None:
    chain = realistic_chain(random.Random(5), 12)
    told: list[tuple[int, int]] = []
    Griewank().curve(chain, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 12) for done in range(1, 13)]

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        GriewankHeterogeneous().curve(realistic_chain(random.Random(6), 140), progress=stop)
