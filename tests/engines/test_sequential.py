"""An ``nn.Sequential`` under ``engine="auto"``: the chain or its graph, as predicted."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from training import same
from zoo.models import Branching, FeedForward

import rotor
from rotor.algorithms import Persistent
from rotor.engines.chain.engine import ChainEngine
from rotor.engines.contract import CannotPlan
from rotor.engines.graph.engine import GraphEngine
from rotor.errors import InfeasibleError


def feed_forward(width=32, layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*[FeedForward(width, dropout=0.0) for _ in range(layers)])


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def chain_of(model, x=X, **options):
    chk = rotor.Checkpointable(copy.deepcopy(model), engine="chain", mem_limit="1GB", **options)
    chk.measure(x)
    return chk


def limit_of(model, share, x=X):
    return int(share * chain_of(model, x).curve().bytes[-1])


def stepped(model, x=X):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def check_steps(chk, model, steps):
    for _ in range(steps):
        assert same(stepped(chk), stepped(model))
        assert chk.plan.measured_bytes <= chk.mem_limit


def settle(chk, model):
    for _ in range(3):  # What a step has shown may begin another search.
        assert chk.wait_for_planning()
        check_steps(chk, model, 1)


def rows_of(chk):
    lines = chk.report().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("compared"))
    return {line.split()[0]: line for line in lines[start + 2 :] if line.strip()}


@pytest.fixture
def chain_first(monkeypatch):
    """Have the stages measured before a graph is captured, as if nothing had to recompute."""
    monkeypatch.setattr("rotor.engines.sequential.peak_estimate", lambda *_: 0)


@pytest.fixture
def measured_chains(monkeypatch):
    """Give the numbers of stages whose measures chains have made."""
    found, measure = [], ChainEngine.measure

    def noted(engine, key, call):
        inspection = measure(engine, key, call)
        found.append(len(inspection.stages))
        return inspection

    monkeypatch.setattr(ChainEngine, "measure", noted)
    return found


def test_a_step_that_recomputes_begins_with_the_graph(measured_chains):
    model = feed_forward()
    limit = limit_of(model, 0.4)
    measured_chains.clear()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit, effort="fast")
    check_steps(chk, model, 1)
    assert chk.plan.engine == "graph"
    assert not measured_chains
    assert "measured if" in rows_of(chk)["chain"]
    settle(chk, model)
    assert measured_chains == [6]
    assert "recomputed" in rows_of(chk)["chain"]
    check_steps(chk, model, 2)
    assert measured_chains == [6]


def test_a_graph_that_recomputes_nothing_needs_no_chain(measured_chains, monkeypatch):
    monkeypatch.setattr("rotor.engines.sequential.peak_estimate", lambda *_: 1 << 60)
    model = feed_forward()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit="1GB")
    check_steps(chk, model, 1)
    settle(chk, model)
    assert chk.plan.engine == "graph"
    assert not measured_chains
    # The published method asks for a schedule.
    found = chk.compute_sequence(mem_limit="1GB")
    assert isinstance(found, rotor.algorithms.sequence.Sequence)
    assert measured_chains == [6]
    check_steps(chk, model, 1)
    assert chk.plan.engine == "chain"


@pytest.mark.parametrize("error", [CannotPlan(ValueError("no graph")), InfeasibleError("none", 1)])
def test_where_the_graph_has_no_plan_the_chain_is_measured(error, measured_chains, monkeypatch):
    def plan(*_, **__):
        raise error

    monkeypatch.setattr(GraphEngine, "plan", plan)
    model = feed_forward()
    limit = limit_of(model, 0.6)
    measured_chains.clear()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    check_steps(chk, model, 2)
    assert measured_chains == [6]
    assert chk.plan.engine != "graph"


@pytest.fixture
def even_times(monkeypatch):
    """Give each run of a stage, and each operation, the same time."""
    monkeypatch.setattr("rotor.timing.Clock.stop", lambda clock: 10_000)


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_the_plan_with_less_recomputation_runs(share, even_times):
    model = feed_forward()
    limit = limit_of(model, share)
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit, effort="fast")
    check_steps(chk, model, 1)
    settle(chk, model)
    chain = chain_of(model)
    chain.compute_sequence(mem_limit=limit)
    slower = chain.plan.sequence.makespan / chain.plan.chain.ideal_time
    assert chk.plan.engine == "graph"
    assert chk.program.slowdown < slower
    rows = rows_of(chk)
    assert rows["graph"].endswith("runs")
    assert not rows["chain"].endswith("runs")
    assert all("recomputed" in row for row in rows.values())


def test_the_chain_runs_again_where_a_graphs_search_finds_too_little(chain_first, monkeypatch):
    monkeypatch.setattr("rotor.engines.sequential.WORTH", -10.0)
    model = feed_forward()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit_of(model, 0.5), effort="fast")
    check_steps(chk, model, 1)
    assert chk.plan.engine == "graph"
    settle(chk, model)
    assert chk.plan.engine == "chain"
    assert "recomputed" in rows_of(chk)["graph"]
    assert rows_of(chk)["chain"].endswith("runs")
    chk.mem_limit = limit_of(model, 0.6)  # Another limit asks again.
    check_steps(chk, model, 1)
    assert chk.plan.engine == "graph"


def test_a_chain_that_recomputes_nothing_is_not_captured(monkeypatch):
    monkeypatch.setattr(rotor.engines.graph.engine.GraphEngine, "measure", None)
    model = feed_forward()
    chk = rotor.Checkpointable(model, mem_limit="1GB")
    stepped(chk)
    assert chk.plan.engine == "chain"
    assert "compared" not in chk.report()


@pytest.mark.parametrize("options", [{"engine": "chain"}, {"mem_slots": 300}], ids=str)
def test_what_only_chains_take_keeps_the_chain(options):
    model = feed_forward()
    chk = rotor.Checkpointable(model, mem_limit=limit_of(model, 0.6), **options)
    stepped(chk)
    assert chk.plan.engine == "chain"
    assert "compared" not in chk.report()


@pytest.mark.parametrize("options", [{}, {"algo": Persistent()}], ids=str)
def test_the_published_method_gives_a_schedule(options):
    model = feed_forward()
    chk = rotor.Checkpointable(model)
    chk.measure(X)
    found = chk.compute_sequence(limit_of(model, 0.6), **options)
    assert isinstance(found, rotor.algorithms.sequence.Sequence)
    stepped(chk)
    assert chk.plan.engine == "chain"
    with pytest.raises(ValueError, match="runs as a chain"):
        _ = chk.program


def branching(**options):
    model = feed_forward(**options)
    model[2] = Branching(model[2])
    return model


def recomputed_in(row):
    return float(row.split("step, ")[1].split("%")[0])


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_where_a_stage_cannot_be_captured_parts_are_compared_with_the_chain(share, monkeypatch):
    monkeypatch.setattr("rotor.engines.sequential.WORTH", -1.0)
    model = branching()
    limit = limit_of(model, share)
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    check_steps(chk, model, 3)
    rows = rows_of(chk)
    assert "not captured: " in rows["graph"]
    recomputed = {name: recomputed_in(rows[name]) for name in ("chain", "parts")}
    best = min(recomputed, key=lambda name: recomputed[name])
    assert rows[best].endswith("runs")
    assert chk.plan.engine == best
    with pytest.raises(ValueError, match="runs in parts" if best == "parts" else "as a chain"):
        _ = chk.program


class Opaque(nn.Module):
    """Branches on values between operations of its own, none of which is a module."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        y = (x @ self.weight).tanh().exp().sin().sigmoid().cos()
        return y * 2 if y.sum().item() > 1e30 else y


