"""Densely connected networks as chains of stages.

Huang et al., "Densely connected convolutional networks", arXiv:1608.06993, with bottlenecks and
compression (DenseNet-BC). A dense layer takes all features made so far as one tensor and returns
them with its own appended, so that every dense layer is one stage. Names and shapes of the state
are torchvision's; the older names of its published files are read too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .utils import Model, model_options, named

__all__ = [
    "DenseLayer",
    "DenseNet",
    "DenseNetOptions",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
]


class DenseNetOptions(TypedDict, total=False):
    """Keyword arguments of the functions of this file; see `DenseNet`."""

    weights: None
    growth_rate: int
    block_config: Sequence[int]
    num_init_features: int
    bn_size: int
    drop_rate: float
    num_classes: int
    memory_efficient: bool


class DenseLayer(nn.Module):
    """Layer that appends features: [batch, c, h, w] to [batch, c + growth_rate, h, w].

    Parameters
    ----------
    num_input_features
        Channels that come in.
    growth_rate
        Channels that are appended.
    bn_size
        Channels of the bottleneck over `growth_rate`.
    drop_rate
        Probability of dropping a new feature.
    memory_efficient
        Recompute the bottleneck in the backward pass. Its running statistics are still updated
        once.
    """

    def __init__(
        self,
        num_input_features: int,
        growth_rate: int,
        bn_size: int,
        drop_rate: float,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        width = bn_size * growth_rate
        self.norm1 = nn.BatchNorm2d(num_input_features)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(num_input_features, width, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, growth_rate, kernel_size=3, padding=1, bias=False)
        self.drop_rate = float(drop_rate)
        self.memory_efficient = memory_efficient
        self.register_load_state_dict_pre_hook(_read_older_names)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and the new features, concatenated."""
        if self.memory_efficient and x.requires_grad and torch.is_grad_enabled():
            narrow: Tensor = checkpoint(
                self._bottleneck, x, use_reentrant=False, context_fn=self._recomputing
            )
        else:
            narrow = self._bottleneck(x)
        new: Tensor = self.conv2(self.relu2(self.norm2(narrow)))
        if self.drop_rate > 0:
            new = F.dropout(new, p=self.drop_rate, training=self.training)
        return torch.cat([x, new], dim=1)

    def _bottleneck(self, x: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(x)))  # type: ignore[no-any-return]

    def _recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _buffers_protected(self.norm1)


class DenseNet(Model):
    """A densely connected network: input [batch, 3, h, w], output [batch, num_classes].

    Parameters
    ----------
    growth_rate
        Features that each dense layer appends.
    block_config
        Numbers of dense layers in the blocks.
    num_init_features
        Channels of the first convolution.
    bn_size
        Channels of a layer's bottleneck over `growth_rate`.
    drop_rate
        Probability of dropping a new feature, 0 to 1.
    num_classes
        Size of the output.
    memory_efficient
        Recompute every layer's bottleneck in the backward pass. A memory limit makes better use
        of the same idea; the argument exists for compatibility.

    Raises
    ------
    ValueError
        `drop_rate` is no probability.
    """

    def __init__(
        self,
        growth_rate: int = 32,
        block_config: Sequence[int] = (6, 12, 24, 16),
        num_init_features: int = 64,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        num_classes: int = 1000,
        memory_efficient: bool = False,
    ) -> None:
        if not 0 <= drop_rate <= 1:
            raise ValueError(f"drop_rate is a probability from 0 to 1, not {drop_rate!r}")
        channels = num_init_features
        features: OrderedDict[str, nn.Module] = OrderedDict()
        features["conv0"] = nn.Conv2d(3, channels, kernel_size=7, stride=2, padding=3, bias=False)
        features["norm0"] = nn.BatchNorm2d(channels)
        features["relu0"] = nn.ReLU(inplace=True)
        features["pool0"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        for index, count in enumerate(block_config, start=1):
            block: OrderedDict[str, nn.Module] = OrderedDict()
            for layer in range(1, count + 1):
                block[f"denselayer{layer}"] = DenseLayer(
                    channels, growth_rate, bn_size, drop_rate, memory_efficient
                )
                channels += growth_rate
            features[f"denseblock{index}"] = nn.Sequential(block)
            if index < len(block_config):
                features[f"transition{index}"] = named(
                    norm=nn.BatchNorm2d(channels),
                    relu=nn.ReLU(inplace=True),
                    conv=nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
                    pool=nn.AvgPool2d(kernel_size=2, stride=2),
                )
                channels //= 2
        features["norm5"] = nn.BatchNorm2d(channels)
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        stages["features"] = nn.Sequential(features)
        stages["relu"] = nn.ReLU(inplace=True)
        stages["avgpool"] = nn.AdaptiveAvgPool2d((1, 1))
        stages["flatten"] = nn.Flatten()
        stages["classifier"] = nn.Linear(channels, num_classes)
        super().__init__(stages)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


@contextmanager
def _buffers_protected(module: nn.Module) -> Iterator[None]:
    """Let `module` update copies of its buffers."""
    buffers = dict(module.named_buffers(recurse=False))
    for name, buffer in buffers.items():
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for name, buffer in buffers.items():
            setattr(module, name, buffer)


def _read_older_names(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Rename ``norm.1.weight`` to ``norm1.weight`` and so on: dots that PyTorch 0.3 allowed."""
    for kind in ("norm", "conv"):
        for number in ("1", "2"):
            older = f"{prefix}{kind}.{number}."
            for key in [key for key in state_dict if key.startswith(older)]:
                name = f"{prefix}{kind}{number}.{key.removeprefix(older)}"
                state_dict[name] = state_dict.pop(key)


def _build(
    name: str,
    pretrained: bool,
    growth_rate: int,
    block_config: tuple[int, ...],
    num_init_features: int,
    options: DenseNetOptions,
) -> DenseNet:
    fixed = {
        "growth_rate": growth_rate,
        "block_config": block_config,
        "num_init_features": num_init_features,
    }
    return DenseNet(**model_options(name, options, DenseNetOptions, fixed, pretrained=pretrained))


def densenet121(
    pretrained: bool = False, progress: bool = True, **options: Unpack[DenseNetOptions]
) -> DenseNet:
    """Build DenseNet-121; `options` are the keyword arguments of `DenseNet`."""
    del progress
    return _build("densenet121", pretrained, 32, (6, 12, 24, 16), 64, options)


def densenet161(
    pretrained: bool = False, progress: bool = True, **options: Unpack[DenseNetOptions]
) -> DenseNet:
    """Build DenseNet-161; `options` are the keyword arguments of `DenseNet`."""
    del progress
    return _build("densenet161", pretrained, 48, (6, 12, 36, 24), 96, options)


def densenet169(
    pretrained: bool = False, progress: bool = True, **options: Unpack[DenseNetOptions]
) -> DenseNet:
    """Build DenseNet-169; `options` are the keyword arguments of `DenseNet`."""
    del progress
    return _build("densenet169", pretrained, 32, (6, 12, 32, 32), 64, options)


def densenet201(
    pretrained: bool = False, progress: bool = True, **options: Unpack[DenseNetOptions]
) -> DenseNet:
    """Build DenseNet-201; `options` are the keyword arguments of `DenseNet`."""
    del progress
    return _build("densenet201", pretrained, 32, (6, 12, 48, 32), 64, options)
