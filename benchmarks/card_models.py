"""Models of the days on a card: a Llama, and a U-Net of diffusion as SDXL has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import classification_batch, token_batch
from graph_truth import Language, UNet
from torch import nn
from torch.nn import functional as F

import rotor

Inputs = tuple[torch.Tensor, ...]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, heads, length, width), by halves."""
    length, half = x.shape[2], x.shape[3] // 2
    rates = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention with grouped keys, and a gated product (Touvron et al., 2023)."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        y = self.norms[0](x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (rotated(k), v))
        found = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width: int, blocks: int, words: int, heads: int, groups: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions with the embedding of the time between."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inner), nn.GroupNorm(8, outer)])
        self.first, self.second = (nn.Conv2d(n, outer, 3, padding=1) for n in (inner, outer))
        self.time = nn.Linear(time, outer)
        self.side = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The block."""
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.side(x) + self.second(F.silu(self.norms[1](y)))


class Attended(nn.Module):
    """Attention of pixels to pixels, then to a text, and a gated product."""

    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.query, self.of_text = nn.Linear(width, width), nn.Linear(text, 2 * width)
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def _attention(self, *parts: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The block, of (batch, width, height, width of the image)."""
        y = x.flatten(2).transpose(1, 2)
        y = y + self.outs[0](self._attention(*self.mixed(self.norms[0](y)).chunk(3, -1)))
        keys = self.of_text(text).chunk(2, -1)
        y = y + self.outs[1](self._attention(self.query(self.norms[1](y)), *keys))
        a, b = self.up(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(a * F.gelu(b))
        return y.transpose(1, 2).reshape(x.shape)


class Diffusion(nn.Module):
    """Three levels: convolutions alone, then two and more attended ones (Podell et al., 2023)."""

    def __init__(self, width: int, text: int, attended: tuple[int, int] = (1, 3)) -> None:
        super().__init__()
        sizes, counts, time = [width, 2 * width, 4 * width], (0, *attended), 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.begin = nn.Conv2d(4, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.down_attended, self.up_attended = nn.ModuleList(), nn.ModuleList()
        before = width
        for size, count in zip(sizes, counts, strict=True):
            self.down.append(Residual(before, size, time))
            self.down_attended.append(self._level(size, text, count))
            self.up.insert(0, Residual(2 * size, before, time))
            self.up_attended.insert(0, self._level(before, text, count if before > width else 0))
            before = size
        self.middle = Residual(before, before, time)
        self.norm, self.end = nn.GroupNorm(8, width), nn.Conv2d(width, 4, 3, padding=1)

    @staticmethod
    def _level(width: int, text: int, count: int) -> nn.ModuleList:
        return nn.ModuleList(Attended(width, text, max(width // 64, 1)) for _ in range(count))

    def forward(self, x: torch.Tensor, times: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The noise of latent images."""
        half = self.width // 2
        rates = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.begin(x), []
        for k, (block, others) in enumerate(zip(self.down, self.down_attended, strict=True)):
            x = block(F.avg_pool2d(x, 2) if k else x, time)
            for other in others:
                x = other(x, text)
            kept.append(x)
        x = self.middle(x, time)
        for k, (block, others) in enumerate(zip(self.up, self.up_attended, strict=True)):
            x = block(
                torch.cat([F.interpolate(x, scale_factor=2.0) if k else x, kept.pop()], 1), time
            )
            for other in others:
                x = other(x, text)
        return self.end(F.silu(self.norm(x)))


@dataclass(frozen=True)
class Case:
    """A model, its inputs and its target; `is_image` for channels last."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    target: torch.Tensor
    is_image: bool = False

    def start(self) -> nn.Module:
        """The model in training mode, where its inputs are."""
        torch.manual_seed(0)
        model = self.make().train().to(self.inputs[0].device)
        return model.to(memory_format=torch.channels_last) if self.is_image else model

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """The loss of an output."""
        if self.target.is_floating_point():
            return F.mse_loss(output.float(), self.target)
        return F.cross_entropy(output.flatten(0, -2).float(), self.target.flatten())


def cases(device: torch.device, *, small: bool) -> list[Case]:
    """A GPT with dropout, a Llama, ResNet-50, for rehearsals a U-Net, and a U-Net of diffusion."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    gpt, words = ((64, 3, 128, 2), 128) if small else ((768, 12, 8192, 12), 8192)
    llama = (64, 3, 128, 4, 2) if small else (1024, 8, 8192, 16, 4)
    length, batch = (64, 4) if small else (1024, 8)
    tokens, following = token_batch(batch, length, words, device)
    images, labels = classification_batch(*((4, 64) if small else (128, 224)), device, 10)
    size, width, wide = (32, 16, 32) if small else (64, 192, 768)
    count, attended = (4, (1, 1)) if small else (16, (1, 3))
    latents = noise(count, 4, size, size)
    given = (latents, torch.arange(count, device=device).float(), noise(count, 77, wide))

    def convolutions() -> nn.Module:
        return UNet(8) if small else rotor.resnet.resnet50(num_classes=10)

    return [
        Case("GPT", lambda: Language(*gpt), (tokens,), following),
        Case("Llama", lambda: Llama(*llama), (tokens,), following),
        Case("convolutions", convolutions, (images,), labels, is_image=True),
        Case("diffusion", lambda: Diffusion(width, wide, attended), given, noise(*latents.shape)),
    ]
