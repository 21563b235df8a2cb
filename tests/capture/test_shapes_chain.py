"""Chains on inputs of other sizes: measured at a few, bounded in between."""

from __future__ import annotations

import copy
import random

import torch
from torch import nn

import rotor
from rotor.engines.chain import engine as chain_engine
from rotor.engines.chain.measures import Measured, between
from rotor.meter import allocator as memory


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [
            nn.Linear(32, 64),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(64, 32),
            nn.LayerNorm(32),
        ]
    return nn.Sequential(*layers)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]


def test_lengths_between_measured_ones_are_not_measured(monkeypatch):
    counted = []
    measure = chain_engine.measure

    def counting(stages, arg, **rest):
        counted.append(tuple(arg.shape))
        return measure(stages, arg, **rest)

    monkeypatch.setattr(chain_engine, "measure", counting)
    plain = make()
    copied = copy.deepcopy(plain)
    with memory.meter("cpu") as meter:
        step(copied, torch.randn(4, 200, 32))
    limit = int(0.6 * meter.peak_bytes)
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=limit, engine="chain")
    drawn = random.Random(3)
    lengths = [20, 200, *(drawn.randint(20, 200) for _ in range(10)), 200]
    for length in lengths:
        x = torch.randn(4, length, 32)
        expected = step(plain, x)
        found = step(chk, x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert chk.plan.measured_bytes <= limit
    assert counted == [(4, 20, 32), (4, 200, 32)]
    assert any(plan.schedule.recomputed for plan in chk.plans.values())
    count = len(set(lengths))
    assert f"inputs of {count} kinds: 2 measured, {count - 2} between" in chk.report()


def test_bounds_lie_above_what_is_measured():
    model = make()
    found = {}
    for length in (16, 40, 90, 128):
        chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit="1 GB", engine="chain")
        found[length] = chk.measure(torch.randn(2, length, 32))
    known = [Measured((2, length, 32), found[length]) for length in (16, 128)]
    for length in (40, 90):
        bound = between(known, (2, length, 32), 4 * 2 * length * 32)
        assert bound is not None
        assert bound.inspection.input_bytes == found[length].input_bytes
        for mine, real in zip(bound.inspection.measures, found[length].measures, strict=True):
            for name in ("output_bytes", "xbar_bytes", "grad_bytes"):
                assert 0 <= getattr(mine, name) - getattr(real, name) <= 128, name
            for name in ("forward_tmp_bytes", "backward_peak_bytes"):
                size = getattr(real, name)
                assert 0 <= getattr(mine, name) - size <= 40_000 + 0.02 * size, name


def test_sizes_beyond_what_is_known_are_measured():
    model = make()
    chk = rotor.Checkpointable(model, mem_limit="1 GB", engine="chain")
    small, large = (chk.measure(torch.randn(*size, 32)) for size in ((2, 64), (2, 128)))
    known = [Measured((2, 64, 32), small), Measured((2, 128, 32), large)]
    assert between(known, (2, 129, 32), 1) is None
    assert between(known, (3, 100, 32), 1) is None
    assert between(known, (1, 16, 32), 1) is None
    assert between(known[:1], (2, 60, 32), 1) is None
    below = between(known, (2, 50, 32), 12_800)
    assert below is not None
    assert [m.xbar_bytes for m in below.inspection.measures] == [
        m.xbar_bytes for m in small.measures
    ]
