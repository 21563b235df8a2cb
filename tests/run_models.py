"""Models without a single plan: with an LSTM, with parts, with branches alone."""

from __future__ import annotations

import torch
from torch import nn
from zoo.models import Asking, First, Row, Skip


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
    head = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 8))
    return Row(First(nn.LSTM(32, 32, batch_first=True)), head), torch.randn(16, 12, 32)


def skipping():
    layers = lambda: (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))  # noqa: E731
    return Asking(*(Skip(*layers()) for _ in range(3))), torch.randn(256, 32)


def loose():
    return Loose(), torch.randn(256, 32)
