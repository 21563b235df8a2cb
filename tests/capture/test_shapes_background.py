"""Programs of shapes that share a graph get better while training runs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from background_models import Stepped, stepped
from capture.test_shapes import Gpt, alike, gpt_batch, gpt_loss, plain_peak, step
from torch import nn

import rotor
from rotor.engines.graph import captured_step
from rotor.graph import planner
from rotor.meter import allocator as memory

pytestmark = pytest.mark.filterwarnings("ignore:this step's memory was not measured")

LENGTHS = (30, 50, 90, 60, 50, 50, 40, 90, 50, 60)


@pytest.fixture
def poor_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first search of a shape keep hardly anything."""

    def plan(graph: Any, budget: int, **_: Any) -> Any:
        try:
            planner.plan(graph, 1, effort="fast")
        except rotor.InfeasibleError as error:
            least = error.minimum_bytes
        return planner.plan(graph, min(least, budget), effort="fast")

    monkeypatch.setattr(captured_step, "planner", SimpleNamespace(plan=plan))


def trained(**options: Any) -> tuple[nn.Module, rotor.Checkpointable, int]:
    torch.manual_seed(0)
    model = Gpt()
    limit = int(0.7 * plain_peak(model, gpt_batch(4, 90), gpt_loss))
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit, engine="graph", **options)
    return model, chk, limit


def search_begun(chk: rotor.Checkpointable) -> Stepped:
    """Train until a search at the largest of three shapes has begun."""
    executor = stepped(chk)
    for length in (30, 50, 90, 90, 90, 90):
        executor.run()
        step(chk, gpt_batch(4, length), gpt_loss)
        if length == 90 and not chk.graph_plan().planning.is_final:
            break
    return executor


def test_a_search_at_the_largest_shape_serves_the_others(poor_start: None) -> None:
    model, chk, limit = trained()
    executor = stepped(chk)
    peaks: list[int] = []
    slowdowns: dict[int, list[float]] = {}
    # Each batch comes twice: what the second step runs was not metered by the engine.
    for number, length in enumerate(LENGTHS * 4):
        batch = gpt_batch(4, length)
        expected = step(model, batch, gpt_loss)
        if number < 2 * len(LENGTHS):
            found = step(chk, batch, gpt_loss)
        else:
            with memory.meter("cpu") as meter:
                found = step(chk, batch, gpt_loss)
            peaks.append(meter.peak_bytes)
        assert alike(found, expected), length
        plan = chk.graph_plan()
        assert plan.predicted_bytes <= limit
        slowdowns.setdefault(length, []).append(plan.program.slowdown)
        executor.run()
    assert max(peaks) <= limit
    assert all(plan.step.shares_shapes for plan in chk.plans.values())
    steps = {id(plan.step.operations) for plan in chk.plans.values()}
    assert len(steps) == 1
    assert slowdowns[90][-1] < slowdowns[90][0] - 0.01
    assert chk.plan.planning.is_final
    assert any(plan.planning.improved for plan in chk.plans.values())


@pytest.mark.slow
def test_waiting_ends_the_searches_of_all_shapes(poor_start: None) -> None:
    _, chk, limit = trained()
    search_begun(chk)
    before = chk.graph_plan()
    assert not before.planning.is_final
    assert "a better one is looked for" in chk.report()
    assert not chk.wait_for_planning(0)
    assert chk.wait_for_planning()
    step(chk, gpt_batch(4, 90), gpt_loss)
    plan = chk.graph_plan()
    assert plan.planning.is_final
    assert plan.makespan < before.makespan
    assert plan.predicted_bytes <= limit


@pytest.mark.slow
def test_nothing_is_searched_later_with_planning_before(poor_start: None) -> None:
    _, chk, _ = trained(planning="before")
    executor: Stepped = stepped(chk)
    programs = []
    for length in (30, 50, 90, 90, 90):
        step(chk, gpt_batch(4, length), gpt_loss)
        programs.append(chk.program.ops.tobytes())
    assert not executor.jobs
    assert programs[-1] == programs[-2]


def test_a_failed_search_leaves_the_plans_as_they_are(
    poor_start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chk, _ = trained()
    executor = search_begun(chk)

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    before = chk.graph_plan()
    with monkeypatch.context() as patched:
        patched.setattr(planner, "plan", failing)
        executor.run()
    with pytest.warns(UserWarning, match="the search for a better plan failed"):
        step(chk, gpt_batch(4, 90), gpt_loss)
    assert chk.graph_plan() is before
    batch = gpt_batch(4, 90)
    assert alike(step(chk, batch, gpt_loss), step(model, batch, gpt_loss))
