"""Steps on one card: the table that ``make gpu`` will print, tried on the simulated accelerator."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import one_card
from card_models import Case
from one_card import Row


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
