"""Small eager programs for the dynamic runtime: models, losses, and what a step leaves behind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rotor.models.resnet import BasicBlock
from torch import nn
from torch.nn import functional as F
from training import same
from zoo.models import First

from rotor import dtr, memory

Loss = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A program; `make` gives a fresh model and what computes its loss."""

    name: str
    make: Callable[[], tuple[nn.Module, Loss]]


def resnet(batch: int = 8, size: int = 32) -> tuple[nn.Module, Loss]:
    shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *(BasicBlock(16, 16) for _ in range(4)),
        BasicBlock(16, 32, 2, shortcut),
        BasicBlock(32, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    x, target = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    return model, lambda m: F.cross_entropy(m(x), target)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, 2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-2, -1) / 8).masked_fill(mask, float("-inf")).softmax(-1)
        mixed = F.dropout(weights, 0.1, self.training) @ v
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, 0.1, self.training)
        return x + F.dropout(self.perceptron(x), 0.1, self.training)


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(_Layer(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        y = F.dropout(y, 0.1, self.training)
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


def gpt(batch: int = 4, length: int = 48, width: int = 64) -> tuple[nn.Module, Loss]:
    model = _Gpt(200, length, width, 4)
    x = torch.randint(0, 200, (batch, length))
    target = torch.randint(0, 200, (batch * length,))
    return model, lambda m: F.cross_entropy(m(x).flatten(0, 1), target)


class _CellLoop(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros_like(x[0])
        for step in x:
            h, c = self.cell(step, (h, c))
        return h


def lstm_cell(steps: int = 40, batch: int = 16, width: int = 32) -> tuple[nn.Module, Loss]:
    x = torch.randn(steps, batch, width)
    return _CellLoop(width), lambda m: m(x).square().mean()


def lstm() -> tuple[nn.Module, Loss]:
    x = torch.randn(20, 8, 32)
    return First(nn.LSTM(32, 32, num_layers=8, dropout=0.2)), lambda m: m(x).square().mean()


Tree = list["Tree"]


def random_tree(nodes: int, seed: int) -> Tree:
    draw = random.Random(seed)
    root: Tree = []
    known = [root]
    for _ in range(nodes - 1):
        child: Tree = []
        draw.choice(known).append(child)
        known.append(child)
    return root


class _ChildSum(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Linear(2 * width, 3 * width)
        self.forget = nn.Linear(2 * width, width)

    def forward(self, tree: Tree, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = [self(child, x) for child in tree]
        total = torch.stack([h for h, _ in states]).sum(0) if states else torch.zeros_like(x)
        i, o, u = self.gates(torch.cat([x, total], -1)).chunk(3, -1)
        c = i.sigmoid() * u.tanh()
        for h, below in states:
            c = c + self.forget(torch.cat([x, h], -1)).sigmoid() * below
        return o.sigmoid() * c.tanh(), c


def treelstm(nodes: int = 40, batch: int = 16, width: int = 32) -> tuple[nn.Module, Loss]:
    x = torch.randn(batch, width)
    tree = random_tree(nodes, 3)
    return _ChildSum(width), lambda m: m(tree, x)[0].square().mean()


class _Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            )

        self.down = nn.ModuleList([pair(3, 8), pair(8, 16)])
        self.middle = pair(16, 32)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)]
        )
        self.up = nn.ModuleList([pair(32, 16), pair(16, 8)])
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), kept.pop()], 1))
        return self.last(x)


def unet() -> tuple[nn.Module, Loss]:
    x = torch.randn(2, 3, 48, 48)
    target = torch.rand(2, 1, 48, 48)
    return _Unet(), lambda m: F.binary_cross_entropy_with_logits(m(x), target)


CASES = {
    case.name: case
    for case in (
        Case("resnet", resnet),
        Case("gpt", gpt),
        Case("lstm_cell", lstm_cell),
        Case("lstm", lstm),
        Case("treelstm", treelstm),
        Case("unet", unet),
    )
}


def step(model: nn.Module, loss: Loss, seed: int = 3) -> torch.Tensor:
    """Forward and backward; the loss."""
    torch.manual_seed(seed)
    value = loss(model)
    value.backward()
    return value.detach()


def results(model: nn.Module, value: torch.Tensor) -> list[torch.Tensor | None]:
    """Everything that a step leaves behind."""
    gradients = [parameter.grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    if value.is_cuda:
        state = torch.cat([state, torch.cuda.get_rng_state(value.device)])
    return [value, *gradients, *model.buffers(), state]


class Plain:
    """What a plain step leaves, and its peak above the level at its start."""

    def __init__(self, case: Case, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        torch.manual_seed(1)
        with self.device:
            self.model, self.loss = case.make()
        step(copy.deepcopy(self.model), self.loss)
        model = copy.deepcopy(self.model)
        with memory.meter(self.device) as meter:
            value = step(model, self.loss)
        self.results = results(model, value)
        self.peak_bytes = meter.peak_bytes

    def under(self, limit: int | None, **settings: Any) -> tuple[bool, int, dtr.Stats]:
        """A step under a budget: whether it leaves the same, the allocator's peak, figures.

        The step before teaches the runtime what operators take: a meter keeps it from looking.
        """
        settings |= {"device": self.device}
        model = copy.deepcopy(self.model)
        with dtr.budget(limit, **settings):
            step(model, self.loss)
        model = copy.deepcopy(self.model)
        with memory.meter(self.device) as meter, dtr.budget(limit, **settings) as session:
            value = step(model, self.loss)
        return same(self.results, results(model, value)), meter.peak_bytes, session.stats
