"""Outputs that the loss does not use: no gradient of them is made, planned for, or kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training import same
from zoo.models import Function

import rotor


class WithCache(nn.Module):
    """Computes its own loss, and returns what its layers made, as language models do."""

    def __init__(self, width=32, layers=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        made = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            made.append(x * 2)
        return x.square().mean(), made


@pytest.fixture
def pair():
    torch.manual_seed(0)
    plain = WithCache()
    return plain, copy.deepcopy(plain), torch.randn(256, 32)


OUTPUT = 256 * 32 * 4


def wrapped(model, limit):
    return rotor.Checkpointable(model, mem_limit=limit, engine="graph", effort="fast")


def stepped(model, x, use=lambda loss, made: loss):
    model.zero_grad()
    use(*model(x)).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_limit_without_room_for_unused_gradients_is_held(pair):
    plain, ours, x = pair
    # Five outputs stay; five gradients of them would too, from the loss on.
    limit = 9 * OUTPUT
    chk = wrapped(ours, limit)
    for _ in range(3):
        assert same(stepped(chk, x), stepped(plain, x))
        assert chk.plan.measured_bytes <= limit
    assert len(chk.plan.step.absent) == 5
    assert chk.plan.lower_bound_bytes <= limit


def test_what_was_planned_with_all_gradients_is_planned_again(pair):
    _, ours, x = pair
    chk = wrapped(ours, 40 * OUTPUT)
    stepped(chk, x)
    first = chk.plan
    assert not first.step.absent
    stepped(chk, x)
    assert len(chk.plan.step.absent) == 5
    assert chk.plan.predicted_bytes <= first.predicted_bytes - 4 * OUTPUT
    assert chk.plan.measured_bytes <= chk.plan.predicted_bytes


def test_an_output_that_is_used_later_gets_its_gradient(pair):
    plain, ours, x = pair
    chk = wrapped(ours, 40 * OUTPUT)
    for use in (
        lambda loss, made: loss,
        lambda loss, made: loss,
        lambda loss, made: loss + made[1].sum(),
        lambda loss, made: loss + sum(m.square().sum() for m in made),
        lambda loss, made: loss,
    ):
        assert same(stepped(chk, x, use), stepped(plain, x, use))
        if use(torch.zeros(()), [torch.ones(1)] * 5):
            stepped(chk, x)
            assert len(chk.plan.step.absent) < 5


def test_without_a_loss_of_its_own_nothing_is_assumed_absent():
    def forward(self, x):
        x = torch.tanh(self.first(x))
        return x, self.second(x)

    model = Function(forward, first=nn.Linear(32, 32), second=nn.Linear(32, 32))
    chk = wrapped(model, "1 MB")
    chk.measure(torch.randn(64, 32))
    chk.compute_sequence()
    assert not chk.plan.step.doubtful_tangents
