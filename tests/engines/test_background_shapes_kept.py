"""Programs for shapes that share a graph, kept on disk for the next run of a script."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from background_models import Stepped
from capture.test_shapes import Gpt, alike, gpt_batch, gpt_loss, plain_peak, step

import rotor
from rotor.common import cache
from rotor.engines.graph import captured_step, improving
from rotor.graph import planner

pytestmark = pytest.mark.filterwarnings("ignore:this step's memory was not measured")

LENGTHS = (40, 60, 90, 75)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give a directory for the tables; let no search run in the background."""
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(improving, "ThreadJob", Stepped())
    return tmp_path


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the list of the searches for programs of a shape."""
    found: list[Any] = []

    def plan(graph: Any, budget: int, **options: Any) -> Any:
        found.append(graph)
        return planner.plan(graph, budget, **options)

    monkeypatch.setattr(captured_step, "planner", SimpleNamespace(plan=plan, curve=planner.curve))
    return found


def train(lengths: tuple[int, ...] = LENGTHS, **options: Any) -> list[bool]:
    """Train a model on batches of different lengths; return which steps equal the plain ones."""
    torch.manual_seed(0)
    model = Gpt()
    limit = int(0.7 * plain_peak(model, gpt_batch(4, 90), gpt_loss))
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit, engine="graph", **options)
    equal = []
    for length in lengths:
        batch = gpt_batch(4, length)
        equal.append(alike(step(chk, batch, gpt_loss), step(model, batch, gpt_loss)))
        assert chk.graph_plan().predicted_bytes <= limit
    return equal


def test_a_second_run_searches_for_no_shape(searched: list[Any]) -> None:
    assert all(train())
    assert searched
    searched.clear()
    assert all(train())
    assert not searched


@pytest.mark.slow
def test_a_run_of_other_lengths_first_searches_for_no_shape(searched: list[Any]) -> None:
    assert all(train())
    searched.clear()
    assert all(train((60, 75, 40, 90)))
    assert not searched


@pytest.mark.slow
def test_plans_made_before_a_step_depend_on_the_seed_alone(searched: list[Any]) -> None:
    train()
    searched.clear()
    assert all(train(planning="before"))
    assert searched


@pytest.mark.slow
def test_incomplete_programs_are_not_run(searched: list[Any], folder: Path) -> None:
    train()
    first = len(searched)
    for path in list(folder.glob("orders-*.json")):
        table = json.loads(path.read_text())
        rows = {name: row[:-2] for name, row in table["entries"].items()}
        cache.store("orders", table["environment"], rows)
    searched.clear()
    assert all(train())
    assert len(searched) == first
