"""Parts of a model on an accelerator, where no single graph of the whole exists."""

import pytest
import torch
from limited_on_sim import compared
from torch import nn

WIDTH, ROWS = 128, 512


class Broken(nn.Module):
    """Blocks between which Python decides by a value: their own graphs are captured."""

    def __init__(self, dropout):
        super().__init__()
        self.first = self.block(dropout)
        self.second = self.block(dropout)

    @staticmethod
    def block(dropout):
        first = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)
        return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))

    def forward(self, value):
        value = self.first(value)
        if value.sum().item() > 1e9:
            value = value * 2
        return self.second(value)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.filterwarnings("ignore:no single graph")
@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_bit_equal_within_the_limit(sim, dropout):
    torch.manual_seed(0)
    data = [torch.randn(ROWS, WIDTH, device="sim") for _ in range(4)]
    limit, plain, ours = compared(sim, lambda: Broken(dropout), data, 0.75, engine="auto")
    assert min(plain.peaks) > limit
    assert max(ours.peaks[2:]) <= limit
