"""Inception v3 as a chain of stages.

Szegedy et al., "Rethinking the Inception architecture for computer vision", arXiv:1512.00567.
Every convolution of the stem and every Inception block is one stage. In training the auxiliary
classifier turns the tensor between stages into a pair, of which the later stages change the first
element. Names and shapes of the state are torchvision's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .utils import Model, branch_off, model_options, on_first

__all__ = [
    "BasicConv2d",
    "Inception3",
    "InceptionA",
    "InceptionAux",
    "InceptionB",
    "InceptionC",
    "InceptionD",
    "InceptionE",
    "InceptionOptions",
    "InceptionOutputs",
    "inception_v3",
]

MakeModule = Callable[..., nn.Module]

_PUBLISHED_SCALING = ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))


class InceptionOutputs(NamedTuple):
    """Results of a training step: both of shape [batch, num_classes]."""

    logits: Tensor
    aux_logits: Tensor


class InceptionOptions(TypedDict, total=False):
    """Keyword arguments of `inception_v3`; see `Inception3`."""

    weights: None
    num_classes: int
    aux_logits: bool
    transform_input: bool
    inception_blocks: Sequence[MakeModule] | None
    init_weights: bool | None
    dropout: float


class BasicConv2d(nn.Module):
    """A convolution without bias, a batch normalisation and a ReLU.

    Parameters
    ----------
    in_channels, out_channels
        Channels that come in, and that go out.
    **kwargs
        Further arguments of ``torch.nn.Conv2d``.
    """

    def __init__(self, in_channels: int, out_channels: int, **kwargs: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, in_channels, h, w] to [batch, out_channels, h', w']."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionA(nn.Module):
    """Branches of 1x1, 5x5, two 3x3 and a pooling (figure 5 of the paper).

    Parameters
    ----------
    in_channels
        Channels that come in; 224 + `pool_features` go out.
    pool_features
        Channels of the pooling branch.
    conv_block
        Makes a convolution, by default `BasicConv2d`.
    """

    def __init__(
        self, in_channels: int, pool_features: int, conv_block: MakeModule | None = None
    ) -> None:
        super().__init__()
        conv = BasicConv2d if conv_block is None else conv_block
        self.branch1x1 = conv(in_channels, 64, kernel_size=1)
        self.branch5x5_1 = conv(in_channels, 48, kernel_size=1)
        self.branch5x5_2 = conv(48, 64, kernel_size=5, padding=2)
        self.branch3x3dbl_1 = conv(in_channels, 64, kernel_size=1)
        self.branch3x3dbl_2 = conv(64, 96, kernel_size=3, padding=1)
        self.branch3x3dbl_3 = conv(96, 96, kernel_size=3, padding=1)
        self.branch_pool = conv(in_channels, pool_features, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches; height and width stay."""
        return torch.cat(
            [
                self.branch1x1(x),
                self.branch5x5_2(self.branch5x5_1(x)),
                self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
                self.branch_pool(_pool(x)),
            ],
            dim=1,
        )


