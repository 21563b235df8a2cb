"""Parts of a model on an accelerator, where no single graph of the whole exists."""

import pytest
import torch
from choice_models import parts
from limited_on_sim import compared, one_step
from torch import nn
from zoo.models import Asking

import rotor

WIDTH, ROWS = 128, 512


def block(dropout):
    first = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.filterwarnings("ignore:no single graph")
@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_bit_equal_within_the_limit(sim, dropout):
    torch.manual_seed(0)
    data = [torch.randn(ROWS, WIDTH, device="sim") for _ in range(4)]
    make = lambda: Asking(block(dropout), block(dropout))  # noqa: E731
    limit, plain, ours = compared(sim, make, data, 0.75, engine="auto")
    assert min(plain.peaks) > limit
    assert max(ours.peaks[2:]) <= limit


@pytest.mark.filterwarnings("ignore:no single graph")
def test_a_limit_that_is_lowered_is_kept_at_once(sim):
    """Hand over before a step where what metered steps have shown does not fit."""
    data = torch.randn(ROWS, 64, device="sim")
    limited = rotor.Checkpointable(parts()[0].to("sim"), mem_limit="200MiB", verbosity=-1)
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
