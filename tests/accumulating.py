"""Small models with gradients, and measures of their steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo.models import Function, Tanhs

import rotor
from rotor import memory


class ConvBlock(nn.Module):
    def __init__(self, channels, residual):
        super().__init__()
        self.residual = residual
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)))
        return x + y if self.residual else y


class ConvNet(nn.Module):
    def __init__(self, residual):
        super().__init__()
        self.blocks = nn.ModuleList(ConvBlock(96, residual) for _ in range(3))

    def forward(self, x):
        x = x.expand(-1, 96, -1, -1)
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Its head is its embedding."""

    def __init__(self, tied=False, vocabulary=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128)
        self.blocks = nn.ModuleList(Attention(128) for _ in range(2))
        self.head = nn.Linear(128, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HalfFrozen(Tanhs):
    def __init__(self):
        super().__init__(256)
        for layer in self.layers[::2]:
            layer.requires_grad_(False)


def bag():
    parts = {"table": nn.Embedding(2000, 64), "linear": nn.Linear(64, 64)}
    return Function(lambda self, x: self.linear(self.table(x).tanh().mean(1)), **parts)


MODELS = {
    "mlp": (lambda: Tanhs(256), lambda: torch.randn(32, 256)),
    "resnet": (lambda: ConvNet(residual=True), lambda: torch.randn(2, 1, 8, 8)),
    "gpt": (GPT, lambda: torch.randint(64, (2, 16))),
    "tied weights": (lambda: GPT(tied=True), lambda: torch.randint(64, (2, 16))),
    "conv and norm": (lambda: ConvNet(residual=False), lambda: torch.randn(2, 1, 8, 8)),
    "embedding": (bag, lambda: torch.randint(2000, (8, 16))),
    "half frozen": (HalfFrozen, lambda: torch.randn(32, 256)),
}


def made(name):
    torch.manual_seed(0)
    build, sample = MODELS[name]
    return build(), sample()


def step(model, x):
    model(x).square().mean().backward()


def metered(model, x):
    with memory.meter("cpu") as meter:
        step(model, x)
    return meter.peak_bytes


def drop_gradients(model):
    model.zero_grad()


def gradient_bytes(model):
    sizes = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
    return sum(sizes), max(sizes)


def least_limit(chk):
    """The least limit for the step that was planned last."""
    with pytest.raises(rotor.InfeasibleError) as raised:
        chk.compute_sequence(mem_limit=1000)
    return raised.value.minimum_bytes
