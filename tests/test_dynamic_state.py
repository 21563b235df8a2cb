"""Forwards with state of Python's, and values that leave by other ways, in the dynamic engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rotor


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))


class Drawing(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * (1 + random.random()) + float(np.random.rand()))  # noqa: NPY002
        return x


class Counting(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.mean = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.steps += 1
            x = torch.tanh(layer(x) / self.steps)
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x + self.mean


class Auxiliary(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = torch.zeros(())
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.penalty = self.penalty + x.square().mean()
        return x


class Hooked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, torch.Tensor] = {}
        self.layers[2].register_forward_hook(self._keep)

    def _keep(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self.features["third"] = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


LOSSES: dict[type[Layers], Callable[[Any], Any]] = {
    Drawing: lambda net: 0,
    Counting: lambda net: net.mean.sum(),
    Auxiliary: lambda net: net.penalty,
    Hooked: lambda net: net.features["third"].square().mean(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_steps_equal_those_without_a_limit(kind: type[Layers]):
    def train(limit: int | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        net = kind()
        model: Any = net
        if limit is not None:
            model = rotor.Checkpointable(net, mem_limit=limit, engine="dynamic")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        values = []
        again = 0
        for k in range(4):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 256 * 64).reshape(256, 64) + k
            loss = model(x).square().mean() + LOSSES[kind](net)
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
            if limit is not None:
                again += model._latest.last.stats.rematerializations
        return [*values, *(p.detach() for p in net.parameters())], again

    expected, _ = train(None)
    found, again = train(620_000)
    assert again > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
