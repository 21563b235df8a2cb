"""The benchmark of PyTorch's own offloading, on small models of the simulated accelerator."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture
def rivals(sim, monkeypatch):
    """The module, on the modelled clock."""
    import tier_rivals

    sim.set_clock("model")
    sim.set_compute(gb_per_s=tier_rivals.MEMORY_GB_PER_S)
    yield tier_rivals
    sim.set_compute()
    sim.set_link(8.0)


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_rivals_and_limits_of_their_peaks(rivals, monkeypatch, capsys):
    small = rivals.Subject("GPT, 1 block", partial(rivals.gpt, 96, 1), (4, 128, 96))
    names = ("save_on_cpu", "the same, inputs on host")
    chosen = [rival for rival in rivals.RIVALS if rival.name in names]
    monkeypatch.setattr(rivals, "RIVALS", chosen)
    rows, notes, kept = rivals.rows_of(small, [3.0])
    assert "GPT, 1 block" in capsys.readouterr().out
    assert notes == []
    assert kept
    offloaded = rows[0].split()
    assert offloaded[:5] == ["GPT,", "1", "block", "3.0", "save_on_cpu"]
    peak, seconds = float(offloaded[5]), float(offloaded[6])
    ours = offloaded[-2:]
    assert float(ours[0]) <= peak
    # Nothing overlaps where each tensor is copied before the next operator runs.
    assert 1.0 <= float(ours[1]) < seconds
    assert len(rows) == 2


def test_figures_are_those_of_every_run(rivals):
    small = rivals.Subject("", partial(rivals.resnet, 8, 1), (2, 3, 16, 16))
    found = []
    for _ in range(2):
        model = small.make().to("sim")
        x = rivals.torch.ones(small.batch, device="sim")
        zero = rivals.torch.zeros(1, device="sim")
        step = partial(_loss, rivals, model, zero)
        found.append(rivals.measured(model, step, x))
    assert found[0] == found[1]
    assert found[0].peak_bytes > 0


def _loss(rivals, model, zero, x):
    return rivals.mean_square(model(x), zero)


def test_what_does_not_run_is_said(rivals):
    def refuse(model):
        raise NotImplementedError("not on this device\nsecond line")

    rival = rivals.Rival("refuses", compiled=refuse)
    assert rival.measure(rivals.gpt(96, 1), None) == (
        "NotImplementedError: not on this device second line"
    )
