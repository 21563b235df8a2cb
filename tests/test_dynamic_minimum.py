"""The limit that the dynamic engine names where another cannot be kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rotor
from rotor import memory


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.second(nn.functional.gelu(self.first(self.norm(x))))
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))),
        (256, 64),
    ),
    "blocks": (lambda: nn.Sequential(*(Block(32) for _ in range(4))), (8, 32, 32)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_the_limit_that_is_named_works_when_it_is_tried(name: str):
    make, shape = MODELS[name]
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
    net = make()
    net(x).square().mean().backward()
    net.zero_grad()
    with memory.meter("cpu") as meter:
        net(x).square().mean().backward()
    model = rotor.Checkpointable(make(), mem_limit=meter.peak_bytes // 4, engine="dynamic")
    with pytest.raises(rotor.InfeasibleError) as raised:
        model(x).square().mean().backward()
    limit = raised.value.minimum_bytes
    assert str(limit) in str(raised.value)
    assert limit <= 1.1 * meter.peak_bytes
    model = rotor.Checkpointable(make(), mem_limit=limit, engine="dynamic")
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