class InceptionB(nn.Module):
    """Block that halves the image: branches of 3x3, two 3x3 and a pooling.

    Parameters
    ----------
    in_channels
        Channels that come in; 480 more go out.
    conv_block
        Makes a convolution, by default `BasicConv2d`.
    """

    def __init__(self, in_channels: int, conv_block: MakeModule | None = None) -> None:
        super().__init__()
        conv = BasicConv2d if conv_block is None else conv_block
        self.branch3x3 = conv(in_channels, 384, kernel_size=3, stride=2)
        self.branch3x3dbl_1 = conv(in_channels, 64, kernel_size=1)
        self.branch3x3dbl_2 = conv(64, 96, kernel_size=3, padding=1)
        self.branch3x3dbl_3 = conv(96, 96, kernel_size=3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches."""
        return torch.cat(
            [
                self.branch3x3(x),
                self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
                F.max_pool2d(x, kernel_size=3, stride=2),
            ],
            dim=1,
        )


class InceptionC(nn.Module):
    """Branches of 1x1, a 7x7 in two factors, two such and a pooling (figure 6 of the paper).

    Parameters
    ----------
    in_channels
        Channels that come in; 768 go out.
    channels_7x7
        Channels between the factors.
    conv_block
        Makes a convolution, by default `BasicConv2d`.
    """

    def __init__(
        self, in_channels: int, channels_7x7: int, conv_block: MakeModule | None = None
    ) -> None:
        super().__init__()
        conv = BasicConv2d if conv_block is None else conv_block
        wide = {"kernel_size": (1, 7), "padding": (0, 3)}
        tall = {"kernel_size": (7, 1), "padding": (3, 0)}
        inner = channels_7x7
        self.branch1x1 = conv(in_channels, 192, kernel_size=1)
        self.branch7x7_1 = conv(in_channels, inner, kernel_size=1)
        self.branch7x7_2 = conv(inner, inner, **wide)
        self.branch7x7_3 = conv(inner, 192, **tall)
        self.branch7x7dbl_1 = conv(in_channels, inner, kernel_size=1)
        self.branch7x7dbl_2 = conv(inner, inner, **tall)
        self.branch7x7dbl_3 = conv(inner, inner, **wide)
        self.branch7x7dbl_4 = conv(inner, inner, **tall)
        self.branch7x7dbl_5 = conv(inner, 192, **wide)
        self.branch_pool = conv(in_channels, 192, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches; height and width stay."""
        single = self.branch1x1(x)
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([single, seven, twice, self.branch_pool(_pool(x))], dim=1)


class InceptionD(nn.Module):
    """Block that halves the image: branches of 3x3, 7x7 in factors then 3x3, and a pooling.

    Parameters
    ----------
    in_channels
        Channels that come in; 512 more go out.
    conv_block
        Makes a convolution, by default `BasicConv2d`.
    """

    def __init__(self, in_channels: int, conv_block: MakeModule | None = None) -> None:
        super().__init__()
        conv = BasicConv2d if conv_block is None else conv_block
        self.branch3x3_1 = conv(in_channels, 192, kernel_size=1)
        self.branch3x3_2 = conv(192, 320, kernel_size=3, stride=2)
        self.branch7x7x3_1 = conv(in_channels, 192, kernel_size=1)
        self.branch7x7x3_2 = conv(192, 192, kernel_size=(1, 7), padding=(0, 3))
        self.branch7x7x3_3 = conv(192, 192, kernel_size=(7, 1), padding=(3, 0))
        self.branch7x7x3_4 = conv(192, 192, kernel_size=3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches."""
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        seven = self.branch7x7x3_4(seven)
        return torch.cat([three, seven, F.max_pool2d(x, kernel_size=3, stride=2)], dim=1)


class InceptionE(nn.Module):
    """Branches that end side by side in 1x3 and 3x1 (figure 7 of the paper).

    Parameters
    ----------
    in_channels
        Channels that come in; 2048 go out.
    conv_block
        Makes a convolution, by default `BasicConv2d`.
    """

    def __init__(self, in_channels: int, conv_block: MakeModule | None = None) -> None:
        super().__init__()
        conv = BasicConv2d if conv_block is None else conv_block
        wide = {"kernel_size": (1, 3), "padding": (0, 1)}
        tall = {"kernel_size": (3, 1), "padding": (1, 0)}
        self.branch1x1 = conv(in_channels, 320, kernel_size=1)
        self.branch3x3_1 = conv(in_channels, 384, kernel_size=1)
        self.branch3x3_2a = conv(384, 384, **wide)
        self.branch3x3_2b = conv(384, 384, **tall)
        self.branch3x3dbl_1 = conv(in_channels, 448, kernel_size=1)
        self.branch3x3dbl_2 = conv(448, 384, kernel_size=3, padding=1)
        self.branch3x3dbl_3a = conv(384, 384, **wide)
        self.branch3x3dbl_3b = conv(384, 384, **tall)
        self.branch_pool = conv(in_channels, 192, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches; height and width stay."""
        single = self.branch1x1(x)
        three = self.branch3x3_1(x)
        three = torch.cat([self.branch3x3_2a(three), self.branch3x3_2b(three)], dim=1)
        twice = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        twice = torch.cat([self.branch3x3dbl_3a(twice), self.branch3x3dbl_3b(twice)], dim=1)
        return torch.cat([single, three, twice, self.branch_pool(_pool(x))], dim=1)


class InceptionAux(nn.Module):
    """The auxiliary classifier: [batch, in_channels, 17, 17] to [batch, num_classes].

    Parameters
    ----------
    in_channels
        Channels that come in.
    num_classes
        Size of the output.
    conv_block
        Makes a convolution, by default `BasicConv2d`.
    """

    def __init__(
        self, in_channels: int, num_classes: int, conv_block: MakeModule | None = None
    ) -> None:
        super().__init__()
        conv = BasicConv2d if conv_block is None else conv_block
        self.conv0 = conv(in_channels, 128, kernel_size=1)
        self.conv1 = conv(128, 768, kernel_size=5)
        self.fc = nn.Linear(768, num_classes)
        self.fc.stddev = 0.001  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.avg_pool2d(x, kernel_size=5, stride=3)
        x = F.adaptive_avg_pool2d(self.conv1(self.conv0(x)), (1, 1))
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


class InputScaling(nn.Module):
    """Scaling from images of mean 0 and variance 1 to the scaling of the published weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift each channel of [batch, 3, h, w]."""
        channels = [
            x[:, index] * (deviation / 0.5) + (mean - 0.5) / 0.5
            for index, (mean, deviation) in enumerate(_PUBLISHED_SCALING)
        ]
        return torch.stack(channels, dim=1)


class Outputs(nn.Module):
    """Stage that names the two results of a training step; other values pass unchanged."""

    def forward(self, x: Any) -> Any:
        """Return `InceptionOutputs` of a pair."""
        return InceptionOutputs(*x) if isinstance(x, tuple) else x


class Inception3(Model):
    """Inception v3: input [batch, 3, h, w], output [batch, num_classes].

    Images have at least 75 pixels a side; in training with `aux_logits`, at least 299.

    Parameters
    ----------
    num_classes
        Size of the output.
    aux_logits
        Have an auxiliary classifier. Training then returns `InceptionOutputs`.
    transform_input
        The input is normalised as for other networks (mean 0, variance 1 for each channel); scale
        it as torchvision's published weights want it, which are used with True.
    inception_blocks
        Seven callables that make the convolutions, the blocks A to E and the auxiliary
        classifier, with the arguments of the classes of this file; None for those.
    init_weights
        Initialise the weights for training from scratch: truncated normal of deviation 0.1, or
        of a layer's attribute ``stddev``. None means True; False leaves them as PyTorch's.
    dropout
        Probability of the dropout before the last layer.

    Raises
    ------
    ValueError
        `inception_blocks` are not seven.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        aux_logits: bool = True,
        transform_input: bool = False,
        inception_blocks: Sequence[MakeModule] | None = None,
        init_weights: bool | None = None,
        dropout: float = 0.5,
    ) -> None:
        blocks: Sequence[MakeModule] = (
            BasicConv2d,
            InceptionA,
            InceptionB,
            InceptionC,
            InceptionD,
            InceptionE,
            InceptionAux,
        )
        if inception_blocks is not None:
            blocks = inception_blocks
        if len(blocks) != 7:
            raise ValueError(
                "inception_blocks are seven callables: for a convolution, for the blocks A, B, "
                f"C, D, E and for the auxiliary classifier, not {len(blocks)}"
            )
        conv, block_a, block_b, block_c, block_d, block_e, aux = blocks
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        if transform_input:
            stages["input_scaling"] = InputScaling()
        stages["Conv2d_1a_3x3"] = conv(3, 32, kernel_size=3, stride=2)
        stages["Conv2d_2a_3x3"] = conv(32, 32, kernel_size=3)
        stages["Conv2d_2b_3x3"] = conv(32, 64, kernel_size=3, padding=1)
        stages["maxpool1"] = nn.MaxPool2d(kernel_size=3, stride=2)
        stages["Conv2d_3b_1x1"] = conv(64, 80, kernel_size=1)
        stages["Conv2d_4a_3x3"] = conv(80, 192, kernel_size=3)
        stages["maxpool2"] = nn.MaxPool2d(kernel_size=3, stride=2)
        stages["Mixed_5b"] = block_a(192, pool_features=32)
        stages["Mixed_5c"] = block_a(256, pool_features=64)
        stages["Mixed_5d"] = block_a(288, pool_features=64)
        stages["Mixed_6a"] = block_b(288)
        for letter, inner in zip("bcde", (128, 160, 160, 192), strict=True):
            stages[f"Mixed_6{letter}"] = block_c(768, channels_7x7=inner)
        if aux_logits:
            stages["AuxLogits"] = branch_off(aux(768, num_classes))
        tail = {
            "Mixed_7a": block_d(768),
            "Mixed_7b": block_e(1280),
            "Mixed_7c": block_e(2048),
            "avgpool": nn.AdaptiveAvgPool2d((1, 1)),
            "dropout": nn.Dropout(dropout),
            "flatten": nn.Flatten(),
            "fc": nn.Linear(2048, num_classes),
        }
        for name, stage in tail.items():
            stages[name] = on_first(stage) if aux_logits else stage
        if aux_logits:
            stages["outputs"] = Outputs()
        super().__init__(stages)
        if init_weights is None or init_weights:
            self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                deviation: Any = getattr(module, "stddev", 0.1)
                nn.init.trunc_normal_(module.weight, mean=0.0, std=deviation, a=-2, b=2)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)


def inception_v3(
    pretrained: bool = False, progress: bool = True, **options: Unpack[InceptionOptions]
) -> Inception3:
    """Build Inception v3; `options` are the keyword arguments of `Inception3`."""
    del progress
    return Inception3(
        **model_options("inception_v3", options, InceptionOptions, pretrained=pretrained)
    )


def _pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
