"""Segments, no recomputation, everything recomputed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from random_chains import chains, random_chain, realistic_chain

from rotor.algorithms import ChenSqrt, Floating, NoCheckpoint, RecomputeAll, get
from rotor.algorithms.chen_sqrt import segment_sequence
from rotor.chain import Chain
from rotor.errors import InfeasibleError

NS = 1e-9
ALL: list[Any] = [NoCheckpoint(), RecomputeAll(), ChenSqrt(), ChenSqrt("sqrt")]


def small(n: int) -> Chain:
    return Chain([NS] * n, [2 * NS] * n, [1] * (n + 1), [3] * n, [0] * n, [0] * n)


def test_the_schedules_in_words() -> None:
    chain = small(3)
    assert str(NoCheckpoint().solve(chain, 100)) == "Fe_0 Fe_1 Fe_2 L B_2 B_1 B_0"
    assert str(RecomputeAll().solve(chain, 100)) == "Fck_0 Fn_1 Fe_2 L B_2 Fck_0 Fe_1 B_1 Fe_0 B_0"
    assert str(segment_sequence(chain, 1)) == "Fe_0 Fe_1 Fe_2 L B_2 B_1 B_0"
    assert str(segment_sequence(chain, 2)) == "Fck_0 Fe_1 Fe_2 L B_2 B_1 Fe_0 B_0"
    assert str(segment_sequence(chain, 3)) == "Fck_0 Fck_1 Fe_2 L B_2 Fe_1 B_1 Fe_0 B_0"
    assert (
        str(segment_sequence(small(5), 2))
        == "Fck_0 Fn_1 Fe_2 Fe_3 Fe_4 L B_4 B_3 B_2 Fe_0 Fe_1 B_1 B_0"
    )


def test_times_are_those_of_the_definitions() -> None:
    for n in range(1, 20):
        chain = small(n)
        plain = NoCheckpoint().solve(chain, 10**6)
        assert plain.makespan == pytest.approx(chain.ideal_time)
        again = RecomputeAll().solve(chain, 10**6)
        assert again.makespan == pytest.approx((3 * n + n * (n - 1) // 2) * NS)
        for segments in range(1, n + 1):
            sequence = segment_sequence(chain, segments)
            forwards = sequence.count_forwards()
            first_of_last = (segments - 1) * n // segments
            assert forwards == {i: 2 if i < first_of_last else 1 for i in range(n)}


def test_sqrt_is_the_published_number_of_segments() -> None:
    for n, segments in ((1, 1), (2, 1), (9, 3), (16, 4), (50, 7)):
        chain = small(n)
        assert ChenSqrt("sqrt").solve(chain, 10**6) == segment_sequence(chain, segments)
    assert ChenSqrt(4).solve(small(9), 10**6) == segment_sequence(small(9), 4)
    assert ChenSqrt(40).solve(small(9), 10**6) == segment_sequence(small(9), 9)


def test_segments_chosen_by_the_budget() -> None:
    chain = realistic_chain(random.Random(1), 30)
    curve = ChenSqrt().curve(chain)
    assert len(curve) >= 3
    for bytes_, seconds in zip(curve.bytes.tolist(), curve.seconds.tolist(), strict=True):
        assert ChenSqrt().solve(chain, bytes_).makespan == seconds
    fixed = ChenSqrt("sqrt").curve(chain)
    assert curve.at(fixed.minimum_bytes) <= fixed.seconds[0]


@settings(max_examples=200, deadline=None)
@given(chain=chains(1, 8))
def test_curve_and_solve_agree(chain: Chain) -> None:
    for algorithm in ALL:
        curve = algorithm.curve(chain)
        for bytes_, seconds in zip(curve.bytes.tolist(), curve.seconds.tolist(), strict=True):
            sequence = algorithm.solve(chain, max(1, bytes_))
            assert (sequence.peak_bytes, sequence.makespan) == (bytes_, seconds)
        if curve.minimum_bytes > 1:
            with pytest.raises(InfeasibleError, match=type(algorithm).__name__) as caught:
                algorithm.solve(chain, curve.minimum_bytes - 1)
            assert caught.value.minimum_bytes == curve.minimum_bytes


def test_none_beats_the_class_that_they_are_in() -> None:
    rng = random.Random(2)
    for _ in range(200):
        chain = random_chain(rng, 1, 6)
        for algorithm in ALL:
            for sequence in algorithm.candidates(chain):
                budget = max(1, sequence.peak_bytes)
                slots = max(1, budget - chain.x_bytes[0])
                assert Floating(slots).solve(chain, budget).makespan <= sequence.makespan


def test_of_equal_times_the_least_memory() -> None:
    """Zero-time stages: every number of segments takes as long."""
    chain = Chain([0.0] * 6, [NS] * 6, [1] * 7, [9] * 6, [0] * 6, [0] * 6)
    peaks = [segment_sequence(chain, k).peak_bytes for k in range(1, 7)]
    assert ChenSqrt().solve(chain, 1000).peak_bytes == min(peaks)
    assert len(set(peaks)) > 1


def test_what_they_refuse() -> None:
    chain = small(4)
    for wrong in (0, -1, True, 2.0, "cube"):
        with pytest.raises(ValueError, match="segments"):
            ChenSqrt(wrong)  # type: ignore[arg-type]
    for wrong_number in (0, 5):
        with pytest.raises(ValueError, match=f"between 1 and the 4 stages, got {wrong_number}"):
            segment_sequence(chain, wrong_number)
    for algorithm in ALL:
        with pytest.raises(ValueError, match="budget_bytes"):
            algorithm.solve(chain, 0)
        assert get(algorithm.name) is type(algorithm)
    assert repr(ChenSqrt()) == "ChenSqrt(segments=None)"
    assert repr(ChenSqrt("sqrt")) == "ChenSqrt(segments='sqrt')"
    assert repr(NoCheckpoint()) == "NoCheckpoint()"


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    ChenSqrt().solve(small(3), 100, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
