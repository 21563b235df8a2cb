"""The graph engine on an accelerator: bits, random states and peaks by the device's counters."""

import pytest
import torch
from limited_on_sim import batches, compared
from torch import nn
from zoo.models import Row

import rotor

WIDTH, ROWS = 128, 512


class Branches(nn.Module):
    """A model that is no chain: two branches and skips, with dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, value):
        for left, right in zip(self.left, self.right, strict=True):
            branches = torch.tanh(left(value)), self.drop(torch.relu(right(value)))
            value = self.norm(value + branches[0] * branches[1])
        return value


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("inside", [True, False])
def test_bit_equal_within_the_limit(sim, dropout, inside):
    limit, plain, ours = compared(
        sim, lambda: Branches(dropout), batches(), 0.6, engine="graph", inside=inside
    )
    assert min(plain.peaks) > limit
    assert max(ours.peaks[0 if inside else 1 :]) <= limit


def test_draws_are_repeated(sim):
    """Compute dropout again with the device's own random states, and disturb no later draw."""
    _, _, ours = compared(
        sim, lambda: Branches(0.3), batches(), 0.37, engine="graph", inside=True,
        settings={"verbosity": 0},
    )  # fmt: skip
    plan = ours.model.plan
    runs = zip(plan.graph.operations, plan.program.runs, strict=True)
    assert any(operation.random and count > 1 for operation, count in runs)


def test_accumulation(sim):
    limit, _, ours = compared(
        sim, lambda: Branches(0.1), batches(4), 0.7, engine="graph", inside=True, accumulate=2
    )
    assert max(ours.peaks) <= limit


def test_autocast(sim):
    compared(
        sim, lambda: Branches(0.1), batches(2), 0.8, engine="graph", inside=True,
        autocast=torch.bfloat16,
    )  # fmt: skip


def test_attention_with_dropout(sim):
    """Repeat the draws of attention, which takes no generator."""

    def attention():
        make = nn.TransformerEncoderLayer
        return Row(*(make(32, 2, 64, dropout=0.2, batch_first=True) for _ in range(2)))

    torch.manual_seed(0)
    data = [torch.randn(16, 32, 32, device="sim") for _ in range(2)]
    compared(sim, attention, data, 0.6, engine="graph", inside=True)


class Scripted(nn.Module):
    """A model that calls a script of torch.jit, whose arguments are made up when it is measured."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, device="sim") for _ in range(2))
        layers = nn.Linear(WIDTH, WIDTH, device="sim"), nn.ReLU()
        self.script = torch.jit.script(nn.Sequential(*layers))

    def forward(self, value):
        return self.last(self.script(torch.tanh(self.first(value))))


def test_measuring_a_script_disturbs_no_draw(sim):
    chk = rotor.Checkpointable(Scripted(), mem_limit="8 MB", engine="graph")
    value = batches(1)[0]
    before = torch.get_device_module("sim").get_rng_state()
    chk.measure(value)
    assert torch.equal(torch.get_device_module("sim").get_rng_state(), before)
