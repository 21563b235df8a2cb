"""Residual networks as chains of stages.

ResNet (He et al., "Deep residual learning for image recognition", arXiv:1512.03385) with the
stride of a bottleneck on its 3x3 convolution, ResNeXt (Xie et al., arXiv:1611.05431) and wide
ResNet (Zagoruyko and Komodakis, arXiv:1605.07146). Every residual block is one stage. Names and
shapes of the state are torchvision's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypedDict, Unpack

from torch import Tensor, nn

from .utils import Model, model_options

__all__ = [
    "BasicBlock",
    "Bottleneck",
    "ResNet",
    "ResNetOptions",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]

NormLayer = Callable[[int], nn.Module]


class ResNetOptions(TypedDict, total=False):
    """Keyword arguments of the functions of this file; see `ResNet`."""

    weights: None
    num_classes: int
    zero_init_residual: bool
    groups: int
    width_per_group: int
    replace_stride_with_dilation: Sequence[bool] | None
    norm_layer: NormLayer | None


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Parameters
    ----------
    inplanes, planes
        Channels that come in, and that go out.
    stride
        Stride of the first convolution.
    downsample
        The shortcut if shapes differ; the identity if None.
    groups, base_width, dilation
        Must be 1, 64 and 1: the block exists in this width only.
    norm_layer
        Makes a normalisation of a number of channels; ``BatchNorm2d`` if None.

    Raises
    ------
    ValueError
        `groups`, `base_width` or `dilation` has another value.
    """

    expansion: ClassVar[int] = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        groups: int = 1,
        base_width: int = 64,
        dilation: int = 1,
        norm_layer: NormLayer | None = None,
    ) -> None:
        super().__init__()
        if (groups, base_width, dilation) != (1, 64, 1):
            raise ValueError(
                "BasicBlock is defined for groups=1, base_width=64 and dilation=1, not "
                f"{groups}, {base_width} and {dilation}; networks of Bottleneck take others"
            )
        norm = nn.BatchNorm2d if norm_layer is None else norm_layer
        self.conv1 = _conv3x3(inplanes, planes, stride)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(planes, planes)
        self.bn2 = norm(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inplanes, h, w] to [batch, planes, h / stride, w / stride]."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut.

    Parameters
    ----------
    inplanes
        Channels that come in.
    planes
        A quarter of the channels that go out.
    stride, dilation
        Stride and dilation of the 3x3 convolution.
    downsample
        The shortcut if shapes differ; the identity if None.
    groups
        Groups of the 3x3 convolution.
    base_width
        Channels of a group if `planes` is 64.
    norm_layer
        Makes a normalisation of a number of channels; ``BatchNorm2d`` if None.
    """

    expansion: ClassVar[int] = 4

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        groups: int = 1,
        base_width: int = 64,
        dilation: int = 1,
        norm_layer: NormLayer | None = None,
    ) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if norm_layer is None else norm_layer
        width = planes * base_width // 64 * groups
        self.conv1 = _conv1x1(inplanes, width)
        self.bn1 = norm(width)
        self.conv2 = _conv3x3(width, width, stride, groups, dilation)
        self.bn2 = norm(width)
        self.conv3 = _conv1x1(width, planes * self.expansion)
        self.bn3 = norm(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inplanes, h, w] to [batch, 4 planes, h / stride, w / stride]."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet(Model):
    """A residual network: input [batch, 3, h, w], output [batch, num_classes].

    Parameters
    ----------
    block
        `BasicBlock` or `Bottleneck`.
    layers
        Numbers of blocks in the four groups.
    num_classes
        Size of the output.
    zero_init_residual
        Initialise residual functions to zero: the last normalisation of each block gets
        weight 0.
    groups, width_per_group
        Groups and their width of the 3x3 convolutions of `Bottleneck`.
    replace_stride_with_dilation
        Flags for the last three groups: True replaces the stride of 2 by dilation.
    norm_layer
        Makes a normalisation of a number of channels; ``BatchNorm2d`` if None.

    Raises
    ------
    ValueError
        `layers` or `replace_stride_with_dilation` has the wrong length, or `block` does not exist
        in this width.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        num_classes: int = 1000,
        zero_init_residual: bool = False,
        groups: int = 1,
        width_per_group: int = 64,
        replace_stride_with_dilation: Sequence[bool] | None = None,
        norm_layer: NormLayer | None = None,
    ) -> None:
        dilate = replace_stride_with_dilation
        if dilate is None:
            dilate = (False, False, False)
        if len(dilate) != 3:
            raise ValueError(
                "replace_stride_with_dilation says yes or no for each of the last three groups of "
                f"blocks, not {dilate!r}"
            )
        if len(layers) != 4:
            raise ValueError(f"layers gives the blocks of four groups, not {layers!r}")
        norm = nn.BatchNorm2d if norm_layer is None else norm_layer
        make = partial(block, groups=groups, base_width=width_per_group, norm_layer=norm)
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        stages["conv1"] = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        stages["bn1"] = norm(64)
        stages["relu"] = nn.ReLU(inplace=True)
        stages["maxpool"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        inplanes, dilation = 64, 1
        for index, (count, dilated) in enumerate(zip(layers, (False, *dilate), strict=True)):
            planes = 64 * 2**index
            stride = 1 if index == 0 or dilated else 2
            group: list[nn.Module] = [
                make(
                    inplanes,
                    planes,
                    stride,
                    _shortcut(inplanes, planes * block.expansion, stride, norm),
                    dilation=dilation,
                )
            ]
            dilation *= 2 if dilated else 1
            inplanes = planes * block.expansion
            group += [make(inplanes, planes, dilation=dilation) for _ in range(1, count)]
            stages[f"layer{index + 1}"] = nn.Sequential(*group)
        stages["avgpool"] = nn.AdaptiveAvgPool2d((1, 1))
        stages["flatten"] = nn.Flatten()
        stages["fc"] = nn.Linear(inplanes, num_classes)
        super().__init__(stages)
        self._initialise(zero_init_residual)

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm) and module.affine:
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        if zero_init_residual:
            for module in self.modules():
                last: Any = None
                if isinstance(module, Bottleneck):
                    last = module.bn3
                elif isinstance(module, BasicBlock):
                    last = module.bn2
                if getattr(last, "weight", None) is not None:
                    nn.init.zeros_(last.weight)


