"""Autocast and GradScaler around models with a limit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from training import same
from zoo.models import FeedForward

import rotor

WIDTH = 64
LIMIT = 2_000_000


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (FeedForward(WIDTH, 4) for _ in range(4))
    return nn.Sequential(nn.Linear(16, WIDTH), *blocks, nn.Linear(WIDTH, 100))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), target)


def train(model: nn.Module, dtype: torch.dtype, captured: bool = False) -> Any:
    """Four scaled steps, the second with a loss of infinity: losses, scales, weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 16, generator=generator)
    y = torch.randint(100, (256,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found, weights = [], []
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x, targets=(y,)) if captured else loss_of(model(x), y)
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((loss.item(), scaler.get_scale()))
        weights.append([p.detach().clone() for p in model.parameters()])
    return found, weights


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
@pytest.mark.filterwarnings("ignore:the limit of .* of which nothing was known before")
@pytest.mark.parametrize(
    ("engine", "captured", "dtype"),
    [
        ("chain", False, torch.bfloat16),
        ("chain", False, torch.float16),
        ("chain", True, torch.bfloat16),
        ("graph", False, torch.bfloat16),
        ("graph", True, torch.float16),
        ("dynamic", False, torch.bfloat16),
        ("dynamic", True, torch.float16),
    ],
)
def test_scaled_steps(engine, captured, dtype):
    loss_fn = loss_of if captured else None
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine, loss_fn=loss_fn)
    found, weights = train(model, dtype, captured)
    expected, wanted = train(make(), dtype)
    if engine == "graph":
        assert model.plan.recomputed > 0
    assert found == expected
    assert all(same(one, other) for one, other in zip(weights, wanted, strict=True))
    # The step that overflowed was left out, and the scale halved.
    assert same(weights[0], weights[1])
    assert [scale for _, scale in found] == [1024.0, 512.0, 512.0, 512.0]
    assert model.plan.measured_bytes <= LIMIT


def test_autocast_on_and_off_are_two_plans():
    plain = make()
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=LIMIT)
    x = torch.randn(256, 16)
    for enabled in (True, False, True):
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                output = one(x)
            output.float().sum().backward()
        assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert len({key[0] for key in model.plans}) == 2
