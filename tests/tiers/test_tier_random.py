"""Random programs of random modules through the whole engine, on a real disk, metered."""

from __future__ import annotations

import pytest
from random_programs import run_programs

import rotor

SECTOR = 512


def check(seed: int, programs: int, disk: rotor.DiskTier) -> int:
    """Number of fetches in programs that were bit-equal, and as large as predicted."""
    fetches = 0
    for plan, number, made_by in run_programs(seed, programs, disk):
        difference = plan.predicted_bytes - plan.measured_bytes
        # Workspaces of operators that run again are the largest of several measurements.
        assert difference >= 0, made_by
        assert plan.recomputed or difference <= SECTOR * max(number, 1), made_by
        fetches += number
    return fetches


@pytest.mark.parametrize("seed", range(3))
def test_dozens_of_programs(seed, disk):
    assert check(seed, 12, disk) > 50


@pytest.mark.slow
def test_a_thousand_programs(disk):
    assert sum(check(seed, 25, disk) for seed in range(3, 43)) > 5000
