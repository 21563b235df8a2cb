"""Five small models for the command line, each with a sample: `commands.py` names them."""

from __future__ import annotations

import torch
from torch import nn

import rotor

Made = tuple[nn.Module, torch.Tensor]


def resnet() -> Made:
    """A ResNet-20, a Sequential: a chain, or a graph where that is better."""
    return rotor.models.resnet20(), torch.randn(16, 3, 32, 32)


def gpt2() -> Made:
    """A GPT-2 of four narrow layers."""
    model = rotor.gpt.gpt2(
        layers=4, width=64, heads=4, vocab_size=500, context_length=64, dropout=0.0
    )
    return model, torch.randint(500, (8, 64))


def unet() -> Made:
    """A U-Net, which is no chain: a graph."""
    return rotor.models.UNet(width=8), torch.randn(2, 3, 64, 64)


class Tagger(nn.Module):
    """An LSTM between captured parts."""

    def __init__(self, words: int = 200, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.mix = nn.Sequential(
            nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)
        )
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of tags."""
        return self.head(self.mix(self.lstm(self.embed(ids))[0]))


def lstm() -> Made:
    """A tagger with an LSTM, which no graph holds."""
    return Tagger(), torch.randint(200, (16, 32))


class Branching(nn.Module):
    """Residual layers whose code depends on values."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(depth)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last hidden values."""
        for layer in self.layers:
            x = x + layer(x)
            if float(x.detach().abs().mean()) > 100:
                x = x / 2
        return x


def branches() -> Made:
    """A model with branches on values."""
    return Branching(), torch.randn(256, 64)
