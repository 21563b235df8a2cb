"""Modules of random layers."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 64
KINDS = ("linear", "dropout", "batch_norm", "layer_norm", "relu_", "chunk", "topk", "slices")


class RandomLayers(nn.Module):
    """Layers at random, of operators whose needs do not depend on where their arguments lie."""

    def __init__(self, seed: int, size: int = 9) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.kinds = [*KINDS[:4], *(rng.choice(KINDS) for _ in range(size - 4))]
        rng.shuffle(self.kinds)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(size))
        self.batch, self.layer = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, kind in zip(self.linears, self.kinds, strict=True):
            y = linear(x)
            if kind == "dropout":
                y = F.dropout(F.gelu(y), 0.3)
            elif kind == "batch_norm":
                y = self.batch(y)
            elif kind == "layer_norm":
                y = self.layer(y)
            elif kind == "relu_":
                y = F.relu_(y)
            elif kind == "chunk":
                a, b = y.chunk(2, 1)
                y = torch.cat([b.sigmoid(), a * b], 1)
            elif kind == "topk":
                values, where = torch.topk(y, 4, dim=1)
                y = x * values.sum(1, keepdim=True) + where[:, :1].float()
            elif kind == "slices":
                y = y.clone()
                y[:, 3:9].mul_(2)
            x = torch.tanh(y) + 0.5 * x
        return x
