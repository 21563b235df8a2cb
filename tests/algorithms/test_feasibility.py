"""Whether a limit is accepted follows from bytes alone: times choose among programs that fit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from random_graphs import training_graph
from torch import nn
from zoo.models import Row

import rotor
from rotor.engines.graph import improving
from rotor.graph import Graph, Link, curve, plan


def encoder():
    return Row(*[nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)] * 2)


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    x = torch.randn(8, 32, 32)
    return rotor.Checkpointable(encoder(), x, "1GiB", engine="graph", effort="fast").plan.graph


def at_times(graph, seed):
    draw = random.Random(seed)
    ops = [replace(op, cost_ns=draw.randint(1000, 50_000)) for op in graph.operations]
    return Graph(graph.storages, None, ops)


def least_of(graph, budget=1000, effort="fast"):
    with pytest.raises(rotor.InfeasibleError) as caught:
        plan(graph, budget, effort=effort)
    return caught.value.minimum_bytes


def test_the_least_budget_is_the_same_at_other_times(graph):
    least = {least_of(at_times(graph, seed)) for seed in range(3)}
    assert len(least) == 1


def accepts(graph, budget, effort):
    try:
        return plan(graph, budget, effort=effort).peak_bytes <= budget
    except rotor.InfeasibleError:
        return False


def test_a_budget_is_accepted_at_all_times_and_efforts_or_at_none(graph):
    least = least_of(graph)
    for budget in (least, least - least // 32):
        efforts = enumerate(("fast", "default"))
        found = {accepts(at_times(graph, seed), budget, effort) for seed, effort in efforts}
        assert len(found) == 1
        assert budget < least or found == {True}


def test_the_least_limit_of_a_model_is_the_same_at_other_times(tmp_path, monkeypatch):
    original, found = improving.glance, []

    def distorted(*args, **kwargs):
        costs, rough = original(*args, **kwargs)
        draw = random.Random(len(found))
        return [replace(cost, ns=draw.randint(1000, 50_000)) for cost in costs], rough

    monkeypatch.setattr(improving, "glance", distorted)
    for number in range(2):
        monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path / str(number)))
        torch.manual_seed(0)
        chk = rotor.Checkpointable(encoder(), mem_limit=1000, engine="graph")
        with pytest.raises(rotor.InfeasibleError) as caught:
            chk(torch.randn(8, 32, 32))
        found.append(caught.value.minimum_bytes)
    assert found[0] == found[1]


def test_the_curve_begins_at_the_least_budget_that_the_planner_accepts(graph):
    least = least_of(graph)
    for seed in range(2):
        found = curve(at_times(graph, seed), 6, effort="fast")
        assert found.minimum_bytes == found.least_bytes == least
        program = plan(at_times(graph, seed + 2), found.minimum_bytes, effort="fast")
        assert program.peak_bytes <= least


@pytest.mark.parametrize("seed", range(4))
def test_all_budgets_from_the_least_of_a_curve_are_accepted_and_none_below(seed):
    graph = training_graph(seed, 30, plain=seed % 2 == 0)
    found = curve(at_times(graph, seed), 8, effort="fast")
    for budget in found.bytes.tolist():
        assert plan(graph, budget, effort="fast").peak_bytes <= budget
    assert least_of(graph, found.minimum_bytes - 1) == found.minimum_bytes


@pytest.mark.slow
def test_with_a_second_tier_too_bytes_alone_decide():
    graph = training_graph(5, 10, plain=False)
    rates = (1e6, 1e9, 1e12)
    curves = [curve(at_times(graph, k), 5, link=Link(r, r)) for k, r in enumerate(rates)]
    least = {found.minimum_bytes for found in curves}
    assert len(least) == 1
    assert least.pop() < least_of(graph)
    for k, rate in enumerate(rates):
        budget = curves[0].minimum_bytes
        assert plan(at_times(graph, k), budget, link=Link(rate, rate)).peak_bytes <= budget
        with pytest.raises(rotor.InfeasibleError) as caught:
            plan(at_times(graph, k), budget - 1, link=Link(rate, rate))
        assert caught.value.minimum_bytes == budget


def test_a_curve_of_a_model_begins_at_the_limit_that_its_error_names():
    torch.manual_seed(0)
    x = torch.randn(8, 32, 32)
    chk = rotor.Checkpointable(encoder(), x, "1GiB", engine="graph", effort="fast")
    least = chk.curve(4).minimum_bytes
    with pytest.raises(rotor.InfeasibleError) as caught:
        rotor.Checkpointable(encoder(), x, 1000, engine="graph", effort="fast")
    assert caught.value.minimum_bytes == least
    chk.mem_limit = least
    chk(x).sum().backward()
    assert chk.plan.predicted_bytes <= least
