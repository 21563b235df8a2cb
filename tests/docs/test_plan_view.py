"""Plans as data: `chk.plan` and its view, of every engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo.models import Asking, Skip

import rotor
from rotor.meter.step_meter import PlanView


@pytest.mark.filterwarnings("ignore:no single graph")
@pytest.mark.parametrize("engine", ["chain", "graph", "parts", "dynamic"])
def test_a_plan_names_its_engine_and_shows_its_figures(engine: str) -> None:
    layers = lambda: (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))  # noqa: E731
    model = (Asking if engine == "parts" else nn.Sequential)(*(Skip(*layers()) for _ in range(3)))
    asked = "auto" if engine == "parts" else engine
    chk = rotor.Checkpointable(model, mem_limit="1GiB", engine=asked, planning="before")
    for _ in range(2):
        chk(torch.randn(64, 32)).square().mean().backward()
    plan = chk.plan
    assert plan.engine == engine
    view = plan.view()
    assert isinstance(view, PlanView)
    figures = (view.engine, view.limit_bytes, view.predicted_bytes, view.makespan)
    assert figures == (engine, 1 << 30, plan.predicted_bytes, plan.makespan)
    assert view.measured_bytes == plan.measured_bytes is not None
    assert view.measured_timeline is plan.measured_timeline is not None
    assert (view.predicted_timeline is not None) == (engine in ("chain", "graph"))
