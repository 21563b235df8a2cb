"""The dynamic engine with pinned memory of the host, on an accelerator whose streams are late."""

from __future__ import annotations

import warnings

import pytest
import torch
from dynamic_tiers import ROWS, VALUE_BYTES, WIDTH, Noisy, Recurrent, dynamic, generator, pair, same

import rotor
from rotor.graph import Link
from rotor.tier import HostTier

FAST = Link(1e13, 1e13, duplex=True)


@pytest.fixture
def tier():
    made = HostTier()
    made.least_bytes = 1
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _noise_is_kept():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rotor_tier_tests::noise does not repeat")
        yield


def trained(sim, model, call, x, steps=3):
    """Return losses and gradients of some steps, and the device's peaks in them."""
    found, peaks = [], []
    for k in range(steps):
        torch.manual_seed(k)
        generator.manual_seed(k)
        model.zero_grad(set_to_none=True)
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        loss = call(x).square().mean()
        loss.backward()
        peaks.append(sim.max_memory_allocated() - level)
        found += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
        del loss
    model.zero_grad(set_to_none=True)
    return found, max(peaks[1:] or peaks)


def offloading(model, limit, tier):
    chk = dynamic(model, limit, offload=tier)
    chk.offload.link = FAST
    return chk


def test_what_cannot_be_recomputed_leaves_the_device(sim, tier):
    model, twin = (made.to("sim") for made in pair(Noisy))
    x, limit = torch.randn(ROWS, WIDTH).to("sim"), 8 * VALUE_BYTES
    expected, most = trained(sim, twin, twin, x)
    assert most > limit
    with pytest.raises(rotor.InfeasibleError):
        trained(sim, twin, dynamic(twin, limit), x)
    chk, races = offloading(model, limit, tier), sim.races()
    trained(sim, model, chk, x, 1)
    found, peak = trained(sim, model, chk, x)
    assert same(found, expected)
    assert peak <= limit
    assert chk.plan.last.stats.fetches >= 3
    assert sim.races() == races


def test_a_recurrent_model(sim, tier, monkeypatch):
    """Move all that can move: the device's own times are known only after some runs."""
    monkeypatch.setattr("rotor.dtr.recall.MOVE_WEIGHT", 0.0)
    model, twin = (made.to("sim") for made in pair(Recurrent))
    x = torch.randn(10, 256, 16).to("sim")
    expected, most = trained(sim, twin, twin, x)
    limit = most * 7 // 10
    chk, races = offloading(model, limit, tier), sim.races()
    trained(sim, model, chk, x, 1)
    found, peak = trained(sim, model, chk, x)
    assert same(found, expected)
    assert peak <= limit
    assert chk.plan.last.stats.fetches > 0
    assert sim.races() == races
