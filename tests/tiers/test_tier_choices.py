"""The choice among ways to run each part, under a limit of memory and one of a second tier."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor.errors import InfeasibleError
from rotor.graph.assembly import Bases, Option, choose, fastest_of, least_bytes, simulate

sizes = st.integers(0, 40)
ways = st.builds(Option, sizes, sizes, sizes, sizes, sizes, st.integers(0, 2000))
alone = st.builds(Option, sizes, sizes, sizes, sizes)


@st.composite
def assemblies(draw):
    pieces = [[draw(alone), *draw(st.lists(ways, max_size=3))] for _ in range(draw(sizes) % 4)]
    count = len(pieces)

    def base(length):
        return tuple(draw(st.lists(st.integers(0, 40), min_size=length, max_size=length)))

    return pieces, Bases(base(count), base(count), base(count + 1))


@settings(max_examples=150, deadline=None)
@given(assemblies(), st.integers(0, 60), st.integers(0, 90))
def test_the_choice_is_the_best_within_both_limits(assembly, room, tier_limit):
    pieces, bases = assembly

    def cost(choice):
        return sum(options[k].cost_ns for options, k in zip(pieces, choice, strict=True))

    every = list(itertools.product(*(range(len(options)) for options in pieces)))
    priced = [(simulate(pieces, bases, choice), cost(choice)) for choice in every]
    possible = [one for one in priced if one[0].tier_bytes <= tier_limit]
    least = min(found.peak_bytes for found, _ in possible)
    assert least <= least_bytes(pieces, bases, tier_limit) <= least + least // 1000 + 1
    limit = least + room
    choice = choose(pieces, bases, limit, tier_limit)
    found = simulate(pieces, bases, choice)
    assert found.tier_bytes <= tier_limit
    assert found.peak_bytes <= limit
    assert cost(choice) == min(c for other, c in possible if other.peak_bytes <= limit)


@settings(max_examples=60, deadline=None)
@given(assemblies(), st.integers(0, 90))
def test_less_than_the_least_is_refused(assembly, tier_limit):
    pieces, bases = assembly
    least = least_bytes(pieces, bases, tier_limit)
    if least:
        with pytest.raises(InfeasibleError) as caught:
            choose(pieces, bases, least - 2, tier_limit)
        assert caught.value.minimum_bytes == least


def test_many_alike_parts_share_a_limited_tier():
    """All or none of the parts would be far from the limit: some of them offload."""
    part = [Option(100, 100, 100, 1000), Option(0, 100, 100, 1300), Option(0, 100, 100, 1050, 90)]
    nothing = (0,) * 12
    bases = Bases(nothing, nothing, (*nothing, 0))
    for most, offloading in ((0, 0), (450, 5), (5000, 10)):
        choice = choose([part] * 12, bases, 200, most)
        assert choice.count(2) == offloading
        assert simulate([part] * 12, bases, choice).peak_bytes <= 200


def test_of_ways_that_are_as_fast_the_one_that_moves_less_is_taken():
    part = [Option(50, 50, 50, 1000, 90, 5000), Option(50, 50, 50, 1000)]
    assert fastest_of(part) == 1
    bases = Bases((0,), (0,), (0, 0))
    assert choose([part], bases, 100) == [1]
