"""Measuring the operations of a graph takes no more memory than a step under its limit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotor
from rotor.engines.graph.engine import GraphEngine
from rotor.errors import MemoryLimitWarning
from rotor.meter import allocator


def _convolutions(kind: str, size: int) -> nn.Sequential:
    channels = ((2, 16), (16, 16), (16, 2))
    make = getattr(nn, kind)
    layers = [m for i, o in channels for m in (make(i, o, size, padding=size // 2), nn.Tanh())]
    return nn.Sequential(*layers)


MODELS = {
    "images": (lambda: _convolutions("Conv2d", 7), (4, 2, 32, 32)),
    "signals": (lambda: _convolutions("Conv1d", 9), (4, 2, 2048)),
    "products": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)),
        (512, 64),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_measuring_takes_less_than_a_step(name):
    make, shape = MODELS[name]
    model, x = make(), torch.rand(shape)
    with allocator.meter("cpu") as plain:
        model(x).square().mean().backward()
    model.zero_grad()
    chk = rotor.Checkpointable(model, mem_limit="1 GiB", engine="graph")
    with allocator.highest_peak() as peak_bytes:
        loss = chk(x).square().mean()
        # The meter of the step itself still runs.
        taken = peak_bytes()
    loss.backward()
    assert 0 < taken <= plain.peak_bytes


def test_the_highest_peak_is_that_of_the_meters_within():
    with allocator.meter("cpu"):
        torch.empty(10_000)
    with allocator.highest_peak() as peak_bytes:
        assert peak_bytes() == 0
        for count in (100, 1000, 10):
            with allocator.meter("cpu"):
                torch.empty(count)
    with allocator.meter("cpu"):
        torch.empty(10_000)
    assert peak_bytes() == allocator.rounded_bytes(4000, torch.device("cpu"))


@pytest.mark.parametrize("taken", [100_000, 1_000_000])
def test_measuring_above_a_limit_is_said(taken, monkeypatch):
    measure = GraphEngine.measure

    def metered(engine, key, call):
        with allocator.meter("cpu"):
            torch.empty(taken, dtype=torch.uint8)
        return measure(engine, key, call)

    monkeypatch.setattr(GraphEngine, "measure", metered)
    chk = rotor.Checkpointable(nn.Linear(8, 8), mem_limit=500_000, engine="graph")
    if taken < 500_000:
        chk(torch.rand(4, 8)).sum().backward()
        return
    with pytest.warns(MemoryLimitWarning, match="measuring took 976.6 KiB"):
        chk(torch.rand(4, 8)).sum().backward()
