"""Parts of a model on an accelerator, where no single graph of the whole exists."""

import pytest
import torch
from limited_on_sim import compared, one_step
from torch import nn

import rotor

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


class Reading(nn.Module):
    """Residual block that reads a number in some places: no graph of it is captured there."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.norm = reads, nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, value):
        scale = 0.5 if self.reads and float(value.detach().abs().max()) > 1e6 else 1.0
        return value + scale * self.down(nn.functional.gelu(self.up(self.norm(value))))


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Reading(k == 2) for k in range(6))

    def forward(self, value):
        for block in self.blocks:
            value = block(value)
        return value


@pytest.mark.filterwarnings("ignore:no single graph")
def test_a_limit_that_is_lowered_is_kept_at_once(sim):
    """Hand over before a step where what metered steps have shown does not fit."""
    data = torch.randn(ROWS, 64, device="sim")
    limited = rotor.Checkpointable(Loop().to("sim"), mem_limit="200MiB", verbosity=-1)
    for _ in range(2):
        one_step(limited, data, False)
        limited.zero_grad()
    assert limited.plan.engine == "parts"
    limited.mem_limit = limit = int(0.4 * limited.plan.unlimited_bytes)
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    with pytest.warns(rotor.MemoryLimitWarning, match="is less than the predicted need"):
        one_step(limited, data, False)
    assert limited.plan.engine == "dynamic"
    assert sim.max_memory_allocated() - level <= limit
