"""Second backwards of forwards that depend on Python's state: it is as in the first forward."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from zoo.programs import Looped

import rotor

pytestmark = pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")


class Layer(nn.Module):
    """A layer with a factor of its own."""

    def __init__(self, factor: Callable[[Layer], float]) -> None:
        super().__init__()
        self.inner, self.calls, self.drawn = nn.Linear(32, 32), 0, random.Random(1)
        self._factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self._factor(self)


def counted(layer: Layer) -> float:
    layer.calls += 1
    return 1.0 + layer.calls % 3


FACTORS: dict[str, Callable[[Layer], float]] = {
    "a counter": counted,
    "Python": lambda _: random.uniform(0.5, 1.5),
    "NumPy": lambda _: float(np.random.uniform(0.5, 1.5)),  # noqa: NPY002
    "a generator of its own": lambda layer: layer.drawn.uniform(0.5, 1.5),
}


def results(kind: type[nn.Module], factor: str, engine: str | None) -> list[float]:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    net = kind(*[Layer(FACTORS[factor]) for _ in range(4)])
    model = rotor.Checkpointable(net, mem_limit="90 KB", engine=engine) if engine else net
    x, found = torch.randn(64, 32), []
    for _ in range(5):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found += [loss.item(), random.random()]
        found += [p.grad.abs().sum().item() for p in net.parameters()]
    return found


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(
    ("kind", "engine"), [(nn.Sequential, "chain"), (nn.Sequential, "auto"), (Looped, "auto")]
)
def test_it_uses_the_state_of_the_first_forward(
    kind: type[nn.Module], engine: str, factor: str
) -> None:
    assert results(kind, factor, engine) == pytest.approx(results(kind, factor, None), rel=1e-5)
