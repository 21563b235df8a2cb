"""Gradients that a loop releases between its loss and its backward, as Lightning does.

What they release is no room of the loss: the next step may keep its gradients.
"""

import pytest
import torch
from torch import nn
from zoo.models import chain

import rotor
from rotor import memory

LIMIT = 600_000


def step(model: nn.Module, *, releases: bool) -> int:
    """Peak in bytes of one step."""
    data = torch.randn(256, 64)
    old = [p.grad for p in model.parameters() if p.grad is not None]
    meter = memory.meter("cpu", existing=old)
    del old
    with meter:
        loss = model(data).square().mean()
        if releases:
            model.zero_grad()
        loss.backward()
    return meter.peak_bytes


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
def test_released_gradients_are_no_room_of_the_loss(engine):
    torch.manual_seed(0)
    model = rotor.Checkpointable(chain(), mem_limit=LIMIT, engine=engine, loss_fn=None)
    for _ in range(4):
        loss = model(torch.randn(256, 64)).square().mean()
        model.zero_grad()
        loss.backward()
    peaks = [step(model, releases=releases) for releases in (True, False, False, True)]
    assert max(peaks) <= LIMIT
    assert max(p.measured_bytes for p in model.plans.values() if p.measured_bytes) <= LIMIT


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_a_loss_is_learnt_alike_with_old_gradients_and_without(engine):
    learned = []
    for releases in (False, True):
        torch.manual_seed(0)
        model = rotor.Checkpointable(chain(), mem_limit=LIMIT, engine=engine)
        for _ in range(3):
            loss = model(torch.randn(256, 64)).square().mean()
            if releases:
                model.zero_grad()
            loss.backward()
        learned.append(
            [
                p.loss_bytes if engine == "graph" else p.chain.loss_tmp_bytes
                for p in model.plans.values()
            ]
        )
    assert learned[0] == learned[1]
