"""VGG networks as chains of stages.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition",
arXiv:1409.1556, configurations A, B, D and E, each with or without batch normalisation. Every
layer is one stage. Names and shapes of the state are torchvision's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypedDict, Unpack

from torch import nn

from .utils import Model, model_options

__all__ = [
    "VGG",
    "VGGOptions",
    "make_features",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
]

_WIDTHS = (64, 128, 256, 512, 512)
_DEPTHS = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}


class VGGOptions(TypedDict, total=False):
    """Keyword arguments of the functions of this file; see `VGG`."""

    weights: None
    num_classes: int
    init_weights: bool
    dropout: float


class VGG(Model):
    """Convolutional features and three linear layers: output [batch, num_classes].

    Parameters
    ----------
    features
        Maps [batch, 3, h, w] to [batch, 512, h', w'], see `make_features`.
    num_classes
        Size of the output.
    init_weights
        Initialise the weights for training from scratch; else they are PyTorch's.
    dropout
        Probability of the two dropouts between the linear layers.
    """

    def __init__(
        self,
        features: nn.Module,
        num_classes: int = 1000,
        init_weights: bool = True,
        dropout: float = 0.5,
    ) -> None:
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        stages["features"] = features
        stages["avgpool"] = nn.AdaptiveAvgPool2d((7, 7))
        stages["flatten"] = nn.Flatten()
        stages["classifier"] = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        super().__init__(stages)
        if init_weights:
            self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)


def make_features(
    widths: Iterable[int], depths: Iterable[int], batch_norm: bool = False
) -> nn.Sequential:
    """Return groups of 3x3 convolutions, each closed by a pooling that halves the image.

    Parameters
    ----------
    widths
        Channels of the convolutions of each group.
    depths
        Number of convolutions of each group.
    batch_norm
        Normalise after each convolution.

    Returns
    -------
    nn.Sequential
        All groups, one after another.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip(widths, depths, strict=True):
        for _ in range(depth):
            layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)


def _build(name: str, pretrained: bool, options: VGGOptions) -> VGG:
    size, _, suffix = name.partition("_")
    arguments = model_options(name, options, VGGOptions, pretrained=pretrained)
    return VGG(make_features(_WIDTHS, _DEPTHS[size], suffix == "bn"), **arguments)


def vgg11(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 11 layers (A); `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg11", pretrained, options)


def vgg11_bn(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 11 layers (A), normalised; `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg11_bn", pretrained, options)


def vgg13(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 13 layers (B); `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg13", pretrained, options)


def vgg13_bn(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 13 layers (B), normalised; `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg13_bn", pretrained, options)


def vgg16(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 16 layers (D); `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg16", pretrained, options)


def vgg16_bn(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 16 layers (D), normalised; `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg16_bn", pretrained, options)


def vgg19(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 19 layers (E); `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg19", pretrained, options)


def vgg19_bn(pretrained: bool = False, progress: bool = True, **options: Unpack[VGGOptions]) -> VGG:
    """Build VGG of 19 layers (E), normalised; `options` are the keyword arguments of `VGG`."""
    del progress
    return _build("vgg19_bn", pretrained, options)
