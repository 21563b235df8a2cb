"""A language model of transformer encoder layers under a causal mask.

Vaswani et al., "Attention is all you need", arXiv:1706.03762: sinusoidal positions, normalisation
after each half of a layer. Attention is written out, so that each product, the softmax and the
dropout are separate operations; `LayeredTransformer` has the same shape from PyTorch's layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LayeredTransformer", "PositionalEncoding", "Transformer", "TransformerLayer"]


class PositionalEncoding(nn.Module):
    """Sum with sines and cosines of the position: [batch, time, width] to the same.

    Parameters
    ----------
    width
        Features of a token.
    longest
        Number of positions.
    """

    table: Tensor

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        position = torch.arange(longest, dtype=torch.float32)[:, None]
        pairs = torch.arange(0, width, 2, dtype=torch.float32)
        angles = position * torch.exp(pairs * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2] = torch.sin(angles)
        table[:, 1::2] = torch.cos(angles[:, : width // 2])
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum; ValueError if there are more tokens than positions."""
        time, longest = x.shape[1], len(self.table)
        if time > longest:
            raise ValueError(
                f"{time} tokens, but the model has {longest} positions; cut the input or build the "
                "model with longer ones"
            )
        return x + self.table[:time]


class TransformerLayer(nn.Module):
    """Attention and a perceptron of two layers: [batch, time, width] to the same.

    Parameters
    ----------
    width, heads
        Features of a token, divided among heads.
    hidden
        Features between the perceptron's layers.
    dropout
        Probability of the dropouts: of attention, within the perceptron, and of each half.

    Raises
    ------
    ValueError
        `width` is no multiple of `heads`.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width={width} cannot be divided among heads={heads}; choose a multiple of it"
            )
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the layer's output; `mask` [time, time] is added to the scores."""
        x = self.norm1(x + self.dropout(self._attend(x, mask)))
        inner = self.dropout(F.relu(self.expand(x)))
        return self.norm2(x + self.dropout(self.contract(inner)))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        weights = self.dropout(torch.softmax(scores + mask, dim=-1))
        mixed = (weights @ value).transpose(1, 2).reshape(batch, time, width)
        return self.project(mixed)  # type: ignore[no-any-return]


class _LanguageModel(nn.Module):
    """Embedding, positions, a subclass's layers, decoder."""

    def __init__(
        self,
        vocab_size: int,
        width: int = 512,
        heads: int = 8,
        hidden: int = 2048,
        layers: int = 6,
        longest: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(vocab_size, width)
        self.position = PositionalEncoding(width, longest)
        self.dropout = nn.Dropout(dropout)
        self.decode = nn.Linear(width, vocab_size)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.decode.weight, -0.1, 0.1)
        nn.init.zeros_(self.decode.bias)
        self.layers = nn.ModuleList(
            self._make_layer(width, heads, hidden, dropout) for _ in range(layers)
        )

    @staticmethod
    def _make_layer(width: int, heads: int, hidden: int, dropout: float) -> nn.Module:
        """Return a layer that is called with [batch, time, width] and a mask."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities of the next token after each."""
        time = tokens.shape[1]
        mask = torch.full((time, time), -math.inf, device=tokens.device).triu(1)
        x = self.dropout(self.position(self.embed(tokens) * math.sqrt(self.width)))
        for layer in self.layers:
            x = layer(x, mask)
        return F.log_softmax(self.decode(x), dim=-1)


class Transformer(_LanguageModel):
    """Integers [batch, time] to log-probabilities [batch, time, vocab_size], written out.

    Parameters
    ----------
    vocab_size
        Number of tokens.
    width, heads, hidden
        Shape of each `TransformerLayer`.
    layers
        Number of layers.
    longest
        Number of positions.
    dropout
        Probability of all dropouts.
    """

    @staticmethod
    def _make_layer(width: int, heads: int, hidden: int, dropout: float) -> nn.Module:
        return TransformerLayer(width, heads, hidden, dropout)


class LayeredTransformer(_LanguageModel):
    """The same from ``torch.nn.TransformerEncoderLayer``, whose attention is one operation.

    Parameters
    ----------
    vocab_size
        Number of tokens.
    width, heads, hidden
        Shape of each layer.
    layers
        Number of layers.
    longest
        Number of positions.
    dropout
        Probability of all dropouts.
    """

    @staticmethod
    def _make_layer(width: int, heads: int, hidden: int, dropout: float) -> nn.Module:
        return nn.TransformerEncoderLayer(width, heads, hidden, dropout, batch_first=True)
