"""The limit that the dynamic engine names where another cannot be kept."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from zoo.models import FeedForward

import rotor
from rotor import dtr, memory
from rotor.dtr import recall


class Down(nn.Module):
    """A U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.first(x).relu()
        low = self.second(high).relu()
        found: torch.Tensor = self.last(torch.cat([self.up(low).relu(), high], 1))
        return found


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 64)
        for word in x.unbind(1):
            state = self.cell(word, state)
        found: torch.Tensor = self.head(state)
        return found


class Recurrence(nn.Module):
    """A recurrence whose backward computes long chains again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = cell = x.new_zeros(x.shape[1], 64)
        for word in x.unbind(0):
            state, cell = self.cell(word, (state, cell))
        return state


def widening() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16 << k, 32 << k), nn.Tanh()) for k in range(5)))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers)


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))),
        (256, 64),
    ),
    "blocks": (lambda: nn.Sequential(*(FeedForward(32, 4, 0.0) for _ in range(4))), (8, 32, 32)),
    "u-net": (Down, (2, 3, 32, 32)),
    "loop": (Loop, (16, 30, 32)),
    "recurrence": (Recurrence, (40, 32, 64)),
    "widening": (widening, (64, 16)),
    "convolutions": (convolutions, (4, 3, 32, 32)),
    "attention": (attention, (8, 32, 32)),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.Tanh()),
        (256, 64),
    ),
    "convolution of lines": (
        lambda: nn.Sequential(nn.Conv1d(4, 32, 5), nn.ReLU(), nn.Conv1d(32, 32, 5), nn.Tanh()),
        (8, 4, 128),
    ),
    "dropouts": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout()) for _ in range(8))),
        (256, 64),
    ),
}


@pytest.mark.parametrize("part", [0.12, 0.25, 0.4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_the_limit_that_is_named_works_when_it_is_tried(name: str, part: float):
    make, shape = MODELS[name]
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
    net = make()
    net(x).square().mean().backward()
    net.zero_grad()
    with memory.meter("cpu") as meter:
        net(x).square().mean().backward()
    # Of operators that nobody has run yet, needs are guessed.
    dtr.signatures.known_needs(torch.device("cpu")).clear()
    limit = int(meter.peak_bytes * part)
    model = rotor.Checkpointable(make(), mem_limit=limit, engine="dynamic")
    try:
        steps(model, x)
    except rotor.InfeasibleError as error:
        limit, text = error.minimum_bytes, str(error)
        model = rotor.Checkpointable(make(), mem_limit=limit, engine="dynamic")
        steps(model, x)
        named = re.search(r"(?:try a limit of|no more than) [^(]*\((\d+) bytes\)", text)
        assert named is not None
        assert int(named[1]) == limit <= 2.5 * meter.peak_bytes
    assert model.plan.measured_bytes <= limit


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_a_recurrence_is_computed_again_whatever_times_are_read(seed: int, monkeypatch):
    generator = random.Random(seed)
    clock = itertools.accumulate(iter(lambda: int(10 ** generator.uniform(2, 5)), None))
    monkeypatch.setattr(recall, "CLOCK", lambda: next(clock))
    x = torch.linspace(-1, 1, 40 * 32 * 64).reshape(40, 32, 64)
    model = rotor.Checkpointable(Recurrence(), mem_limit=300_000, engine="dynamic")
    with pytest.raises(rotor.InfeasibleError) as caught:
        steps(model, x)
    limit = caught.value.minimum_bytes
    model = rotor.Checkpointable(Recurrence(), mem_limit=limit, engine="dynamic")
    # Each of the 40 steps of the recurrence could double what is computed again.
    steps(model, x)
    assert model.plan.measured_bytes <= limit
    assert max(figures.stats.rematerializations for figures in model.plan.latest) < 500_000


def steps(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
