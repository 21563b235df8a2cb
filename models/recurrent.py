"""Recurrent networks: cells that loop over time in Python, and encoders of PyTorch's own layers.

LSTM (Hochreiter and Schmidhuber, "Long short-term memory", 1997, with forget gates) and GRU (Cho et
al., arXiv:1406.1078, with the reset gate after the product, as in PyTorch). In `LSTM` and `GRU`
each product and each gate is a separate operation; `LSTMEncoder` and `GRUEncoder` are the word
language models of Zaremba et al. (arXiv:1409.2329), where the whole recurrence is one operation.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["GRU", "LSTM", "GRUEncoder", "LSTMEncoder"]


class _Recurrent(nn.Module):
    """Two linear maps of a cell, the loop over time, and a linear layer at its end."""

    def __init__(self, in_dim: int, mem_dim: int, classes: int, gates: int) -> None:
        super().__init__()
        self.mem_dim = mem_dim
        self.from_input = nn.Linear(in_dim, gates * mem_dim)
        self.from_state = nn.Linear(mem_dim, gates * mem_dim)
        self.classify = nn.Linear(mem_dim, classes)

    def _zeros(self, inputs: Tensor) -> Tensor:
        return inputs.new_zeros(inputs.shape[1], self.mem_dim)


class LSTM(_Recurrent):
    """LSTM cell by cell: input [time, batch, in_dim], output [batch, classes] of the last state.

    Weights and order of the gates (input, forget, cell, output) are those of ``torch.nn.LSTM``.

    Parameters
    ----------
    in_dim, mem_dim
        Features of the input at one time, and of the state.
    classes
        Size of the output.
    """

    def __init__(self, in_dim: int, mem_dim: int, classes: int = 10) -> None:
        super().__init__(in_dim, mem_dim, classes, gates=4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        hidden = cell = self._zeros(inputs)
        for x in inputs.unbind(0):
            hidden, cell = self.step(x, hidden, cell)
        return self.classify(hidden)  # type: ignore[no-any-return]

    def step(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after one more input [batch, in_dim]."""
        gates = self.from_input(x) + self.from_state(hidden)
        enter, keep, new, leave = gates.chunk(4, dim=1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(leave) * torch.tanh(cell), cell


class GRU(_Recurrent):
    """GRU cell by cell: input [time, batch, in_dim], output [batch, classes] of the last state.

    Weights and order of the gates (reset, update, new) are those of ``torch.nn.GRU``.

    Parameters
    ----------
    in_dim, mem_dim
        Features of the input at one time, and of the state.
    classes
        Size of the output.
    """

    def __init__(self, in_dim: int, mem_dim: int, classes: int = 10) -> None:
        super().__init__(in_dim, mem_dim, classes, gates=3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self._zeros(inputs)
        for x in inputs.unbind(0):
            hidden = self.step(x, hidden)
        return self.classify(hidden)  # type: ignore[no-any-return]

    def step(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the state after one more input [batch, in_dim]."""
        x_reset, x_update, x_new = self.from_input(x).chunk(3, dim=1)
        h_reset, h_update, h_new = self.from_state(hidden).chunk(3, dim=1)
        update = torch.sigmoid(x_update + h_update)
        new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
        return new + update * (hidden - new)


class _Encoder(nn.Module):
    """Embedding, dropout, a subclass's recurrent layers of PyTorch, dropout, decoder."""

    _layers: ClassVar[type[nn.LSTM | nn.GRU]]

    def __init__(
        self, vocab_size: int, in_dim: int, mem_dim: int, layers: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, in_dim)
        self.dropout = nn.Dropout(dropout)
        between = dropout if layers > 1 else 0.0
        self.recur = self._layers(in_dim, mem_dim, num_layers=layers, dropout=between)
        self.decode = nn.Linear(mem_dim, vocab_size)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.decode.weight, -0.1, 0.1)
        nn.init.zeros_(self.decode.bias)

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the logits and the state, from which the next words go on."""
        hidden, state = self.recur(self.dropout(self.embed(tokens)), state)
        return self.decode(self.dropout(hidden)), state


class LSTMEncoder(_Encoder):
    """Integers [time, batch] to logits [time, batch, vocab_size], by ``torch.nn.LSTM``.

    Parameters
    ----------
    vocab_size
        Number of tokens.
    in_dim, mem_dim
        Features of a token's embedding, and of the state.
    layers
        Recurrent layers on top of each other.
    dropout
        Probability of the dropouts: of embeddings, between layers and before the decoder.
    """

    _layers = nn.LSTM


class GRUEncoder(_Encoder):
    """Integers [time, batch] to logits [time, batch, vocab_size], by ``torch.nn.GRU``.

    Parameters
    ----------
    vocab_size
        Number of tokens.
    in_dim, mem_dim
        Features of a token's embedding, and of the state.
    layers
        Recurrent layers on top of each other.
    dropout
        Probability of the dropouts: of embeddings, between layers and before the decoder.
    """

    _layers = nn.GRU
