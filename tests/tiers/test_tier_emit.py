"""Emitted programs that offload, against the same graph without: bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from graph_modules import Planned, RandomNet, arguments, in_order, step
from joint_programs import MemoryTier, random_joint_program

from rotor.tier import DiskTier, Tier

SHARES = ((0.0, 1.0), (0.15, 0.7), (0.6, 0.5))
"""Shares of storages that are dropped, and of pauses that are spent in the tier."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    tier = DiskTier(tmp_path_factory.mktemp("tier"))
    yield tier
    tier.close()


def moved(lowered, actions) -> int:
    return sum(k >= len(lowered.tasks) + len(lowered.storages) for k in actions)


def check(seed: int, tier: Tier) -> int:
    """Number of fetches of programs that were equal to the plain one bit for bit."""
    torch.manual_seed(seed)
    model = RandomNet(seed)
    args, kwargs = arguments(seed), {"scale": 0.5}
    planned = Planned(model, args, kwargs)
    start = copy.deepcopy(model.state_dict())
    planned.set_program(in_order(planned.lowered))
    reference = step(model, planned, args, kwargs, seed=seed)
    fetches = 0
    for k, (drop, share) in enumerate(SHARES):
        actions = random_joint_program(planned.lowered, planned.sizes, seed + k, drop, share)
        fetches += moved(planned.lowered, actions)
        model.load_state_dict(start)
        planned.set_actions(actions, tier)
        found = step(model, planned, args, kwargs, seed=seed)
        assert reference.differences(found) == [], (model.kinds, drop, share)
    return fetches


@pytest.mark.parametrize("seed", range(8))
def test_random_modules_on_a_tier_in_memory(seed):
    tier = MemoryTier()
    assert check(seed, tier) > 5
    assert tier.areas == []


@pytest.mark.parametrize("seed", range(8, 16))
def test_random_modules_on_a_real_disk(seed, disk):
    before = disk.traffic.copy()
    fetches = check(seed, disk)
    traffic = disk.traffic.since(before)
    assert traffic.reads == fetches > 5
    assert 0 < traffic.writes <= traffic.reads
    assert traffic.read_bytes >= traffic.written_bytes > 0


@pytest.mark.slow
def test_a_thousand_random_programs_on_a_real_disk(disk):
    for seed in range(16, 350):
        check(seed, disk)
        torch._dynamo.reset()
