"""Batch sizes that fit on an accelerator: by its free bytes, with its cache given back."""

import pytest
import torch
from command_line import folder_with
from command_line import run as run_command
from torch import nn

import rotor

MIB = 1 << 20


def test_a_function_gets_the_batch_that_fits_an_accelerator(sim):
    """Take 90 % of what the device has free, and leave nothing of a failed batch in the cache."""
    sim.set_capacity(24 * MIB)
    sim.empty_cache()
    sizes, reserved = [], []

    @rotor.fit_batch_size(starting_batch_size=8192)
    def train(batch_size):
        sizes.append(batch_size)
        reserved.append(sim.memory_reserved())
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)).to("sim")
        x = torch.randn(batch_size, 64).to("sim")
        before = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        model(x).square().sum().backward()
        return sim.max_memory_allocated() - before

    peak = train()
    assert len(sizes) > 1
    assert 8 * MIB < peak <= 24 * MIB
    assert max(reserved) <= 2 * MIB


MOVED = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).to("sim")
model(torch.randn(8192, 32).to("sim")).sum().backward()
model.{moved}
raise torch.OutOfMemoryError("sim out of memory")
"""


@pytest.mark.parametrize("moved", ["cpu()", 'to("cpu").eval()', "eval()"])
def test_a_model_that_a_framework_moves_as_it_fails_gets_the_line(
    sim, capsys, tmp_path, monkeypatch, moved
):
    """Lightning moves its model to the CPU; the noted batch is still on the device."""
    sim.set_capacity(64 * MIB)
    with folder_with("moved.py", MOVED.format(moved=moved), tmp_path, monkeypatch):
        code, _, err = run_command(capsys, "run", "moved.py")
    assert code == 1
    assert 'model = rotor.Checkpointable(model, total_limit="card")' in err
