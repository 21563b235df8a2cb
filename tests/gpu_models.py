"""Models of the tests for GPUs; for their dry run on the simulated device, smaller ones."""

from __future__ import annotations

import os

import torch
from torch import nn

import rotor

DEVICE = os.environ.get("ROTOR_GPU_TESTS", "cuda")
IS_SIM = DEVICE == "sim"
"""A dry run on one core. Blocks are above 1 MiB all the same, and of odd sizes."""


class Language(nn.Module):
    """A small GPT with dropout, on PyTorch's layers."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x))).flatten(0, 1)


class Recurrent(nn.Module):
    """LSTM cells in a Python loop."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.width, self.steps = width, steps
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(len(x), self.width)
        for _ in range(self.steps):
            h, c = self.cell(x, (h, c))
        return self.head(h)


def network(classes: int) -> nn.Module:
    """Return a model of images, whose activations are most of its memory."""
    if not IS_SIM:
        return rotor.resnet.resnet18(num_classes=classes).to(DEVICE)
    layers: list[nn.Module] = []
    for before, after in ((3, 23), *[(23, 23)] * 7):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(23, classes)).to(
        DEVICE
    )


def pictures(classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch for it, and its targets."""
    rows, size = (8, 61) if IS_SIM else (64, 224)
    batch = torch.randn(rows, 3, size, size).to(DEVICE)
    return batch, torch.randint(0, classes, (rows,)).to(DEVICE)


def images() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, a batch and its targets."""
    return network(10), *pictures(10)


def language() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, a batch and its targets."""
    width, depth, words, rows, length = (128, 3, 700, 6, 80) if IS_SIM else (256, 6, 1000, 16, 256)
    return (
        Language(width, depth, words).to(DEVICE),
        torch.randint(words, (rows, length)).to(DEVICE),
        torch.randint(words, (rows * length,)).to(DEVICE),
    )


def recurrent() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, a batch and its targets."""
    rows, width, steps = (350, 250, 14) if IS_SIM else (256, 512, 40)
    return (
        Recurrent(width, steps).to(DEVICE),
        torch.randn(rows, width).to(DEVICE),
        torch.randint(10, (rows,)).to(DEVICE),
    )
