"""Models with a limit within models with a limit: the outer limit holds for both."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training import same, trained

import rotor

WIDTH = 32


class Layers(nn.Module):
    """Layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        for layer in self.layers:
            x = nn.functional.dropout(nn.functional.gelu(layer(x)), 0.1)
        return x


def nested(limit: int | None = None) -> nn.Module:
    """Return a model, with an inner model that has the limit too."""
    inner: nn.Module = Layers()
    if limit is not None:
        inner = rotor.Checkpointable(inner, mem_limit=limit, verbosity=-1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 3))


def loss_of(model: Any, number: int) -> torch.Tensor:
    """Return the loss of a step."""
    loss: torch.Tensor = model(torch.randn(64, WIDTH)).square().mean()
    return loss


@pytest.mark.parametrize("limit", [104_000, 1_000_000_000])
def test_an_inner_model_runs_within_the_limit_of_the_outer_one(limit: int) -> None:
    expected, _ = trained(nested, loss_of, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", rotor.MemoryLimitWarning)
        options: dict[str, Any] = {"effort": "fast", "planning": "before"}
        found, model = trained(lambda: nested(limit), loss_of, 2, mem_limit=limit, **options)
    assert same(found, expected)
    assert model.plan.measured_bytes <= limit
    assert model.plan.engine != "plain"
    assert any("within another model with a limit" in str(one.message) for one in caught)
