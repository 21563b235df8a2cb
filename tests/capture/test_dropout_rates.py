"""Captured dropout has the bits of eager PyTorch at any rate, also where layers run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo.cases import rows
from zoo.models import Function

import rotor
from rotor import memory

RATES = [0.1, 0.15, 0.168, torch.tensor(0.15).item(), 0.999, 1.0]
"""Rates with rounded reciprocals of several kinds, one of them a float32."""


class Dropped(nn.Module):
    """A layer with dropout by the function."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = nn.Linear(64, 64), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.tanh(self.inner(x)), self.rate)


def attended(rate: float) -> nn.Module:
    """Attention with dropout of its weights."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 16))
        return self.inner(x, x, x, need_weights=False)[0].flatten(0, 1)

    return Function(forward, inner=nn.MultiheadAttention(64, 4, rate, batch_first=True))


def by_a_module(rate: float) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(rate))


KINDS: list[Callable[[float], nn.Module]] = [Dropped, attended, by_a_module]


def made(kind: Callable[[float], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(kind, RATES[:-1])).to(dtype)


def step(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(rows()[0].to(dtype)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_dropout_equals_eager_pytorch(
    kind: Callable[[float], nn.Module], dtype: torch.dtype
) -> None:
    net = made(kind, dtype)
    with memory.meter("cpu") as meter:
        step(net, dtype)
    model = rotor.Checkpointable(net, mem_limit=int(0.9 * meter.peak_bytes), engine="graph")
    for _ in range(2):
        assert all(map(torch.equal, step(net, dtype), step(model, dtype)))


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_rate_that_changes_between_steps_gives_the_bits_of_eager_pytorch() -> None:
    net = nn.Sequential(*[Dropped(0.0) for _ in range(3)])
    model = rotor.Checkpointable(net, mem_limit="1 MiB", engine="graph", effort="fast")
    for rate in RATES:
        for layer in net:
            layer.rate = rate
        assert all(map(torch.equal, step(net, torch.float32), step(model, torch.float32)))
