"""Random programs of random modules with the host's memory, on a device whose streams are late."""

from __future__ import annotations

import pytest
from random_programs import run_programs

from rotor.tier import HostTier


def check(sim, seed: int, programs: int) -> int:
    """Number of fetches in programs that were bit-equal, within their peak, and without a race."""
    tier = HostTier()
    tier.least_bytes = 1
    fetches, races = 0, sim.races()
    for plan, number, made_by in run_programs(seed, programs, tier, "sim"):
        assert plan.measured_bytes <= plan.predicted_bytes, made_by
        assert sim.races() == races, (sim.last_race(), made_by)
        fetches += number
    tier.close()
    return fetches


@pytest.mark.slow
def test_a_dozen_programs(sim):
    assert check(sim, 0, 12) > 50


@pytest.mark.slow
def test_a_thousand_programs(sim):
    assert sum(check(sim, seed, 25) for seed in range(3, 43)) > 5000
