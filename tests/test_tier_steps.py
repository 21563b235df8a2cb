"""Training steps whose programs offload: bit-equal, and as large as predicted."""

from __future__ import annotations

import copy

import pytest
import torch
from joint_programs import random_joint_program
from limited_models import UNLIMITED
from torch import nn

import rotor
from rotor import graph as rg

SECTOR = 512


class Mixed(nn.Module):
    """Dropout, BatchNorm, a multi-output operation, in-place ones, views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(5))
        self.norm = nn.BatchNorm1d(96)
        self.last = nn.LayerNorm(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norm(x) if k == 1 else x
            x = x.relu_() if k % 2 else nn.functional.gelu(x)
            x = nn.functional.dropout(x, 0.2)
            a, b = x.chunk(2, dim=1)
            top = torch.topk(x, 3, dim=1).values.sum(1, keepdim=True)
            x = torch.cat([b, a.sigmoid()], 1) + top
        return self.last(x)


@pytest.fixture(autouse=True)
def _no_compiled_code_stays():
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    tier = rotor.DiskTier(tmp_path_factory.mktemp("tier"))
    tier.least_bytes = 1
    yield tier
    tier.close()


def pair() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixed()
    return model, copy.deepcopy(model), torch.randn(64, 96)


def joint(step, seed: int, drop: float, share: float, link: rg.Link) -> rg.Program:
    graph = step.graph(0)
    sizes = [storage.bytes for storage in graph.storages]
    actions = random_joint_program(step.lowered, sizes, seed, drop, share)
    return rg.Program(graph, actions, link)


def trained(model: nn.Module, call, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    found = []
    for k in range(steps):
        torch.manual_seed(k)
        model.zero_grad(set_to_none=True)
        loss = call(x, targets=(x.sin(),))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*found, *(b.clone() for b in model.buffers())]


def graph_engine(model: nn.Module, **settings) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model,
        mem_limit=UNLIMITED,
        engine="graph",
        loss_fn=nn.functional.mse_loss,
        planning="before",
        **settings,
    )


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_equal_and_as_large_as_predicted(seed, disk):
    model, twin, x = pair()
    plain, chk = graph_engine(twin), graph_engine(model, offload=disk)
    step = chk.measure(x, targets=(x.sin(),))
    program = joint(step, seed, 0.1 * seed, 0.8, step.link)
    fetches = len(program.actions) - len(program.ops)
    assert fetches > 10
    chk.load_plan(program)
    before = disk.traffic.copy()
    assert same(trained(model, chk, x), trained(twin, plain, x))
    plan = chk.plan
    assert plan.program.actions.tolist() == program.actions.tolist()
    moved = disk.traffic.since(before)
    assert moved.written_bytes == 2 * program.offloaded_bytes > 0
    assert moved.read_bytes == 2 * program.fetched_bytes
    assert plan.predicted_bytes - SECTOR * fetches <= plan.measured_bytes <= plan.predicted_bytes
