"""Models without a single plan: with an LSTM, with parts, with branches alone."""

from __future__ import annotations

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 16 * width), nn.GELU(), nn.Linear(16 * width, 8))

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


class Skipping(nn.Module):
    """Blocks that run by value: parts."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU()) for _ in range(depth)]
        self.blocks = nn.ModuleList(
            [nn.Sequential(block, nn.Linear(4 * width, width)) for block in blocks]
        )

    def forward(self, x):
        for block in self.blocks:
            if float(x.detach().abs().sum()) >= 0:
                x = x + block(x)
        return x


class Loose(nn.Module):
    """Operations that run by value: nothing can be captured."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(width, width) / 6 for _ in range(depth)])

    def forward(self, x):
        for weight in self.weights:
            if float(x.detach().abs().sum()) >= 0:
                x = x + torch.tanh(torch.sigmoid(x @ weight) * x)
        return x


def recurrent():
    return Recurrent(), torch.randn(16, 12, 32)


def skipping():
    return Skipping(), torch.randn(256, 32)


def loose():
    return Loose(), torch.randn(256, 32)
