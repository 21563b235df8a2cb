"""Forwards in which NumPy computes: its types and bits, whatever a capture makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import same, trained

FORWARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean of an array": lambda y: y.detach().numpy().mean(),
    "scalar": lambda y: np.exp(-0.3),
    "element": lambda y: y.detach().numpy()[0, 1],
    "cosine": lambda y: torch.from_numpy(np.cos(y.detach().numpy())),
    "table": lambda y: torch.from_numpy(np.linspace(0, 1, 16)),
    "weight": lambda y: y.detach() * np.sqrt(16),
}


class Counted(nn.Module):
    """Model that returns what NumPy computes."""

    def __init__(self, computed: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.computed = computed

    def forward(self, x: torch.Tensor) -> Any:
        """Return the result, and what NumPy computes."""
        y = self.layers(x)
        return y, self.computed(y)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", FORWARDS)
def test_numpy_gives_its_own_types_and_bits(kind: str) -> None:
    seen: list[Any] = []

    def loss_of(model: Any, number: int) -> torch.Tensor:
        y, other = model(torch.randn(64, 16))
        seen.append(other)
        weight: torch.Tensor = y * (other if isinstance(other, torch.Tensor) else float(other))
        return weight.square().mean().float()

    def made(**limits: Any) -> list[Any]:
        seen.clear()
        found, _ = trained(lambda: Counted(FORWARDS[kind]), loss_of, **limits)
        return [found, *seen]

    assert same(made(mem_limit="1 MB"), made())
