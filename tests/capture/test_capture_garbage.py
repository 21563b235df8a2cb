"""A captured model that is deleted takes its code and its fake tensors along."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from unrepeatable import sample
from zoo.models import Residual, Row

import rotor
from rotor.engines.graph import engine


def net_of(blocks: int) -> Row:
    return Row(*(Residual(32, 64) for _ in range(blocks)))


def _left(blocks: int) -> tuple[int, int, int, int]:
    """Train a model and drop it.

    Return fake tensors, its compiled functions, its blocks, and guards of any code, that are left.
    """
    known = set(vars(engine))  # Earlier tests may have left functions.
    options = {"engine": "graph", "planning": "before", "effort": "fast"}
    model = rotor.Checkpointable(net_of(blocks), mem_limit="1 MB", **options)
    model(sample(64)).square().mean().backward()
    del model
    gc.collect()
    objects = gc.get_objects()
    return (
        sum(type(one) is FakeTensor for one in objects),
        sum(name.startswith("__compiled_fn") for name in vars(engine).keys() - known),
        sum(type(one) is Residual for one in objects),
        sum(type(one).__name__ == "CheckFunctionManager" for one in objects),
    )


@pytest.mark.parametrize("blocks", [3, 4])
def test_deleted_models_leave_nothing_that_adds_up(blocks):
    first = _left(blocks)
    for _ in range(2):
        last = _left(blocks)
    assert last[1:3] == first[1:3] == (0, 0)
    assert last[3] <= first[3]
    # PyTorch keeps a few fake tensors that have gradients.
    assert last[0] - first[0] <= 16


def test_a_backward_comes_after_the_model_is_deleted():
    torch.manual_seed(0)
    net, x = net_of(3), sample(64)
    net(x).square().mean().backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine="graph")
    loss = model(x).square().mean()
    del model
    gc.collect()
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in net.parameters()], wanted))
