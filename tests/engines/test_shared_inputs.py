"""Inputs of captured parts that other code uses too: gradients are added in autograd's order."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

import rotor

WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(functional.gelu(self.up(x))))


class HiddenStates(nn.Module):
    """Layers that are skipped at random; every hidden state is returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = [x]
        for layer in self.layers:
            if random.random() > 0.3:
                x = layer(x)
            hidden.append(x)
        return (x, *hidden)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 8
        return scores.softmax(-1) @ self.value(x)


class Unsure(nn.Module):
    """Captured attention beside a residual connection, in layers that ask for values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
            if x.detach().abs().max().item() > 1e9:
                break
        return x


class Returning(Layer):
    """Layer that returns its input too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


class Passing(Unsure):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returning() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.first(x), torch.zeros(())
        for layer in self.layers:
            x, given = layer(x)
            total = total + given.square().mean()
            if x.detach().abs().max().item() > 1e9:
                break
        return x * total


class Scaled(Layer):
    """Layer with a tensor that is no parameter, and gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Foreign(Unsure):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            if x.detach().abs().max().item() > 1e9:
                break
        return x


def backwards(loss: torch.Tensor, parameters: list[nn.Parameter], ways: str) -> list[torch.Tensor]:
    if ways == "second order":
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        loss = loss + sum(g.square().sum() for g in first if g is not None)
    if ways == "twice":
        loss.backward(retain_graph=True)
    loss.backward()
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in parameters]


def steps(
    kind: type[nn.Module], wrap: Callable[[nn.Module], nn.Module], ways: str
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    wrapped = wrap(model)
    x = torch.randn(8, 32, WIDTH)
    found: list[torch.Tensor] = []
    for number in range(3):
        if ways != "adding":
            model.zero_grad()
        random.seed(number)
        output = wrapped(x)
        tensors = output if isinstance(output, tuple) else (output,)
        loss = tensors[0].mean() + 0.1 * sum(t.square().mean() for t in tensors)
        found += backwards(loss, list(model.parameters()), ways)
    return found


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        *product([HiddenStates, Unsure, Passing], ["once", "adding", "twice"]),
        (HiddenStates, "second order"),
        (Foreign, "once"),
    ],
)
def test_gradients_of_shared_inputs_equal_those_of_plain_training(
    kind: type[nn.Module], ways: str
) -> None:
    plain = steps(kind, lambda model: model, ways)
    models = []

    def limited(model: nn.Module) -> nn.Module:
        models.append(rotor.Checkpointable(model, mem_limit="4 MB", verbosity=-1))
        return models[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        found = steps(kind, limited, ways)
    assert "parts" in type(models[0].plan).__module__
    if ways == "second order":
        torch.testing.assert_close(plain, found)
    else:
        assert all(map(torch.equal, plain, found))
