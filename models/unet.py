"""U-Net: an image to a map of logits of the same size.

Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation",
arXiv:1505.04597, with convolutions that keep height and width, and with batch normalisation if
asked for. It is no chain: results of the contracting path wait for the expanding path.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["UNet", "Upsampling"]

Upsampling = Literal["transposed", "bilinear"]
"""Methods of enlarging in the expanding path: a 2x2 transposed convolution, or interpolation."""


class UNet(nn.Module):
    """Input [batch, in_channels, h, w], output [batch, out_channels, h, w].

    Parameters
    ----------
    in_channels, out_channels
        Channels of the image, and of the logits.
    width
        Channels of the first level; each of the four levels below has twice as many.
    upsampling
        ``"transposed"``, as published: a convolution that halves the channels. ``"bilinear"``:
        interpolation without parameters; the lowest level then has no more channels than the one
        above it, and each enlarged level half as many as it is joined with.
    batch_norm
        Normalise after each 3x3 convolution.

    Raises
    ------
    ValueError
        `upsampling` is an unknown word, or `width` is not positive.
    """

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 1,
        width: int = 64,
        upsampling: Upsampling = "transposed",
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        if upsampling not in get_args(Upsampling):
            words = " or ".join(map(repr, get_args(Upsampling)))
            raise ValueError(f"upsampling is {words}, not {upsampling!r}")
        if width < 1:
            raise ValueError(f"width is at least 1, not {width}")
        bilinear = upsampling == "bilinear"
        widths = [width * 2**level for level in range(5)]
        widths[-1] //= 2 if bilinear else 1
        self.first = _two_convolutions(in_channels, widths[0], widths[0], batch_norm)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _two_convolutions(above, below, below, batch_norm))
            for above, below in pairwise(widths)
        )
        self.enlarge = nn.ModuleList()
        self.up = nn.ModuleList()
        channels = widths[-1]
        for level in range(3, -1, -1):
            skip = widths[level]
            out = skip
            if bilinear:
                self.enlarge.append(
                    nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
                )
                out = max(skip // 2, width)
            else:
                self.enlarge.append(nn.ConvTranspose2d(channels, skip, kernel_size=2, stride=2))
            self.up.append(_two_convolutions(2 * skip, skip, out, batch_norm))
            channels = out
        self.last = nn.Conv2d(channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; ValueError if height or width is below 16."""
        if min(x.shape[-2:]) < 16:
            raise ValueError(
                f"an image of {x.shape[-2]} x {x.shape[-1]} pixels cannot be halved four times; "
                "give at least 16 x 16"
            )
        x = self.first(x)
        waiting = []
        for down in self.down:
            waiting.append(x)
            x = down(x)
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            x = enlarge(x)
            skip = waiting.pop()
            tall, wide = skip.shape[-2] - x.shape[-2], skip.shape[-1] - x.shape[-1]
            if tall or wide:
                x = F.pad(x, (wide // 2, wide - wide // 2, tall // 2, tall - tall // 2))
            x = up(torch.cat([skip, x], dim=1))
        return self.last(x)  # type: ignore[no-any-return]


def _two_convolutions(channels: int, inner: int, out: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((channels, inner), (inner, out)):
        layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1))
        if batch_norm:
            layers.append(nn.BatchNorm2d(after))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)
