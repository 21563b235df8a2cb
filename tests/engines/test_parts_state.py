"""Models in parts whose forward changes Python state: every step equals plain training."""

from __future__ import annotations

import contextlib
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rotor
from rotor import memory


class Base(nn.Module):
    """Layers, with a step in Python between them that no graph can have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)
        )
        self.count = 0
        self.mean = torch.zeros(32)
        self.sum = torch.zeros(32)
        self.features: list[torch.Tensor] = []

    def forward(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
            if x.detach().abs().max().item() > 1e9:
                break
        return x

    def loss(self, y):
        return y.square().mean()


class Counter(Base):
    def between(self, x):
        self.count += 1
        return x * (1 + 0.1 * self.count)


class Averages(Base):
    def between(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.sum.mul_(0.5).add_(x.detach().mean(0))
        return x + self.mean + self.sum


class Features(Base):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer[0].register_forward_hook(lambda m, args, y: self.features.append(y))

    def between(self, x):
        return x

    def loss(self, y):
        total = y.square().mean() + sum(f.square().mean() for f in self.features)
        self.features.clear()
        return total


class Draws(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def between(self, x):
        x = x * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))  # noqa: NPY002
        return x + torch.rand(x.shape, generator=self.generator)


class Mapped(Base):
    def between(self, x):
        return torch.func.vmap(lambda row: row * row.sin().sum())(x)


def steps(kind, wrap):
    torch.compiler.reset()
    model = kind()
    wrapped = wrap(model)
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(3))
    found = []
    for number in range(4):
        model.zero_grad()
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        loss = model.loss(wrapped(x))
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
        del loss
    return found


@pytest.mark.parametrize("kind", [Counter, Averages, Features, Draws, Mapped])
def test_steps_in_parts_equal_plain_steps(kind):
    plain = steps(kind, lambda model: model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        found = steps(kind, lambda model: rotor.Checkpointable(model, mem_limit="300KB"))
    for one, other in zip(plain, found, strict=True):
        assert one[0] == other[0]
        assert all(map(torch.equal, one[1], other[1]))


class Alternating(nn.Module):
    """Block whose code takes another branch in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = torch.tanh(self.up(x))
        for _ in range(self.calls % 2):
            y = torch.tanh(y)
        return x + self.down(y)


class Alternates(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Alternating() for _ in range(6))

    def between(self, x):
        return x


def _within(model, net, steps, limit):
    peaks = []
    for k in range(steps):
        torch.manual_seed(k)
        net.zero_grad()
        x = torch.randn(128, 32)
        with memory.meter("cpu") if k else contextlib.nullcontext() as meter:
            net.loss(model(x)).backward()
        peaks += [meter.peak_bytes] if k else []
        yield [p.grad.clone() for p in net.parameters()]
    assert limit is None or max(peaks) <= limit, (peaks, limit)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_part_that_takes_another_branch_keeps_the_limit():
    net, plain = Alternates(), Alternates()
    with memory.meter("cpu") as meter:
        plain.loss(plain(torch.randn(128, 32))).backward()
    plain = Alternates()
    limit = int(0.45 * meter.peak_bytes)
    model = rotor.Checkpointable(net, mem_limit=limit)
    steps = zip(_within(model, net, 6, limit), _within(plain, plain, 6, None), strict=True)
    for found, expected in steps:
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert model.plan.engine == "parts"
