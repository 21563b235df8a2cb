"""The dynamic engine on an accelerator: bits, random states and peaks by the device's counters."""

import pytest
import torch
from limited_on_sim import compared
from torch import nn

from rotor import dtr

WIDTH, ROWS = 128, 512


class Varying(nn.Module):
    """A model whose depth depends on its input's values."""

    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.drop = nn.Dropout(dropout)

    def forward(self, value):
        layers = len(self.layers) - int(value[0, 0] > 0)
        for layer in self.layers[:layers]:
            value = self.drop(torch.tanh(layer(value)))
        return value


def batches(count=3):
    torch.manual_seed(0)
    return [torch.randn(ROWS, WIDTH, device="sim") for _ in range(count)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("inside", [True, False])
def test_bit_equal_within_the_limit(sim, dropout, inside):
    limit, plain, ours = compared(
        sim, lambda: Varying(dropout), batches(), 0.7, engine="dynamic", inside=inside
    )
    assert max(plain.peaks) > limit
    assert max(ours.peaks[0 if inside else 1 :]) <= limit


def test_a_budget_takes_the_accelerator(sim):
    """Limit the device that is in use, and keep its random states in replays."""
    torch.manual_seed(1)
    weight = torch.randn(WIDTH, WIDTH, device="sim", requires_grad=True)
    value = torch.randn(ROWS, WIDTH, device="sim")

    def loss_of():
        found = value
        for _ in range(8):
            found = nn.functional.dropout(torch.tanh(found @ weight), 0.2)
        return found.square().mean()

    torch.manual_seed(2)
    expected = torch.autograd.grad(loss_of(), weight)[0].cpu()
    torch.manual_seed(2)
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    with dtr.budget("2 MiB") as session:
        found = torch.autograd.grad(loss_of(), weight)[0]
        assert session.device == torch.device("sim", 0)
    assert session.stats.rematerializations > 0
    assert torch.equal(found.cpu(), expected)
    assert sim.max_memory_allocated() - level <= 2 << 20
