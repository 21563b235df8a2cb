"""Verdicts about predictions: what ``make gpu`` will say, tried on the simulated accelerator."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rotor import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import predictions

MIB = 1 << 20


@pytest.fixture
def place(sim):
    """Return the device, which has its name in the process of these tests only."""
    return torch.device("sim", 0)


@pytest.mark.parametrize("takes", [True, False])
def test_handles(sim, place, takes):
    """Confirm that the thread of backwards takes a workspace where the device does so."""
    sim.set_handles(handle_bytes=8 * MIB * takes)
    found = predictions.first_steps(place)
    verdict = predictions.judge_first_steps(found)
    assert (verdict.confirmed, verdict.cured) == (takes, True)
    peaks = [found["limit"] + MIB, found["limit"]]
    assert predictions.judge_first_steps(found | {"peaks": peaks}).cured is False


@pytest.mark.parametrize("takes", [True, False])
def test_searches(sim, place, monkeypatch, takes):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    sim.set_handles(search_bytes=32 * MIB * takes)
    verdict = predictions.judge_searches(predictions.searches(place))
    assert (verdict.confirmed, verdict.cured) == (takes, True)


def test_blocks(place):
    found = predictions.blocks(place)
    assert predictions.judge_blocks(found)[2:] == (True, True)
    assert predictions.judge_blocks(found | {"model": 1}).cured is False
    assert predictions.judge_blocks(found | {"expandable": True}).confirmed is None


def test_times(sim, place):
    sim.set_clock("model")
    sim.set_compute(gb_per_s=100.0, launch_ns=20_000)
    try:
        found = predictions.times(place)
        launched = predictions.launches(place)
    finally:
        sim.set_clock("real")
        sim.set_compute()
    assert predictions.judge_times(found)[2:] == (True, True)
    assert predictions.judge_times(found | {"ours": found["idle"]}).cured is False
    assert predictions.judge_launches({"host": 10, "device": 100}).confirmed
    assert set(launched) == {"host", "device"}


def test_others(place):
    """Refute what this device does not do."""
    verdict = predictions.judge_normalisation(predictions.normalisation(place))
    assert (verdict.confirmed, verdict.cured) == (False, True)
    verdict = predictions.judge_seeds(predictions.seeds(place))
    assert (verdict.confirmed, verdict.cured) == (None, True)
    assert predictions.judge_reserved(predictions.reserved(place)).cured is None
    assert predictions.Verdict(5, "x", False, False).text() == "#5  refuted, CURE FAILS: x"


def test_a_history_becomes_events():
    """Read the allocator's history as CUDA's writes it."""

    def entry(action, address, size):
        return {"action": action, "addr": address, "size": size}

    trace = [
        entry("free_requested", 1, 512),  # Of before.
        entry("segment_alloc", 0, 20 * MIB),
        entry("alloc", 10, 3 * MIB),
        entry("alloc", 20, 5 * MIB),
        entry("free_requested", 10, 3 * MIB),
        entry("free_completed", 10, 3 * MIB),
        entry("segment_alloc", 90, 2 * MIB),
        entry("alloc", 90, 700),
        entry("segment_free", 90, 2 * MIB),
    ]
    events, held = predictions.events_of(trace)
    assert (events, held) == ([3 * MIB, 5 * MIB, -1, 700], 22 * MIB)
    figures, _ = _core.replay_blocks(np.array(events, dtype=np.int64), False, 0, False)
    assert figures["reserved_peak_bytes"] == held
