"""Ten models for which engine auto has to choose, each with a sample of its input."""

from __future__ import annotations

import torch
from torch import nn
from zoo.models import Row

ROWS, WIDTH = 256, 64


class Block(nn.Module):
    """Residual perceptron; one that reads a number cannot be captured."""

    def __init__(self, width: int = WIDTH, *, reads: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if not self.reads or float(x.detach().abs().max()) < 1e6 else 0.5
        return x + scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.inner(x).chunk(3, -1)
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.outer((scores @ v).transpose(1, 2).reshape(batch, length, width))


def _rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def _blocks(*reading: int, count: int = 6) -> list[nn.Module]:
    return [Block(reads=k in reading) for k in range(count)]


def stack():
    return nn.Sequential(*_blocks()), _rows()


def mixed():
    return nn.Sequential(*_blocks(2)), _rows()


def mixed_ends():
    return nn.Sequential(*_blocks(0, 5)), _rows()


def mixed_often():
    return nn.Sequential(*_blocks(1, 3, 5, count=8)), _rows()


def tanhs():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(10)]
    return nn.Sequential(*layers), _rows()


def convolutions():
    sizes = ((3, 16), (16, 32), (32, 64))
    stages = [
        nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes
    ]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(1024, 10)), torch.randn(8, 3, 32, 32)


def attention():
    layers = [layer for _ in range(3) for layer in (Attention(), Block())]
    return nn.Sequential(*layers), torch.randn(4, 64, WIDTH)


def loop():
    return Row(*_blocks()), _rows()


def loop_of_stacks():
    return Row(nn.Sequential(*_blocks(count=3)), Attention(), Block()), torch.randn(4, 64, WIDTH)


def parts():
    return Row(*_blocks(2)), _rows()


PLANNED = (stack, mixed, mixed_ends, mixed_often, tanhs, convolutions, attention, loop)
PLANNED += (loop_of_stacks,)
