"""Stages that are alike: timed once, and only where they ran alike."""

import pytest
import torch
from torch import nn

from rotor.engines.chain import alike
from rotor.engines.chain.measure import measure
from rotor.engines.chain.stages import Stage, find_stages

WARM_UP, ROUNDS = 2, 2 * 3


class Block(nn.Module):
    def __init__(self, power=1):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.power = power

    def forward(self, x):
        for _ in range(self.power):
            x = x + torch.tanh(self.linear(x))
        return x


@pytest.fixture(autouse=True)
def times_never_differ(monkeypatch):
    monkeypatch.setattr(alike, "MOST_APART", float("inf"))


@pytest.fixture
def counted(monkeypatch):
    """Function that measures blocks and returns how often each ran."""
    called = []
    plain = Stage.__call__
    monkeypatch.setattr(
        Stage, "__call__", lambda self, x: called.append(self.name) or plain(self, x)
    )

    def count(*blocks):
        measured(nn.Sequential(*blocks))
        return [called.count(str(number)) for number in range(len(blocks))]

    return count


def measured(model):
    return measure(
        find_stages(model), torch.randn(4, 8, requires_grad=True), few_rounds=True
    ).measures


def test_alike_stages_are_timed_once(counted):
    first, *others = counted(*(Block() for _ in range(4)))
    assert others == [first - WARM_UP - ROUNDS] * 3


def test_stages_with_other_settings_are_timed(counted):
    first, second, third = counted(Block(), Block(power=2), Block())
    assert (second, third) == (first, first - WARM_UP - ROUNDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.linear.weight.requires_grad_(False),
        lambda block: block.eval(),
        lambda block: block.register_forward_hook(lambda *_: None),
        lambda block: block.linear.register_buffer("extra", torch.zeros(1)),
    ],
    ids=["frozen", "eval", "hook", "buffer"],
)
def test_stages_of_another_structure_are_timed(counted, change):
    changed = Block()
    change(changed)
    first, second, third = counted(Block(), changed, Block())
    assert second == first
    assert third == first - WARM_UP - ROUNDS


def test_a_stage_that_ran_longer_is_timed(counted, monkeypatch):
    monkeypatch.setattr(alike, "MOST_APART", 0.0)
    first, second = counted(Block(), Block())
    assert second == first - WARM_UP


def test_alike_stages_have_equal_times_and_the_sizes_of_their_own():
    first, second, other = measured(nn.Sequential(Block(), Block(), nn.Linear(8, 8)))
    assert first.name != second.name
    assert (first.forward_ns, first.record_ns, first.backward_ns) == (
        second.forward_ns,
        second.record_ns,
        second.backward_ns,
    )
    assert (first.xbar_bytes, first.pgrad_bytes) == (second.xbar_bytes, second.pgrad_bytes)
    assert other.xbar_bytes != first.xbar_bytes
