"""Parts whose predicted need is above the limit: another engine runs before a step is over."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from versions import needs_swaps
from zoo.models import Row

import rotor

LIMIT = 3_000_000


class Counting(torch.autograd.Function):
    """Reversal of gradients whose backward counts its calls in the class: none can be captured."""

    calls = 0

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Counting.calls += 1
        return -ctx.factor * gradient, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(Counting.apply(x, 0.3))))


class Breaking(nn.Module):
    """Captured block, and code after it that keeps more and is in no graph."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64))

    def forward(self, x):
        x = self.block(x)
        torch._dynamo.graph_break()
        for _ in range(24):
            x = torch.tanh(x)
        return x


def gradients(model, called, rows):
    model.zero_grad()
    torch.manual_seed(rows)
    called(torch.randn(rows, 64)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def models():
    torch.manual_seed(0)
    # The first block, whose input needs no gradient, is captured alone.
    return [Row(*[Block() for _ in range(4)]), Breaking()]


@needs_swaps
@pytest.mark.parametrize("model", models(), ids=lambda model: type(model).__name__)
def test_the_first_step_keeps_a_limit_that_parts_are_predicted_to_break(model):
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=LIMIT)
    with pytest.warns(rotor.MemoryLimitWarning, match=rf"limit of 2.86 MiB \({LIMIT} bytes\) is"):
        found = gradients(chk.module, chk, 768)
    assert all(map(torch.equal, found, gradients(model, model, 768)))
    assert chk.plan.engine == "dynamic"
    assert chk.plan.measured_bytes <= LIMIT
    assert "predicted need of a step" in chk.plan.why["parts"]


@needs_swaps
def test_a_larger_batch_is_handed_on_before_its_first_step():
    model = models()[0]
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=LIMIT)
    with pytest.warns(rotor.MemoryLimitWarning, match="no single graph"):
        gradients(chk.module, chk, 128)
    assert chk.plan.engine == "parts"
    with pytest.warns(rotor.MemoryLimitWarning, match="the predicted need of a step"):
        found = gradients(chk.module, chk, 768)
    assert all(map(torch.equal, found, gradients(model, model, 768)))
    assert chk.plan.engine == "dynamic"
    assert chk.plan.measured_bytes <= LIMIT
