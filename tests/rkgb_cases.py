"""Models for the tests of rk-GB's graphs, and the graphs of some, built once."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from rotor.models.gpt import gpt
from rotor.models.unet import UNet
from torch import nn

from rotor import models, rkgb

NAMES = ("resnet", "gpt", "unet", "mlp")


class Case:
    """A model, its inputs, and its graphs."""

    def __init__(self, model: nn.Module, inputs: list[Any]) -> None:
        self.model, self.inputs = model, inputs
        self.result = rkgb.make_all_graphs(model, inputs)


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    if name == "resnet":
        return Case(models.resnet18(num_classes=10), [torch.randn(2, 3, 32, 32)])
    if name == "gpt":
        model = gpt("tiny", layers=12, width=16, heads=2, vocab_size=32, context_length=8)
        return Case(model, [torch.randint(0, 32, (1, 8))])
    if name == "unet":
        return Case(UNet(width=4), [torch.randn(1, 3, 32, 32)])
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())]
    return Case(nn.Sequential(*layers, nn.Linear(16, 16)), [torch.randn(4, 16)])


def odd(name: str) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(1)
    return ODD[name]()


class Moving(nn.Module):
    """A moving average, a counter, an attribute, nested inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.shift = torch.randn(4)

    def forward(self, x, batch):
        hidden = torch.tanh(self.first(x) + self.shift)
        self.average.mul_(0.9).add_(hidden.mean(0).detach(), alpha=0.1)
        self.count.add_(1)
        y = self.second(hidden) + batch["scale"][0] * self.average
        return {"y": y, "sum": hidden.sum()}


class Changing(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x * 2)
        x.add_(1)
        return self.layer(torch.relu(y) + x)


class Tied(nn.Module):
    """Tied weights, dropout, noise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(nn.functional.dropout(self.embed(tokens), 0.3) * torch.rand(4))


class Twice(nn.Module):
    """A BatchNorm that runs twice: its buffers are written when both have read them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.norm(x))


class Counting(nn.Module):
    """Updates that belong to one layer, with one of another layer in their midst."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        for name in ("early", "middle", "late"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x):
        hidden = self.a(x)
        self.early.add_(hidden.detach().sum(0))
        y = self.b(hidden)
        self.middle.add_(y.detach().sum(0))
        self.late.add_(hidden.detach().amax(0))
        return y


class Frozen(nn.Module):
    """A frozen layer, an output without a gradient, an argument that is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x, mask=None):
        hidden = self.a(x).softmax(-1)
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0.0)
        return self.b(hidden), hidden.argmax(-1)


ODD = {
    "moving": lambda: (Moving(), [torch.randn(3, 4), {"scale": [torch.randn(4)]}]),
    "changing": lambda: (Changing(), [torch.randn(3, 4)]),
    "tied": lambda: (Tied(), [torch.randint(0, 8, (2, 3))]),
    "twice": lambda: (Twice(), [torch.randn(3, 4, requires_grad=True)]),
    "counting": lambda: (Counting(), [torch.randn(3, 4)]),
    "frozen": lambda: (Frozen(), [torch.randn(3, 4)]),
    "masked": lambda: (Frozen(), [torch.randn(3, 4), torch.rand(3, 4) > 0.5]),
    "recurrent": lambda: (nn.Sequential(nn.LSTMCell(4, 4), First()), [torch.randn(2, 4)]),
}


class First(nn.Module):
    """The first of two."""

    def forward(self, both):
        return both[0] * both[1]
