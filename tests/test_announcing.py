"""The line on standard error when the first plan of a model is run."""

from __future__ import annotations

import copy
import logging
import re
from unittest import mock

import pytest
import torch
from torch import nn
from zoo.models import Tanhs

import rotor

MODELS = {
    "graph": Tanhs,
    "chain": lambda: nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
    ),
}
LIMITS = {"graph": "440KiB", "chain": "600KiB"}
X = torch.randn(256, 64)


def lines(capfd, model, *, steps=3, propagate=False):
    """Train; lines on standard error of a program that configures no logging."""
    with mock.patch.object(logging.getLogger("rotor"), "propagate", propagate):
        for _ in range(steps):
            model(X).mean().backward()
    return capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("engine", list(MODELS))
def test_a_line_at_the_first_step_has_the_figures_of_the_report(engine, capfd):
    model = rotor.Checkpointable(MODELS[engine](), mem_limit=LIMITS[engine], engine=engine)
    (line,) = lines(capfd, model, steps=1)
    assert line.startswith("rotor: planned in ")
    rows = dict(row.rsplit("  ", 1) for row in model.report().splitlines() if "  " in row)
    figures = {name.strip(): value.strip() for name, value in rows.items()}
    assert f"within {figures['limit']}, " in line
    assert f"{figures['peak without recomputation']} without recomputation" in line
    assert f"step {figures['recomputation']}; print(model.report())" in line


def test_a_plan_without_recomputation_says_so(capfd):
    (line,) = lines(capfd, rotor.Checkpointable(Tanhs(), mem_limit="1GiB"))
    assert line.endswith("within 1 GiB, nothing is recomputed; print(model.report()) for more")


def test_a_copy_has_a_line_of_its_own(capfd):
    model = rotor.Checkpointable(Tanhs(), mem_limit="1GiB")
    assert len(lines(capfd, model)) == len(lines(capfd, copy.deepcopy(model))) == 1


def test_verbosity_and_the_level_of_the_logger_silence_it(capfd, monkeypatch):
    assert lines(capfd, rotor.Checkpointable(Tanhs(), mem_limit="1GiB", verbosity=-1)) == []
    logger = logging.getLogger("rotor")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    assert lines(capfd, rotor.Checkpointable(Tanhs(), mem_limit="1GiB")) == []


@pytest.mark.parametrize("engine", list(MODELS))
def test_an_explicit_zero_is_the_default(engine, capfd):
    given = {"mem_limit": LIMITS[engine], "engine": engine}
    (said,) = lines(capfd, rotor.Checkpointable(MODELS[engine](), verbosity=0, **given))
    (default,) = lines(capfd, rotor.Checkpointable(MODELS[engine](), **given))
    assert said.split(":")[0] == default.split(":")[0].replace(default.split()[3], said.split()[3])
    assert rotor.Checkpointable(MODELS[engine](), **given).verbosity == 0


def test_it_goes_through_the_handlers_of_the_program_once(capfd, caplog):
    with caplog.at_level(logging.INFO):
        assert lines(capfd, rotor.Checkpointable(Tanhs(), mem_limit="1GiB"), propagate=True) == []
    told = [record for record in caplog.records if record.message.startswith("rotor: planned")]
    assert len(told) == 1


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                x = x / 2
        return x


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_model_in_parts_has_a_line_unless_its_limit_cannot_be_kept(capfd):
    (line,) = lines(capfd, rotor.Checkpointable(Parts(), mem_limit="2MiB"), steps=1)
    assert re.search(r"within 2 MiB, \S+ MiB without recomputation, its parts \+\d", line)
    assert lines(capfd, rotor.Checkpointable(Parts(), mem_limit="840KiB"), steps=1) == []
