"""Random programs of random modules through the whole engine, on a real disk, metered."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from graph_modules import Step, step
from joint_programs import random_joint_program
from limited_models import UNLIMITED
from torch import nn
from torch.nn import functional as F

import rotor
from rotor import graph as rg

SECTOR, ROWS, WIDTH = 512, 48, 64
KINDS = ("linear", "dropout", "batch_norm", "layer_norm", "relu_", "chunk", "topk", "slices")


class RandomLayers(nn.Module):
    """Layers at random, of operators whose needs do not depend on where their arguments lie."""

    def __init__(self, seed: int, size: int = 9) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.kinds = [*KINDS[:4], *(rng.choice(KINDS) for _ in range(size - 4))]
        rng.shuffle(self.kinds)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(size))
        self.batch, self.layer = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, kind in zip(self.linears, self.kinds, strict=True):
            y = linear(x)
            if kind == "dropout":
                y = F.dropout(F.gelu(y), 0.3)
            elif kind == "batch_norm":
                y = self.batch(y)
            elif kind == "layer_norm":
                y = self.layer(y)
            elif kind == "relu_":
                y = F.relu_(y)
            elif kind == "chunk":
                a, b = y.chunk(2, 1)
                y = torch.cat([b.sigmoid(), a * b], 1)
            elif kind == "topk":
                values, where = torch.topk(y, 4, dim=1)
                y = x * values.sum(1, keepdim=True) + where[:, :1].float()
            elif kind == "slices":
                y = y.clone()
                y[:, 3:9].mul_(2)
            x = torch.tanh(y) + 0.5 * x
        return x


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