def test_the_chain_runs_where_the_parts_do_not_fit():
    torch.manual_seed(0)
    model = nn.Sequential(*[Opaque(32) for _ in range(6)], FeedForward(32, dropout=0.0))
    limit = limit_of(model, 0.4)
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    check_steps(chk, model, 2)
    assert chk.plan.engine == "chain"
    rows = rows_of(chk)
    assert rows["chain"].endswith("runs")
    assert "needs" in rows["parts"]


def test_parts_that_need_more_than_the_limit_in_a_step_are_a_chain_again(monkeypatch):
    monkeypatch.setattr("rotor.engines.sequential.recomputation_of", lambda chain: 9.0)
    model = branching()
    limit = limit_of(model, 0.6)
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    y = chk(X)
    assert chk.plan.engine == "parts"
    chk.plan.is_over = True
    y.square().mean().backward()
    assert same(stepped(chk), stepped(model))
    assert chk.plan.engine == "chain"
    assert chk.plan.measured_bytes <= limit
    assert "in a step" in rows_of(chk)["parts"]


def test_a_limit_below_the_chain_is_held_by_the_graph(chain_first):
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(
        *[nn.Sequential(norm(nn.Linear(32, 96)), nn.Tanh(), nn.Linear(96, 32)) for _ in range(4)]
    )
    chain = chain_of(model)
    least = chain.curve().minimum_bytes
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=int(0.9 * least))
    for _ in range(2):
        stepped(chk)
        assert chk.plan.measured_bytes <= int(0.9 * least)
    assert chk.plan.engine == "graph"
    assert "needs" in rows_of(chk)["chain"]
    with pytest.raises(rotor.InfeasibleError):
        chain.compute_sequence(mem_limit=int(0.9 * least))


