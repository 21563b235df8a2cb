"""Inception v4 as a chain of stages.

Szegedy et al., "Inception-v4, Inception-ResNet and the impact of residual connections on learning",
arXiv:1602.07261, figures 3 to 9. Every convolution of the stem and every block is one stage.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from .inception import BasicConv2d
from .utils import Model, model_options

__all__ = ["Branches", "Inception4", "Inception4Options", "inception_v4"]

Size = int | tuple[int, int]


class Inception4Options(TypedDict, total=False):
    """Keyword arguments of `inception_v4`; see `Inception4`."""

    weights: None
    num_classes: int
    dropout: float


class Branches(nn.Module):
    """Several branches from one input, concatenated: one block.

    Parameters
    ----------
    *branches
        Modules from [batch, c, h, w] to [batch, c', h', w'], with the same h' and w'.
    """

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the results of the branches along the channels."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Inception4(Model):
    """Inception v4: input [batch, 3, h, w], output [batch, num_classes].

    Images have at least 75 pixels a side; the published ones have 299.

    Parameters
    ----------
    num_classes
        Size of the output.
    dropout
        Probability of the dropout before the last layer.
    """

    def __init__(self, num_classes: int = 1000, dropout: float = 0.2) -> None:
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        stages["stem"] = nn.Sequential(
            BasicConv2d(3, 32, kernel_size=3, stride=2),
            BasicConv2d(32, 32, kernel_size=3),
            BasicConv2d(32, 64, kernel_size=3, padding=1),
            Branches(_max_pool(), BasicConv2d(64, 96, kernel_size=3, stride=2)),
            _stem_factored(),
            Branches(BasicConv2d(192, 192, kernel_size=3, stride=2), _max_pool()),
        )
        stages["inception_a"] = nn.Sequential(*(_block_a() for _ in range(4)))
        stages["reduction_a"] = _reduction_a()
        stages["inception_b"] = nn.Sequential(*(_block_b() for _ in range(7)))
        stages["reduction_b"] = _reduction_b()
        stages["inception_c"] = nn.Sequential(*(_block_c() for _ in range(3)))
        stages["avgpool"] = nn.AdaptiveAvgPool2d((1, 1))
        stages["dropout"] = nn.Dropout(dropout)
        stages["flatten"] = nn.Flatten()
        stages["fc"] = nn.Linear(1536, num_classes)
        super().__init__(stages)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)


def inception_v4(
    pretrained: bool = False, progress: bool = True, **options: Unpack[Inception4Options]
) -> Inception4:
    """Build Inception v4; `options` are the keyword arguments of `Inception4`."""
    del progress
    return Inception4(
        **model_options("inception_v4", options, Inception4Options, pretrained=pretrained)
    )


def _ways(channels: int, *layers: tuple[int, Size]) -> nn.Sequential:
    """Return convolutions (channels out, kernel) in sequence that keep height and width."""
    path = nn.Sequential()
    for out, kernel in layers:
        tall, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (tall // 2, wide // 2)
        path.append(BasicConv2d(channels, out, kernel_size=(tall, wide), padding=padding))
        channels = out
    return path


def _max_pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(kernel_size=3, stride=2)


def _pooled(channels: int, out: int) -> nn.Sequential:
    pool = nn.AvgPool2d(kernel_size=3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, BasicConv2d(channels, out, kernel_size=1))


def _stem_factored() -> Branches:
    plain = _ways(160, (64, 1))
    plain.append(BasicConv2d(64, 96, kernel_size=3))
    factored = _ways(160, (64, 1), (64, (7, 1)), (64, (1, 7)))
    factored.append(BasicConv2d(64, 96, kernel_size=3))
    return Branches(plain, factored)


def _block_a() -> Branches:
    return Branches(
        _pooled(384, 96),
        _ways(384, (96, 1)),
        _ways(384, (64, 1), (96, 3)),
        _ways(384, (64, 1), (96, 3), (96, 3)),
    )


def _reduction_a() -> Branches:
    twice = _ways(384, (192, 1), (224, 3))
    twice.append(BasicConv2d(224, 256, kernel_size=3, stride=2))
    return Branches(_max_pool(), BasicConv2d(384, 384, kernel_size=3, stride=2), twice)


def _block_b() -> Branches:
    return Branches(
        _pooled(1024, 128),
        _ways(1024, (384, 1)),
        _ways(1024, (192, 1), (224, (1, 7)), (256, (7, 1))),
        _ways(1024, (192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))),
    )


def _reduction_b() -> Branches:
    once = _ways(1024, (192, 1))
    once.append(BasicConv2d(192, 192, kernel_size=3, stride=2))
    factored = _ways(1024, (256, 1), (256, (1, 7)), (320, (7, 1)))
    factored.append(BasicConv2d(320, 320, kernel_size=3, stride=2))
    return Branches(_max_pool(), once, factored)


def _block_c() -> Branches:
    fork = Branches(_ways(384, (256, (1, 3))), _ways(384, (256, (3, 1))))
    late_fork = Branches(_ways(512, (256, (3, 1))), _ways(512, (256, (1, 3))))
    return Branches(
        _pooled(1536, 256),
        _ways(1536, (256, 1)),
        nn.Sequential(_ways(1536, (384, 1)), fork),
        nn.Sequential(_ways(1536, (384, 1), (448, (1, 3)), (512, (3, 1))), late_fork),
    )
