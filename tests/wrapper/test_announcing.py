"""The line on standard error when the first plan of a model is run."""

from __future__ import annotations

import copy
import logging
import re
from unittest import mock

import pytest
import torch
from torch import nn
from zoo.models import Asking, Tanhs

import rotor
from rotor.engines.contract import Key
from rotor.engines.graph.planned import PlanningRecord
from rotor.report.text import table
from rotor.wrapper.announcing import Announcer

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
    goes_on = " now, measuring and planning go on between steps" if engine == "graph" else ""
    assert f"step {figures['recomputation']}{goes_on}; print(model.report())" in line


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


def parts():
    layers = lambda: (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
    return Asking(*(nn.Sequential(*layers()) for _ in range(6)))


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_model_in_parts_has_a_line_unless_its_limit_cannot_be_kept(capfd):
    (line,) = lines(capfd, rotor.Checkpointable(parts(), mem_limit="2MiB"), steps=1)
    assert re.search(r"within 2 MiB, \S+ MiB without recomputation, its parts \+\d", line)
    assert lines(capfd, rotor.Checkpointable(parts(), mem_limit="840KiB"), steps=1) == []


def kind(*shapes, absent=(True,), mode=0):
    tensors = tuple((torch.Size(shape), torch.float32) for shape in shapes)
    return Key((tensors, mode), absent)


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (kind((4, 64), (4,)), "batch 4 instead of 8"),
        (kind((8, 32), (8,)), "8x32 float32, 8 float32 instead of 8x64 float32, 8 float32"),
        (kind((8, 64), (8,), absent=(False,)), "gradients exist"),
        (kind((8, 64), (8,), absent=(False, True)), "1 of 2 gradients exist"),
        (kind((8, 64), (8,), mode=1), "another mode, or another value among the arguments"),
    ],
)
def test_what_differs_between_kinds_of_steps_is_named(new, text):
    assert new.difference(kind((8, 64), (8,))) == text


def test_kinds_of_steps_are_shown_by_their_shapes():
    assert repr(kind((8, 64))) == "<8x64 float32, no gradients yet>"
    model = rotor.Checkpointable(Tanhs(), X, mem_limit="1GiB")
    assert re.fullmatch(
        r"\{<256x64 float32, no gradients yet>: <\S+ within 1 GiB>\}", str(model.plans)
    )


class Planned:
    """Figures of a plan."""

    engine, limit_bytes, unlimited_bytes, predicted_bytes, makespan = "graph", 100, 200, 90, 0.0

    def __init__(self, key, recomputation, record):
        self.key, self.recomputation, self.planning = key, recomputation, record


def test_later_lines_say_what_differs_and_what_has_become_better(capfd):
    announcer = Announcer(0)
    record = PlanningRecord("estimated", is_final=False, is_rough=True)
    known = kind((8, 64))
    with mock.patch.object(logging.getLogger("rotor"), "propagate", False):
        with announcer.timed(1e-9):
            pass
        announcer.log_plan(Planned(known, 0.37, record))
        announcer.log_plan(Planned(known, 0.37, record))
        record.improved, record.is_rough = 1, False
        announcer.log_plan(Planned(known, 0.2, record))
        record.improved, record.is_final = 3, True
        announcer.log_plan(Planned(known, 0.12, record))
        announcer.log_plan(Planned(known, 0.12, record))
        with announcer.timed(1e-9):
            pass
        announcer.log_plan(Planned(kind((4, 64)), 0.0, PlanningRecord()))
    first, better, best, other = capfd.readouterr().err.splitlines()
    assert "step +37.0% now, measuring and planning go on between steps; print" in first
    assert better == "rotor: found a better plan: step +37.0% -> +20.0% now, planning goes on"
    assert best == "rotor: found a better plan: step +20.0% -> +12.0%"
    assert other.startswith("rotor: planned another kind of step (batch 4 instead of 8) in ")


def test_tables_fold_to_the_width_of_the_terminal(monkeypatch):
    rows = [["name", "value"], ["one", "word " * 30], ["two", "2"]]
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = table(rows).splitlines()
        assert max(map(len, lines)) <= columns
        assert " ".join(lines[2:]).split().count("word") == 30
    assert table([rows[0], rows[2]]).splitlines()[2] == "two       2"
