"""The dynamic engine on an accelerator: bits, random states and peaks by the device's counters."""

import pytest
import torch
from limited_on_sim import batches, compared
from torch import nn
from zoo.models import Varying

from rotor import dtr

WIDTH, ROWS = 128, 512


def varying(dropout):
    parts = lambda: (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))  # noqa: E731
    return Varying(*(nn.Sequential(*parts()) for _ in range(6)))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("inside", [True, False])
def test_bit_equal_within_the_limit(sim, dropout, inside):
    limit, plain, ours = compared(
        sim, lambda: varying(dropout), batches(), 0.7, engine="dynamic", inside=inside
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
