"""Residual and densely connected networks for images of 32 x 32 pixels, as chains of stages.

The residual networks of section 4.2 of He et al., "Deep residual learning for image recognition"
(arXiv:1512.03385), whose shortcuts have no parameters, and DenseNet-BC of 100 layers and growth
rate 12 (Huang et al., "Densely connected convolutional networks", arXiv:1608.06993). Every block or
dense layer is one stage. Other image sizes work too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .densenet import DenseLayer
from .resnet import BasicBlock
from .utils import Model, model_options, named

__all__ = [
    "CifarDenseNet",
    "CifarDenseNetOptions",
    "CifarResNet",
    "CifarResNetOptions",
    "PaddedShortcut",
    "densenet100",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "resnet1202",
]


class CifarResNetOptions(TypedDict, total=False):
    """Keyword arguments of `resnet20` and its deeper kin; see `CifarResNet`."""

    weights: None
    num_classes: int


class CifarDenseNetOptions(TypedDict, total=False):
    """Keyword arguments of `densenet100`; see `CifarDenseNet`."""

    weights: None
    num_classes: int
    drop_rate: float


class PaddedShortcut(nn.Module):
    """Shortcut without parameters ("option A"): every other pixel, and channels of zeros.

    Parameters
    ----------
    inplanes, planes
        Channels that come in, and that go out; the new ones are zero.
    stride
        Distance of the pixels that are kept.
    """

    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.new_planes = planes - inplanes
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inplanes, h, w] to [batch, planes, h / stride, w / stride]."""
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, 0, self.new_planes))

    def extra_repr(self) -> str:
        """Return how shapes change, as text."""
        return f"new_planes={self.new_planes}, stride={self.stride}"


class CifarResNet(Model):
    """A residual network of ``6 blocks + 2`` layers: [batch, 3, h, w] to [batch, num_classes].

    Parameters
    ----------
    blocks
        Blocks of two 3x3 convolutions in each of the three groups.
    num_classes
        Size of the output.

    Raises
    ------
    ValueError
        `blocks` is not positive.
    """

    def __init__(self, blocks: int, num_classes: int = 10) -> None:
        if blocks < 1:
            raise ValueError(f"each group has at least one block, not {blocks}")
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        stages["conv1"] = nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False)
        stages["bn1"] = nn.BatchNorm2d(16)
        stages["relu"] = nn.ReLU(inplace=True)
        inplanes = 16
        for index, planes in enumerate((16, 32, 64), start=1):
            group: list[nn.Module] = []
            for _ in range(blocks):
                stride = 1 if inplanes == planes else 2
                shortcut = None if stride == 1 else PaddedShortcut(inplanes, planes, stride)
                group.append(BasicBlock(inplanes, planes, stride, shortcut))
                inplanes = planes
            stages[f"layer{index}"] = nn.Sequential(*group)
        stages["avgpool"] = nn.AdaptiveAvgPool2d((1, 1))
        stages["flatten"] = nn.Flatten()
        stages["fc"] = nn.Linear(inplanes, num_classes)
        super().__init__(stages)
        _initialise(self)


class CifarDenseNet(Model):
    """DenseNet-BC: [batch, 3, h, w] to [batch, num_classes].

    Three blocks of dense layers with bottlenecks of four times the growth rate, between them
    transitions that halve channels, height and width.

    Parameters
    ----------
    layers
        Dense layers of each block; the network has ``6 layers + 4`` layers with weights.
    growth_rate
        Features that each dense layer appends.
    drop_rate
        Probability of dropping a new feature, 0 to 1.
    num_classes
        Size of the output.

    Raises
    ------
    ValueError
        `layers` is not positive, or `drop_rate` is no probability.
    """

    def __init__(
        self,
        layers: int = 16,
        growth_rate: int = 12,
        drop_rate: float = 0.0,
        num_classes: int = 10,
    ) -> None:
        if layers < 1:
            raise ValueError(f"each block has at least one dense layer, not {layers}")
        if not 0 <= drop_rate <= 1:
            raise ValueError(f"drop_rate is a probability from 0 to 1, not {drop_rate!r}")
        channels = 2 * growth_rate
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        stages["conv0"] = nn.Conv2d(3, channels, kernel_size=3, padding=1, bias=False)
        for index in range(1, 4):
            block: list[nn.Module] = []
            for _ in range(layers):
                block.append(DenseLayer(channels, growth_rate, 4, drop_rate))
                channels += growth_rate
            stages[f"denseblock{index}"] = nn.Sequential(*block)
            if index < 3:
                stages[f"transition{index}"] = named(
                    norm=nn.BatchNorm2d(channels),
                    relu=nn.ReLU(inplace=True),
                    conv=nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
                    pool=nn.AvgPool2d(kernel_size=2, stride=2),
                )
                channels //= 2
        stages["norm"] = nn.BatchNorm2d(channels)
        stages["relu"] = nn.ReLU(inplace=True)
        stages["avgpool"] = nn.AdaptiveAvgPool2d((1, 1))
        stages["flatten"] = nn.Flatten()
        stages["fc"] = nn.Linear(channels, num_classes)
        super().__init__(stages)
        _initialise(self)


@torch.no_grad()
def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def _build(name: str, blocks: int, options: CifarResNetOptions) -> CifarResNet:
    return CifarResNet(blocks, **model_options(name, options, CifarResNetOptions))


def resnet20(**options: Unpack[CifarResNetOptions]) -> CifarResNet:
    """Build ResNet-20 of 0.27 million parameters; `options` are those of `CifarResNet`."""
    return _build("resnet20", 3, options)


def resnet32(**options: Unpack[CifarResNetOptions]) -> CifarResNet:
    """Build ResNet-32 of 0.46 million parameters; `options` are those of `CifarResNet`."""
    return _build("resnet32", 5, options)


def resnet44(**options: Unpack[CifarResNetOptions]) -> CifarResNet:
    """Build ResNet-44 of 0.66 million parameters; `options` are those of `CifarResNet`."""
    return _build("resnet44", 7, options)


def resnet56(**options: Unpack[CifarResNetOptions]) -> CifarResNet:
    """Build ResNet-56 of 0.85 million parameters; `options` are those of `CifarResNet`."""
    return _build("resnet56", 9, options)


def resnet110(**options: Unpack[CifarResNetOptions]) -> CifarResNet:
    """Build ResNet-110 of 1.7 million parameters; `options` are those of `CifarResNet`."""
    return _build("resnet110", 18, options)


def resnet1202(**options: Unpack[CifarResNetOptions]) -> CifarResNet:
    """Build ResNet-1202 of 19.4 million parameters; `options` are those of `CifarResNet`."""
    return _build("resnet1202", 200, options)


def densenet100(**options: Unpack[CifarDenseNetOptions]) -> CifarDenseNet:
    """Build DenseNet-BC, 100 layers, 0.8 million parameters; `options` as for `CifarDenseNet`."""
    return CifarDenseNet(**model_options("densenet100", options, CifarDenseNetOptions))
