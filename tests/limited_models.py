"""A small model, plain and under a limit, and what it means that both do the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from training import same

import rotor

UNLIMITED = "1 GB"


class Perceptron(nn.Module):
    """Layers of one width, with what the special cases look at."""

    def __init__(self, width: int = 32, layers: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x).tanh()) * 1.5
        return self.norm(x)


def limited(model: nn.Module, limit: int | str = UNLIMITED, **settings: Any) -> Any:
    return rotor.Checkpointable(model, mem_limit=limit, engine="dynamic", **settings)


def small_pair() -> tuple[Perceptron, Any, torch.Tensor, int]:
    """A model, a copy under a limit that makes it evict, an input, and that limit."""
    torch.manual_seed(0)
    model = Perceptron()
    limit = 180_000
    return model, limited(copy.deepcopy(model), limit), torch.randn(64, 32), limit


def both(model: nn.Module, chk: Any, act: Callable[[nn.Module], Any], seed: int = 5) -> None:
    """Do the same with the plain and the limited model, and compare what is left."""
    left = []
    for candidate in (model, chk):
        torch.manual_seed(seed)
        outcome = act(candidate)
        gradients = [p.grad for p in candidate.parameters()]
        buffers = list(candidate.buffers())
        left.append([*outcome, *gradients, *buffers, torch.get_rng_state()])
    assert same(*left)