def test_below_both_the_error_has_the_smaller_need():
    model = feed_forward()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=1000)
    with pytest.raises(rotor.InfeasibleError) as raised:
        chk(X)
    with pytest.raises(rotor.InfeasibleError) as of_chain:
        chain_of(model).compute_sequence(mem_limit=1000)
    assert raised.value.minimum_bytes <= of_chain.value.minimum_bytes


def test_a_copy_plans_for_itself():
    model = feed_forward()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit_of(model, 0.6), effort="fast")
    stepped(chk)
    other = copy.deepcopy(chk)
    assert same(stepped(other), stepped(model))
    assert other.plan is not chk.plan
    assert other.plan.limit_bytes == chk.plan.limit_bytes >= other.plan.predicted_bytes
    # With a schedule of the chain, which was asked for after a graph was captured.
    sequence = chk.compute_sequence()
    for other in (copy.deepcopy(chk), pickle.loads(pickle.dumps(chk))):
        assert (other.plan.engine, other.sequence) == ("chain", sequence)
        assert same(stepped(other), stepped(model))


def test_the_curve_of_training_is_that_of_the_plans_it_makes():
    model = feed_forward()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit="1GB", effort="fast")
    chk.measure(X)
    chain, curve = chk.curve(), chk.curve(8, training=True)
    assert curve.minimum_bytes < chain.minimum_bytes
    assert all(curve.at(limit) <= chain.at(limit) for limit in chain.bytes.tolist())
    limit = (curve.minimum_bytes + chain.minimum_bytes) // 2
    plan = chk.plan_step(limit)
    assert (plan.engine, plan.limit_bytes) == ("graph", limit)
    assert same(stepped(chk), stepped(model))
    assert chk.plan.engine == "graph"
    assert chk.plan.measured_bytes <= limit
    with pytest.raises(rotor.InfeasibleError, match="no schedule fits"):
        chk.compute_sequence(mem_limit=limit)
    assert chk.plan.engine == "graph"


def test_the_curve_of_training_after_a_schedule_on_request_is_that_of_the_chain():
    chk = rotor.Checkpointable(feed_forward(), X, mem_limit="1GB")
    assert chk.curve(4, training=True).bytes.tolist() == chk.curve().bytes.tolist()
    assert chk.plan_step("1GB").engine == "chain"
