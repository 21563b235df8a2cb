"""Random programs of random modules with the host's memory, on a device whose streams are late."""

from __future__ import annotations

import copy

import pytest
import torch
from graph_modules import Step, step
from joint_programs import random_joint_program
from random_layers import WIDTH, RandomLayers
from torch.nn import functional as F

import rotor
from rotor import graph as rg
from rotor.tier import HostTier

ROWS = 48


def ran(model, call, seed: int) -> Step:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to("sim")
    targets = (x.cos(),)

    def planned(value):
        return call(value, targets=targets)

    return step(model, planned, (x,), seed=seed, loss=lambda loss: loss)


def wrapped(model, **settings) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model,
        mem_limit="1 GB",
        engine="graph",
        loss_fn=F.mse_loss,
        planning="before",
        verify="off",
        verbosity=0,
        **settings,
    )


def check(sim, seed: int, programs: int) -> int:
    """Number of fetches in programs that were bit-equal, within their peak, and without a race."""
    torch.manual_seed(seed)
    model = RandomLayers(seed).to("sim")
    twin, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    reference = ran(twin, wrapped(twin), seed)
    tier = HostTier()
    tier.least_bytes = 1
    chk = wrapped(model, offload=tier)
    x = torch.randn(ROWS, WIDTH, device="sim")
    captured = chk.measure(x, targets=(x.cos(),))
    graph, races = captured.graph(0), sim.races()
    sizes = [storage.bytes for storage in graph.storages]
    fetches = 0
    for k in range(programs):
        drop, share = 0.2 * (k % 4), 1.0 - 0.25 * (k % 3)
        actions = random_joint_program(captured.lowered, sizes, 100 * seed + k, drop, share)
        chk.load_plan(rg.Program(graph, actions, captured.link))
        model.load_state_dict(start)
        found = ran(model, chk, seed)
        assert reference.differences(found) == [], (model.kinds, seed, k)
        assert chk.plan.program.actions.tolist() == actions
        assert chk.plan.measured_bytes <= chk.plan.predicted_bytes, (model.kinds, seed, k)
        assert sim.races() == races, (sim.last_race(), seed, k)
        fetches += sum(a >= len(graph) + len(graph.storages) for a in actions)
    tier.close()
    torch._dynamo.reset()
    return fetches


def test_a_dozen_programs(sim):
    assert check(sim, 0, 12) > 50


@pytest.mark.slow
def test_a_thousand_programs(sim):
    assert sum(check(sim, seed, 25) for seed in range(3, 43)) > 5000
