"""Random programs of random modules through the whole engine, on a real disk, metered."""

from __future__ import annotations

import copy

import pytest
import torch
from graph_modules import Step, step
from joint_programs import random_joint_program
from limited_models import UNLIMITED
from random_layers import WIDTH, RandomLayers
from torch.nn import functional as F

import rotor
from rotor import graph as rg

SECTOR, ROWS = 512, 48


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    tier = rotor.DiskTier(tmp_path_factory.mktemp("tier"))
    tier.least_bytes = 1
    yield tier
    tier.close()


def ran(model, call, seed: int) -> Step:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    targets = (x.cos(),)

    def planned(value):
        return call(value, targets=targets)

    return step(model, planned, (x,), seed=seed, loss=lambda loss: loss)


def wrapped(model, **settings) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model,
        mem_limit=UNLIMITED,
        engine="graph",
        loss_fn=F.mse_loss,
        planning="before",
        verify="off",
        verbosity=0,
        **settings,
    )


def check(seed: int, programs: int, disk: rotor.DiskTier) -> int:
    """Number of fetches in programs that were bit-equal, and as large as predicted."""
    torch.manual_seed(seed)
    model = RandomLayers(seed)
    twin = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    reference = ran(twin, wrapped(twin), seed)
    chk = wrapped(model, offload=disk)
    x = torch.randn(ROWS, WIDTH)
    captured = chk.measure(x, targets=(x.cos(),))
    graph = captured.graph(0)
    sizes = [storage.bytes for storage in graph.storages]
    fetches = 0
    for k in range(programs):
        drop, share = 0.2 * (k % 4), 1.0 - 0.25 * (k % 3)
        actions = random_joint_program(captured.lowered, sizes, 100 * seed + k, drop, share)
        program = rg.Program(graph, actions, captured.link)
        chk.load_plan(program)
        model.load_state_dict(start)
        found = ran(model, chk, seed)
        assert reference.differences(found) == [], (model.kinds, seed, k)
        plan = chk.plan
        number = sum(a >= len(graph) + len(graph.storages) for a in actions)
        assert plan.program.actions.tolist() == actions
        difference = plan.predicted_bytes - plan.measured_bytes
        # Workspaces of operators that run again are the largest of several measurements.
        assert difference >= 0, (model.kinds, seed, k)
        assert plan.recomputed or difference <= SECTOR * max(number, 1), (model.kinds, seed, k)
        fetches += number
    torch._dynamo.reset()
    return fetches


@pytest.mark.parametrize("seed", range(3))
def test_dozens_of_programs(seed, disk):
    assert check(seed, 12, disk) > 50


@pytest.mark.slow
def test_a_thousand_programs(disk):
    assert sum(check(seed, 25, disk) for seed in range(3, 43)) > 5000
