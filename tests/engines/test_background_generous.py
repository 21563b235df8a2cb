"""Limits that plain PyTorch keeps: nothing is searched for, refined or captured beside the step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from zoo.models import Gated

import rotor
from rotor import _core
from rotor.common.background import ThreadJob
from rotor.engines.graph.capture import Capture
from rotor.engines.graph.costs.glance import Refinement


@pytest.fixture
def counts(monkeypatch):
    found: Counter = Counter()

    def counted(owner, name, topic):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            found[topic] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(_core, "frontier", "frontiers")
    counted(ThreadJob, "__init__", "searches")
    counted(Refinement, "advance", "measurements")
    counted(Capture, "reach", "captures")
    return found


def stages():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])


def train(model, steps=6):
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model(x).square().mean().backward()
        model.zero_grad()
    return model


@pytest.mark.parametrize(
    "make, generous, tight",
    [
        (lambda: Gated(64, 8, 0.0), {"captures": 1}, {"captures", "searches", "measurements"}),
        (stages, {}, {"captures", "frontiers"}),
    ],
)
def test_a_limit_that_plain_pytorch_keeps_costs_no_planning(make, generous, tight, counts):
    torch.manual_seed(0)
    model = train(rotor.Checkpointable(make(), mem_limit="1 GB", verbosity=0))
    assert dict(counts) == generous
    assert model.plan.recomputation == 0
    assert model.wait_for_planning(0)

    counts.clear()
    model = train(rotor.Checkpointable(make(), mem_limit="700 KiB", verbosity=0))
    assert model.plan.recomputation > 0
    assert model.wait_for_planning()
    assert tight <= set(counts)
