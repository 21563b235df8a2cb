"""Plain models that several test files train."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Tanhs(nn.Module):
    """Layers in a row, which keep their outputs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class FeedForward(nn.Module):
    """A block of a transformer without its attention: small, with much to recompute."""

    def __init__(self, width: int = 32, factor: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Recurrent(nn.Module):
    """Runs in parts: dynamo captures no LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(96, 384), nn.Tanh(), nn.Linear(384, 96))
        self.rnn = nn.LSTM(96, 96, batch_first=True)
        self.last = nn.Sequential(nn.Linear(96, 384), nn.Tanh(), nn.Linear(384, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(self.first(x))[0])


class Branching(nn.Module):
    """Has no single graph: its inner model is a part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * 2 if y.sum().item() > 1e30 else y


class Gated(nn.Module):
    """Layers with dropout that are added up: one graph, no chain."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(x).tanh())
        return x


def chain(width: int = 64) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Dropout(0.1))


class Save(nn.Module):
    """Keeps its input as an attribute, in the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return x


class AddSaved(nn.Module):
    """Adds what another module keeps: a skip connection that no output shows."""

    def __init__(self, save: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "save", save)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.save.x
