"""The reserve for a loss that nobody has seen yet makes no feasible limit infeasible."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from versions import HANDS_OVER
from zoo.models import Row, Tanhs

import rotor
from rotor.engines.graph.making import make_graph_plan
from rotor.engines.learning import plan_with_guess
from rotor.errors import InfeasibleError
from rotor.units import exact_bytes

WIDTH, OUTPUTS, ROWS = 128, 2048, 256


def wide():
    """A model whose output is larger than all it keeps."""
    return Row(Tanhs(WIDTH, 12), nn.Linear(WIDTH, OUTPUTS))


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    chk = rotor.Checkpointable(wide(), mem_limit="1GiB", engine="graph", effort="fast")
    return chk.measure(torch.ones(ROWS, WIDTH))


def least(step, loss_bytes):
    with pytest.raises(InfeasibleError) as raised:
        make_graph_plan(step, 1, loss_bytes, options={"effort": "fast"})
    return raised.value.minimum_bytes


def test_a_graph_is_planned_beside_the_largest_reserve_that_fits(measured):
    x = torch.ones(ROWS, WIDTH)
    guess = measured.assumed_loss_bytes
    without, with_guess = least(measured, 0), least(measured, guess)
    assert with_guess > without + guess // 2
    limit = with_guess - guess // 3
    chk = rotor.Checkpointable(wide(), mem_limit=limit, engine="graph", effort="fast")
    output = chk(x)
    plan = chk.plan
    assert 0 < plan.loss_bytes < guess
    assert plan.short_bytes == guess - plan.loss_bytes
    assert plan.predicted_bytes <= limit
    with pytest.raises(InfeasibleError):
        make_graph_plan(measured, limit, plan.loss_bytes + guess // 20, options={"effort": "fast"})
    assert "assumed for the loss, not set aside" in chk.report()
    # A loss that needs little: the next step knows, and nothing was over.
    output.backward(torch.ones_like(output))
    chk(x).sum().backward()
    assert chk.plan.measured_bytes <= limit
    assert "assumed for the loss" not in chk.report()


def test_the_need_beside_a_usual_loss_is_named(measured):
    limit = least(measured, 0) // 2
    chk = rotor.Checkpointable(wide(), mem_limit=limit, engine="graph", effort="fast")
    with pytest.raises(InfeasibleError) as raised:
        chk(torch.ones(ROWS, WIDTH))
    usual = exact_bytes(least(measured, measured.assumed_loss_bytes))
    assert raised.value.minimum_bytes == least(measured, 0)
    assert f"as is assumed before one was metered, it is {usual}" in str(raised.value)


@pytest.mark.skipif(not HANDS_OVER, reason="PyTorch 2.11 holds what the loss needs anyway")
def test_every_limit_that_is_feasible_without_a_guess_is_planned(measured):
    limit = least(measured, 0)
    chk = rotor.Checkpointable(wide(), mem_limit=limit, engine="graph", effort="fast")
    output = chk(torch.ones(ROWS, WIDTH))
    assert chk.plan.predicted_bytes <= limit
    with pytest.warns(rotor.MemoryLimitWarning, match="not kept in a first step"):
        output.backward(torch.ones_like(output))
    with pytest.raises(InfeasibleError) as raised:
        rotor.Checkpointable(wide(), mem_limit=1000, engine="graph", effort="fast")(
            torch.ones(ROWS, WIDTH)
        )
    assert raised.value.minimum_bytes == limit


def test_the_reserve_is_found_in_a_few_tries():
    tried = []

    def plan_with(reserve):
        tried.append(reserve)
        # Above 300 bytes the moment of the loss is the peak.
        needed = max(reserve + 700, 1000)
        if needed > 1100:
            raise InfeasibleError("no plan", needed)
        return f"plan beside {reserve}"

    assert plan_with_guess(plan_with, 5000, 1100) == ("plan beside 400", 400)
    assert tried == [5000, 400]
    assert plan_with_guess(plan_with, 200, 1100) == ("plan beside 200", 200)


def test_what_fits_beside_no_reserve_is_refused_with_its_own_minimum():
    def plan_with(reserve):
        raise InfeasibleError("no plan", 2000 + reserve)

    with pytest.raises(InfeasibleError) as raised:
        plan_with_guess(plan_with, 5000, 1100)
    assert raised.value.minimum_bytes == 2000
