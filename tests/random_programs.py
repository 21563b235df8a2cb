"""Random programs of random modules, on any device and tier."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from graph_modules import Step, step
from joint_programs import random_joint_program
from random_layers import WIDTH, RandomLayers
from torch.nn import functional as F

import rotor
from rotor import graph as rg
from rotor.tier import Tier

ROWS = 48
MOST = "200 MB"


class Ran(NamedTuple):
    """Plan of a program that has run, its fetches, and the seed and number that made it."""

    plan: Any
    fetches: int
    made_by: tuple[list[str], int, int]


def ran(model, call, seed: int, device: str) -> Step:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
    targets = (x.cos(),)

    def planned(value):
        return call(value, targets=targets)

    return step(model, planned, (x,), seed=seed, loss=lambda loss: loss)


def wrapped(model, **settings) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model,
        mem_limit=MOST,
        engine="graph",
        loss_fn=F.mse_loss,
        planning="before",
        verify="off",
        verbosity=0,
        **settings,
    )


def run_programs(seed: int, programs: int, tier: Tier, device: str = "cpu") -> Iterator[Ran]:
    """Programs of one random module, each after a step of it that was bit-equal."""
    torch.manual_seed(seed)
    model = RandomLayers(seed).to(device)
    twin, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    reference = ran(twin, wrapped(twin), seed, device)
    chk = wrapped(model, offload=tier)
    x = torch.randn(ROWS, WIDTH, device=device)
    captured = chk.measure(x, targets=(x.cos(),))
    graph = captured.graph(0)
    sizes = [storage.bytes for storage in graph.storages]
    for k in range(programs):
        drop, share = 0.2 * (k % 4), 1.0 - 0.25 * (k % 3)
        actions = random_joint_program(captured.lowered, sizes, 100 * seed + k, drop, share)
        chk.load_plan(rg.Program(graph, actions, captured.link))
        model.load_state_dict(start)
        found, made_by = ran(model, chk, seed, device), (model.kinds, seed, k)
        assert reference.differences(found) == [], made_by
        assert chk.plan.program.actions.tolist() == actions
        fetches = sum(a >= len(graph) + len(graph.storages) for a in actions)
        yield Ran(chk.plan, fetches, made_by)
    torch._dynamo.reset()