def _conv3x3(
    inplanes: int, planes: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    return nn.Conv2d(
        inplanes,
        planes,
        kernel_size=3,
        stride=stride,
        padding=dilation,
        dilation=dilation,
        groups=groups,
        bias=False,
    )


def _conv1x1(inplanes: int, planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inplanes, planes, kernel_size=1, stride=stride, bias=False)


def _shortcut(inplanes: int, planes: int, stride: int, norm: NormLayer) -> nn.Module | None:
    if stride == 1 and inplanes == planes:
        return None
    return nn.Sequential(_conv1x1(inplanes, planes, stride), norm(planes))


def _build(
    name: str,
    pretrained: bool,
    block: type[BasicBlock | Bottleneck],
    layers: Sequence[int],
    options: ResNetOptions,
    **fixed: int,
) -> ResNet:
    return ResNet(
        block, layers, **model_options(name, options, ResNetOptions, fixed, pretrained=pretrained)
    )


def resnet18(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNet-18; `options` are the keyword arguments of `ResNet`."""
    del progress
    return _build("resnet18", pretrained, BasicBlock, (2, 2, 2, 2), options)


def resnet34(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNet-34; `options` are the keyword arguments of `ResNet`."""
    del progress
    return _build("resnet34", pretrained, BasicBlock, (3, 4, 6, 3), options)


def resnet50(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNet-50; `options` are the keyword arguments of `ResNet`."""
    del progress
    return _build("resnet50", pretrained, Bottleneck, (3, 4, 6, 3), options)


def resnet101(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNet-101; `options` are the keyword arguments of `ResNet`."""
    del progress
    return _build("resnet101", pretrained, Bottleneck, (3, 4, 23, 3), options)


def resnet152(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNet-152; `options` are the keyword arguments of `ResNet`."""
    del progress
    return _build("resnet152", pretrained, Bottleneck, (3, 8, 36, 3), options)


def resnext50_32x4d(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNeXt-50 of 32 groups of 4 channels; other `options` as for `ResNet`."""
    del progress
    fixed = {"groups": 32, "width_per_group": 4}
    return _build("resnext50_32x4d", pretrained, Bottleneck, (3, 4, 6, 3), options, **fixed)


def resnext101_32x8d(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNeXt-101 of 32 groups of 8 channels; other `options` as for `ResNet`."""
    del progress
    fixed = {"groups": 32, "width_per_group": 8}
    return _build("resnext101_32x8d", pretrained, Bottleneck, (3, 4, 23, 3), options, **fixed)


def resnext101_64x4d(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNeXt-101 of 64 groups of 4 channels; other `options` as for `ResNet`."""
    del progress
    fixed = {"groups": 64, "width_per_group": 4}
    return _build("resnext101_64x4d", pretrained, Bottleneck, (3, 4, 23, 3), options, **fixed)


def wide_resnet50_2(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNet-50 with 3x3 convolutions twice as wide; other `options` as for `ResNet`."""
    del progress
    return _build(
        "wide_resnet50_2", pretrained, Bottleneck, (3, 4, 6, 3), options, width_per_group=128
    )


def wide_resnet101_2(
    pretrained: bool = False, progress: bool = True, **options: Unpack[ResNetOptions]
) -> ResNet:
    """Build ResNet-101 with 3x3 convolutions twice as wide; other `options` as for `ResNet`."""
    del progress
    return _build(
        "wide_resnet101_2", pretrained, Bottleneck, (3, 4, 23, 3), options, width_per_group=128
    )
