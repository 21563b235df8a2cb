"""Benchmarks of accelerators, tried on the simulated one: steps on a card, rivals, predictions."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rotor import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import one_card
import predictions
from card_models import Case
from one_card import Row

MIB = 1 << 20


# -- the table that ``make gpu`` will print


def doubled(model):
    with torch.no_grad():
        model[0][0].weight.mul_(2)
    return model


@pytest.fixture
def case(sim):
    x = torch.randn(8192, 32, device="sim")

    def make():
        layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12))
        return nn.Sequential(*layers, nn.Linear(32, 1))

    return Case("perceptron", make, (x,), torch.randn(8192, 1, device="sim"))


@pytest.mark.slow
def test_nothing_is_to_be_cured_in_a_small_model(case, capsys):
    assert one_card.run(case, rounds=1) == []
    printed = capsys.readouterr().out
    assert "rotor 30%, host tier" in printed
    assert "torch.compile, budget 0.3" in printed


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda model: model, ""),
        (doubled, "other bits: loss and "),
        (lambda model: model.to(torch.float64), "RuntimeError: "),
    ],
)
def test_a_contender_with_other_bits_or_a_failure_is_to_be_cured(case, make, expected):
    plain = one_card.Steps(case, case.start())
    plain.metered(Row("plain"))
    one_card.EXPECTED[case.name] = plain.state()
    row = Row("rotor", limit=1 << 30)
    one_card.judge(case, row, make, plain, rounds=1)
    assert row.to_cure.startswith(expected)
    assert bool(row.to_cure) == bool(expected)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("rotor", limit=100, peak=100, reserved=200), ""),
        (Row("rotor", limit=100, peak=101, reserved=100), "the limit is passed by 1.00%"),
        (Row("rotor", 100, is_reserved=True, peak=50, reserved=150), "the limit is passed by 50"),
        (Row("torch.compile", peak=100, differs="loss"), ""),
    ],
)
def test_a_limit_that_is_passed_is_to_be_cured(row, expected):
    assert row.to_cure.startswith(expected)
    assert bool(row.to_cure) == bool(expected)


# -- PyTorch's own offloading


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


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
@pytest.mark.parametrize("is_duplex", [True, False])
def test_streaming_of_blocks_and_plans_with_homes(rivals, is_duplex, monkeypatch):
    import larger

    small = larger.Subject("GPT, 1 block", partial(rivals.gpt, 96, 1), (4, 128, 96))
    monkeypatch.setattr(larger, "WARM_STEPS", 4)
    rows = larger.rows_of(small, [0.6], [2.0], links=[is_duplex])
    [(row, is_right)] = rows
    assert is_right, row
    assert ("one way" in row) is not is_duplex


def test_a_streamed_step_is_that_of_the_plain_model(rivals):
    import larger

    torch.manual_seed(0)
    model, x = rivals.gpt(96, 1), torch.randn(2, 16, 96, device="sim")
    plain = model.to("sim")
    for again in (False, True):
        streaming = larger.Streaming(rivals.copy.deepcopy(plain), again=again)
        torch.manual_seed(1)
        larger.mean_square(streaming.model(x)).backward()
        streaming.finish()
        plain.zero_grad()
        torch.manual_seed(1)
        larger.mean_square(plain(x)).backward()
        copies = streaming.copies.values()
        for parameter, found in zip(plain.parameters(), copies, strict=True):
            assert torch.equal(parameter.grad.cpu(), found.grad)


def test_figures_are_those_of_every_run(rivals):
    small = rivals.Subject("", partial(rivals.resnet, 8, 1), (2, 3, 16, 16))
    found = []
    for _ in range(2):
        model = small.make().to("sim")
        x = torch.ones(small.batch, device="sim")
        zero = torch.zeros(1, device="sim")
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


# -- verdicts about predictions


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
