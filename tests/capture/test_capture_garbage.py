"""A captured model that is deleted takes its code and its fake tensors along."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from unrepeatable import sample

import rotor
from rotor.engines.graph import engine

WIDTH = 32


class Block(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        """Return the result."""
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks that a chain does not run."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        """Return the result."""
        for block in self.blocks:
            x = block(x)
        return x


def _left(blocks: int) -> tuple[int, int, int]:
    """Train a model and drop it; return fake tensors, its compiled functions and blocks left."""
    known = set(vars(engine))  # Earlier tests may have left functions.
    model = rotor.Checkpointable(
        Net(blocks), mem_limit="1 MB", engine="graph", planning="before", effort="fast"
    )
    model(sample(64)).square().mean().backward()
    del model
    gc.collect()
    objects = gc.get_objects()
    return (
        sum(type(one) is FakeTensor for one in objects),
        sum(name.startswith("__compiled_fn") for name in vars(engine).keys() - known),
        sum(type(one) is Block for one in objects),
    )


@pytest.mark.parametrize("blocks", [3, 4])
def test_deleted_models_leave_nothing_that_adds_up(blocks):
    first = _left(blocks)
    for _ in range(2):
        last = _left(blocks)
    assert last[1:] == first[1:] == (0, 0)
    # PyTorch keeps a few fake tensors that have gradients.
    assert last[0] - first[0] <= 16


def test_a_backward_comes_after_the_model_is_deleted():
    torch.manual_seed(0)
    net, x = Net(3), sample(64)
    net(x).square().mean().backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine="graph")
    loss = model(x).square().mean()
    del model
    gc.collect()
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in net.parameters()], wanted))
