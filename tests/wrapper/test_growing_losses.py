"""Losses outside of the model that need more from some step on: told, and planned for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training import same
from zoo.models import Row

import rotor

WIDTH, ROWS, LIMIT = 64, 512, 1_200_000


def penalised(net: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Another forward of a part of the model, as plain PyTorch runs it."""
    return y.square().mean() + net[1](net[0](x)).square().mean()


def contrasted(net: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Similarities of all rows, of which there are more bytes than rows."""
    return y.square().mean() + (y @ y.T).div(WIDTH).softmax(-1).square().sum()


LOSSES = {"a part runs again": penalised, "all pairs": contrasted}


def run(kind: str, engine: str | None, growing: str, steps: int = 9) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    net = (nn.Sequential if kind == "chain" else Row)(*layers)
    options = {} if engine is None else {"mem_limit": LIMIT, "engine": engine, "verbosity": -1}
    model = rotor.Checkpointable(net, **options) if options else net
    found: list[Any] = []
    for k in range(steps):
        net.zero_grad()
        x = torch.randn(ROWS, WIDTH)
        y = model(x)
        loss = LOSSES[growing](net, x, y) if k >= 4 else y.square().mean()
        del y
        loss.backward()
        found += [loss.detach(), *(p.grad for p in net.parameters())]
    return found, model


@pytest.mark.parametrize("growing", LOSSES)
@pytest.mark.parametrize(("kind", "engine"), [("chain", "chain"), ("graph", "graph")])
def test_a_loss_that_grows_later_is_metered_and_told(kind: str, engine: str, growing: str) -> None:
    plain, _ = run(kind, None, growing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        limited, model = run(kind, engine, growing)
    assert same(plain, limited)
    told = [w for w in caught if issubclass(w.category, rotor.MemoryLimitWarning)]
    plan = model.plan
    assert plan.most_bytes_seen > LIMIT, "the test asks for more than the limit"
    assert told
    assert plan.measured_bytes <= LIMIT or plan.warned_bytes > LIMIT


def test_a_loss_that_stays_is_not_metered_again() -> None:
    torch.manual_seed(0)
    net = Row(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model = rotor.Checkpointable(net, mem_limit="4 MiB", engine="graph", verbosity=-1)
    metered = []
    for _ in range(14):
        net.zero_grad()
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        metered.append(model.plan.unmetered)
    assert metered[-1] >= 10
