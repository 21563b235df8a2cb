"""Plain models that several test files train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Tanhs(nn.Module):
    """Layers in a row, which keep their outputs."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

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
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Residual(nn.Module):
    """Two layers with a skip connection, and a function between them."""

    def __init__(self, width: int, inner: int, function: Any = torch.tanh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.function(self.up(x)))


class Skip(nn.Sequential):
    """Layers in a row with a skip connection around them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Row(nn.Sequential):
    """Layers in a row that are no chain, as the model's own code calls them."""

    def forward(self, x: Any) -> Any:
        for layer in self:
            x = layer(x)
        return x


class First(Row):
    """A row whose last layer returns several values, of which this is the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Varying(Row):
    """A row without a graph: how many of its layers run depends on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[: len(self) - int(x[0, 0] > 0)]:
            x = layer(x)
        return x


class Function(nn.Module):
    """A module whose forward is a function of (module, inputs), with parts and buffers given."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Asking(Row):
    """Layers between which code depends on values: parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
            if x.sum().item() > 1e30:
                x = x * 2
        return x


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


class Alone(nn.Module):
    """Model without a child, of which nothing can be captured."""

    def __init__(self, depth: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(scale * torch.randn(32, 32) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + len(x.tolist()) * 0
        return x


class Gated(nn.Module):
    """Layers with dropout that are added up: one graph, no chain."""

    def __init__(self, width: int = 64, depth: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(x).tanh())
        return x


def normed() -> nn.Module:
    """A model with running statistics that draws: bytes beside the storages of the graph."""
    parts = lambda: (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))  # noqa: E731
    return Row(*(Skip(*parts()) for _ in range(4)))


def chain(width: int = 64, count: int = 8) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
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
