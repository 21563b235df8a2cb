"""The bound on programs with a second tier, beside the planner and the best of all programs."""

from __future__ import annotations

import math
import random

import pytest
from graph.test_graph_joint import link_of, peak_of, tiny_chain
from oracles import tier as oracle
from random_graphs import GRAPHS, training_graph

from rotor.errors import InfeasibleError
from rotor.graph import Graph, Link, Operation, offload_bound, plan

pytest.importorskip("scipy")


def test_no_plan_is_below_the_bound():
    compared = tight = 0
    for seed in range(20):
        graph = training_graph(seed, 5 + seed % 7, plain=seed % 2 == 0)
        link = link_of(graph, [0.3, 1.0, 3.0][seed % 3], duplex=seed % 4 == 0, latency_s=1e-7)
        budget = peak_of(graph) * (6 + seed % 3) // 10
        linear = offload_bound(graph, budget, link)
        integer = offload_bound(graph, budget, link, integer=True, time_limit=5)
        assert graph.total_time * (1 - 1e-9) <= linear <= integer * (1 + 1e-6)
        try:
            program = plan(graph, budget, effort=1, link=link)
        except InfeasibleError:
            continue
        assert program.makespan >= integer * (1 - 1e-3)
        compared += 1
        tight += integer > graph.total_time * 1.001
    assert compared >= 8
    assert tight >= 2


def test_the_best_of_all_programs_is_not_below_the_bound():
    for seed in range(8):
        draw = random.Random(seed)
        graph = tiny_chain(seed, 2)
        link = Link(draw.choice([5e8, 1e9]), 1e9)
        for budget in range(peak_of(graph), peak_of(graph) - 4, -1):
            optimum = oracle.best(graph, link, budget)
            bound = offload_bound(graph, budget, link, integer=True)
            assert optimum is None or optimum >= bound * 1e9 * (1 - 1e-3)


def test_a_graph_of_a_model():
    """As an independent program of the same bound says: 1.0337 of the plain step."""
    graph = Graph.load(GRAPHS / "unet.g")
    bound = offload_bound(graph, peak_of(graph) // 4, link_of(graph, 1.0))
    assert bound / graph.total_time == pytest.approx(1.0337, abs=1e-3)


def test_what_the_bound_refuses():
    forward = Graph([1], None, [Operation("a", 1, (), (0,))])
    with pytest.raises(ValueError, match="backward operations"):
        offload_bound(forward, 10, Link(1, 1))
    graph = tiny_chain(0, 2)
    assert offload_bound(graph, 1, Link(1e9, 1e9)) == math.inf
