"""GPT as a chain of stages.

The decoder of Radford et al., "Language models are unsupervised multitask learners" (2019):
normalisation before attention and before the two-layer perceptron. Each half of a block is one
stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .utils import Model, Residual, named

__all__ = [
    "GPT",
    "SIZES",
    "CausalSelfAttention",
    "Embedding",
    "GPTChanges",
    "GPTSettings",
    "gpt",
    "gpt2",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_xl",
]


@dataclass(frozen=True, kw_only=True)
class GPTSettings:
    """The shape of a `GPT`.

    Attributes
    ----------
    vocab_size
        Number of tokens.
    context_length
        Longest sequence, in tokens.
    layers, heads, width
        Blocks, attention heads of a block, and features of a token.
    dropout
        Probability of the dropouts: of embeddings, attention weights and residuals.
    bias
        True: linear layers and normalisations have biases.
    tie_weights
        Use the token embedding as the last layer's weight.

    Raises
    ------
    ValueError
        A size is not positive, `width` is no multiple of `heads`, or `dropout` is no probability.
    """

    vocab_size: int = 50257
    context_length: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.1
    bias: bool = True
    tie_weights: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "layers", "heads", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is a positive integer, not {value!r}")
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} cannot be divided among heads={self.heads}; "
                "choose a multiple of it"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a probability from 0 to below 1, not {self.dropout!r}")


class GPTChanges(TypedDict, total=False):
    """Fields of `GPTSettings` that a caller may set."""

    vocab_size: int
    context_length: int
    layers: int
    heads: int
    width: int
    dropout: float
    bias: bool
    tie_weights: bool


SIZES: Mapping[str, GPTSettings] = MappingProxyType(
    {
        "tiny": GPTSettings(
            vocab_size=256, context_length=128, layers=4, heads=4, width=128, dropout=0.0
        ),
        "mini": GPTSettings(
            vocab_size=4096, context_length=256, layers=12, heads=6, width=384, dropout=0.0
        ),
        "gpt2": GPTSettings(),
        "gpt2-medium": GPTSettings(layers=24, heads=16, width=1024),
        "gpt2-large": GPTSettings(layers=36, heads=20, width=1280),
        "gpt2-xl": GPTSettings(layers=48, heads=25, width=1600),
    }
)
"""Settings by name: the four published sizes, and two for tests and processors."""


class Embedding(nn.Module):
    """Tokens and their positions: integers [batch, time] to [batch, time, width].

    Parameters
    ----------
    settings
        Uses vocab_size, context_length, width and dropout.
    """

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.token = nn.Embedding(settings.vocab_size, settings.width)
        self.position = nn.Embedding(settings.context_length, settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings; ValueError if there are too many tokens."""
        time, longest = tokens.shape[-1], self.position.num_embeddings
        if time > longest:
            raise ValueError(
                f"{time} tokens, but the model has context_length={longest}; cut the input or "
                "build the model with a longer context"
            )
        positions = torch.arange(time, device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))  # type: ignore[no-any-return]


class CausalSelfAttention(nn.Module):
    """Attention of each token to itself and earlier tokens: [batch, time, width] to the same.

    Parameters
    ----------
    settings
        Uses heads, width, dropout and bias.
    """

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.dropout = settings.dropout
        self.qkv = nn.Linear(settings.width, 3 * settings.width, bias=settings.bias)
        self.project = nn.Linear(settings.width, settings.width, bias=settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected attention."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.project(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


class GPT(Model):
    """A decoder-only transformer: integers [batch, time] to logits [batch, time, vocab_size].

    The stages are ``embed``, ``blocks`` (each of two stages, ``attention`` and ``mlp``), ``norm``
    and ``head``.

    Parameters
    ----------
    settings
        The shape of the network.
    """

    def __init__(self, settings: GPTSettings) -> None:
        embed = Embedding(settings)
        head = nn.Linear(settings.width, settings.vocab_size, bias=False)
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        stages["embed"] = embed
        stages["blocks"] = nn.Sequential(*(_block(settings) for _ in range(settings.layers)))
        stages["norm"] = nn.LayerNorm(settings.width, bias=settings.bias)
        stages["head"] = head
        super().__init__(stages)
        self.settings = settings
        self._initialise()
        if settings.tie_weights:
            head.weight = embed.token.weight

    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                deviation = 0.02
                if name.endswith(".project"):
                    deviation /= math.sqrt(2 * self.settings.layers)
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def gpt(size: str | GPTSettings = "gpt2", **changes: Unpack[GPTChanges]) -> GPT:
    """Build a GPT.

    Parameters
    ----------
    size
        A name in `SIZES`, or settings.
    **changes
        Fields of `GPTSettings` to change.

    Returns
    -------
    GPT
        The model, an ``nn.Sequential``, with weights drawn from PyTorch's generator.

    Raises
    ------
    ValueError
        The size is unknown, or the settings are inconsistent.
    TypeError
        A field is unknown.
    """
    if isinstance(size, str):
        if size not in SIZES:
            raise ValueError(f"no GPT of size {size!r}; there are {', '.join(SIZES)}")
        size = SIZES[size]
    known = [field.name for field in dataclasses.fields(GPTSettings)]
    unknown = sorted(changes.keys() - set(known))
    if unknown:
        raise TypeError(f"gpt() has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    return GPT(dataclasses.replace(size, **changes))


def gpt2(**changes: Unpack[GPTChanges]) -> GPT:
    """Build GPT-2 of 124 million parameters; `changes` as for `gpt`."""
    return gpt("gpt2", **changes)


def gpt2_medium(**changes: Unpack[GPTChanges]) -> GPT:
    """Build GPT-2 of 355 million parameters; `changes` as for `gpt`."""
    return gpt("gpt2-medium", **changes)


def gpt2_large(**changes: Unpack[GPTChanges]) -> GPT:
    """Build GPT-2 of 774 million parameters; `changes` as for `gpt`."""
    return gpt("gpt2-large", **changes)


def gpt2_xl(**changes: Unpack[GPTChanges]) -> GPT:
    """Build GPT-2 of 1558 million parameters; `changes` as for `gpt`."""
    return gpt("gpt2-xl", **changes)


def _block(settings: GPTSettings) -> nn.Sequential:
    width, bias = settings.width, settings.bias
    attention = named(
        norm=nn.LayerNorm(width, bias=bias),
        attend=CausalSelfAttention(settings),
        dropout=nn.Dropout(settings.dropout),
    )
    mlp = named(
        norm=nn.LayerNorm(width, bias=bias),
        expand=nn.Linear(width, 4 * width, bias=bias),
        gelu=nn.GELU(approximate="tanh"),
        project=nn.Linear(4 * width, width, bias=bias),
        dropout=nn.Dropout(settings.dropout),
    )
    return named(attention=Residual(attention), mlp=Residual(mlp))
