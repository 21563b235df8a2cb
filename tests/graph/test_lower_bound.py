"""The proven lower bound of a graph's peak, the orders that come near it, and both in texts."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from oracles import program as oracle
from random_graphs import graphs
from torch import nn
from zoo.models import Row, Tanhs

import rotor
from rotor.graph import Graph, Operation, curve, lower_bound, plan, simulate


def least_of(graph):
    with pytest.raises(rotor.InfeasibleError) as raised:
        plan(graph, 1)
    assert raised.value.lower_bound_bytes == lower_bound(graph)
    return raised.value.minimum_bytes


@settings(max_examples=150, deadline=None)
@given(graphs(most=6))
def test_no_program_of_a_tiny_graph_is_below(graph):
    bound = lower_bound(graph)
    if bound > 1:
        assert oracle.best(graph, bound - 1) is None


def random_graph(draw: random.Random) -> Graph:
    """Up to seven operations, many of which make pinned storages."""
    sizes: list[int] = []
    pinned: list[bool] = []
    operations = []
    for k, phase in enumerate(sorted(draw.choice((0, 0, 1, 2, 2, 2)) for _ in range(7))):
        inputs = draw.sample(range(len(sizes)), min(len(sizes), draw.randint(0, 2)))
        outputs = tuple(range(len(sizes), len(sizes) + draw.choice((1, 1, 1, 2))))
        sizes += [draw.randint(0, 9) for _ in outputs]
        pinned += [draw.random() < 0.4 for _ in outputs]
        kind = {"phase": ("forward", "loss", "backward")[phase], "once": draw.random() < 0.15}
        workspace = draw.choice((0, 0, 3, 8))
        operations.append(Operation(f"op{k}", 1, tuple(inputs), outputs, workspace, **kind))
    return Graph(sizes, pinned, operations)


def test_bounds_by_cuts_are_proofs_and_mostly_reached():
    draw = random.Random(0)
    higher, reached = 0, 0
    for graph in (random_graph(draw) for _ in range(1500)):
        bound = lower_bound(graph)
        if bound > lower_bound(graph, moves=True):
            higher += 1
            assert oracle.best(graph, bound - 1) is None
            reached += oracle.best(graph, bound) is not None
    assert higher > 40
    assert reached > 0.7 * higher


def test_gradients_exist_before_the_last_of_several_large_operations():
    sizes, pinned, operations = [4], [False], [Operation("loss", 1, (), (0,), phase="loss")]
    for k in range(4):
        slope = len(sizes)
        sizes += [40, 6, 4]
        pinned += [False, True, False]
        before = slope - 1 if k else 0
        operations += [
            Operation(f"wide{k}", 1, (before,), (slope,), 20, "backward"),
            Operation(f"weight{k}", 1, (slope,), (slope + 1,), 0, "backward"),
            Operation(f"narrow{k}", 1, (slope,), (slope + 2,), 0, "backward"),
        ]
    graph = Graph(sizes, pinned, operations)
    # Whichever wide one is the last has three gradients beside its own 4 + 40 + 20 bytes: values
    # from which one could still be made are larger.
    assert lower_bound(graph) == 64 + 6 * 3 == least_of(graph)
    assert lower_bound(graph, moves=True) == 64


def test_the_least_of_a_transformer_is_within_a_tenth_of_the_bound():
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    chk = rotor.Checkpointable(model, mem_limit="100MB", engine="graph", effort="fast")
    chk.measure(torch.randn(8, 64, 32))
    with pytest.raises(rotor.InfeasibleError) as raised:
        chk.compute_sequence(mem_limit=1)
    error = raised.value
    assert error.lower_bound_bytes <= error.minimum_bytes < 1.1 * error.lower_bound_bytes
    assert error.minimum_bytes > 1.2 * lower_bound(chk.cost_model(), moves=True)


def test_results_of_the_loss_stay_until_they_are_read():
    """A model with a second output, whose gradient is read when all else is done."""
    graph = Graph(
        [10, 10, 20, 50, 5],
        [True, True, False, False, True],
        [
            Operation("features", 1, (), (0,)),
            Operation("scores", 1, (0,), (1,)),
            Operation("loss", 1, (0, 1), (2, 3), phase="loss"),
            Operation("backward of scores", 1, (2,), (), workspace_bytes=100, phase="backward"),
            Operation("sum", 1, (3,), (4,), phase="backward"),
        ],
    )
    # Nothing orders the last two: beside the workspace are the 50 bytes, or the 5 of their sum.
    assert lower_bound(graph) == 20 + 20 + 100 + 5
    assert lower_bound(graph, moves=True) == 20 + 20 + 100
    operations = list(graph.operations)
    operations[3] = Operation("first", 1, (2,), (5,), workspace_bytes=100, phase="backward")
    operations[4] = Operation("sum", 1, (3, 5), (4,), phase="backward")
    graph = Graph([10, 10, 20, 50, 5, 1], [True, True, False, False, True, False], operations)
    assert lower_bound(graph) == 20 + 20 + 50 + 100 + 1 == least_of(graph)


def test_pinned_storages_made_before_count():
    graph = Graph(
        [10, 30, 7],
        [False, True, True],
        [
            Operation("a", 1, (), (0,), phase="backward"),
            Operation("b", 1, (0,), (1,), phase="backward"),
            Operation("c", 1, (0, 1), (2,), workspace_bytes=100, phase="backward"),
        ],
    )
    assert lower_bound(graph) == 10 + 30 + 7 + 100 == least_of(graph)


def test_the_last_to_be_made_has_the_others_beside_it():
    graph = Graph(
        [3, 30, 20],
        [False, True, True],
        [
            Operation("a", 1, (), (0,), phase="backward"),
            Operation("b", 1, (0,), (1,), workspace_bytes=6, phase="backward"),
            Operation("c", 1, (0,), (2,), workspace_bytes=8, phase="backward"),
        ],
    )
    # All 50 bytes and the 3 that are read, with the smaller of the workspaces.
    assert lower_bound(graph) == 59 == least_of(graph)


def test_of_some_large_operations_one_has_the_gradients_of_the_others_beside_it():
    sizes, operations = [1], [Operation("a", 1, (), (0,), phase="backward")]
    for k, workspace in enumerate((40, 36, 36, 2, 0)):
        sizes.append(9)
        operations.append(
            Operation(f"w{k}", 1, (0,), (k + 1,), workspace_bytes=workspace, phase="backward")
        )
    graph = Graph(sizes, [False, *[True] * 5], operations)
    # The third of the large ones: three gradients, what is read, and 36 bytes; any could be last.
    assert lower_bound(graph) == 27 + 1 + 36 == least_of(graph)


def narrowing(layers=6):
    """A backward that ends with its largest operation, after gradients as large as their inputs."""
    sizes, pinned, operations = [], [], []

    def storage(size, is_pinned=False):
        sizes.append(size)
        pinned.append(is_pinned)
        return len(sizes) - 1

    kept = [storage(8)]
    operations.append(Operation("input", 10, (), (kept[0],)))
    for k in range(layers):
        kept.append(storage(8))
        operations.append(Operation(f"f{k}", 10, (kept[-2],), (kept[-1],)))
    slope = storage(1)
    operations.append(Operation("loss", 0, (kept[-1],), (slope,), phase="loss"))
    for k in reversed(range(layers)):
        gradient = storage(12, True)
        operations.append(Operation(f"w{k}", 10, (slope, kept[k]), (gradient,), phase="backward"))
        previous, slope = slope, storage(8)
        operations.append(Operation(f"b{k}", 10, (previous,), (slope,), phase="backward"))
    operations.append(
        Operation("last", 10, (slope,), (storage(4, True),), workspace_bytes=200, phase="backward")
    )
    return Graph(sizes, pinned, operations)


def test_gradients_wait_for_the_largest_operation():
    graph = narrowing()
    whole = sum(s.bytes for s in graph.storages if s.pinned)
    assert simulate(graph, range(len(graph))).peak_bytes == 200 + 8 + whole
    # In the order of the graph all six gradients would be there: 284 bytes.
    assert lower_bound(graph) == 213 <= least_of(graph) <= 230
    assert curve(graph, 3).minimum_bytes == least_of(graph)
    assert curve(graph, 3).lower_bound_bytes == 213


@pytest.fixture
def wide():
    # It returns all that it computes: an assumed loss needs more than the rest of the step.
    model = Row(Tanhs(16, 4), nn.Linear(16, 256))
    chk = rotor.Checkpointable(model, mem_limit="100MB", engine="graph", effort="fast")
    chk.measure(torch.randn(256, 16))
    return chk


def test_errors_name_the_bound(wide):
    with pytest.raises(rotor.InfeasibleError, match="provably none fits in less than") as raised:
        wide.compute_sequence(mem_limit="100KB")
    error = raised.value
    assert 100_000 < error.lower_bound_bytes <= error.minimum_bytes
    assert f"({error.lower_bound_bytes} bytes)" in str(error)


def test_reports_and_curves_name_the_bound(wide):
    wide.compute_sequence()
    (line,) = [line for line in wide.report().splitlines() if line.startswith("lower bound")]
    assert line.endswith(rotor.units.format_bytes(wide.plan.lower_bound_bytes))
    assert wide.plan.lower_bound_bytes <= wide.plan.predicted_bytes
    assert 0 < wide.curve(4).lower_bound_bytes <= wide.curve(4).minimum_bytes


def test_the_curve_goes_below_what_an_unknown_loss_is_assumed_to_need(wide):
    output = 256 * 256 * 4
    found = wide.curve(6)
    # Beside the output, four times its bytes are assumed; a plan exists with less.
    assert found.minimum_bytes < 5 * output
    wide.compute_sequence(mem_limit=found.minimum_bytes)
    x = torch.randn(256, 16)
    for _ in range(3):
        wide(x).sum().backward()
    assert wide.plan.measured_bytes <= found.minimum_bytes
