"""An engine, an algorithm and a heuristic of one's own: one file and one line each."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import rotor
from rotor import algorithms, rockmate, simrd
from rotor.algorithms import DynamicAlgorithm, NoCheckpoint, Persistent, RecomputeAll, Sequence
from rotor.engines.contract import Call, Engine, IsPending, Key, StartMeter
from rotor.graph import simulate
from rotor.meter.step_meter import Metered, StepBytes
from rotor.report import plans, text
from rotor.rockmate.solvers import Solver
from rotor.simrd import heuristics
from rotor.wrapper import registry

# -- an engine: a file with a class, and a line in `rotor.wrapper.registry.ENGINES`


class PlainPlan(Metered):
    """Runs the model as it is; no peak is known before a step was metered."""

    engine = "toy"
    makespan = 0.0

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        super().__init__()
        self.device, self.limit_bytes = device, limit_bytes

    @property
    def predicted_bytes(self) -> int:
        return self.measured_bytes or 0


class PlainEngine(Engine):
    """Checks a limit, and does nothing to keep it."""

    name = "plain"

    def key(self, call: Call) -> Key:
        return Key(tuple(t.shape for t in call.args), ())

    def measure(self, key: Key, call: Call) -> None:
        raise AssertionError("there is nothing to measure")

    def forget(self, measured: object) -> None:
        pass

    def device_of(self, key: Key) -> torch.device:
        return torch.device("cpu")

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> PlainPlan:
        return PlainPlan(self.device_of(key), limit_bytes)

    def run(self, plan: PlainPlan, call: Call, start: StartMeter) -> tuple[object, IsPending]:
        meter = start()
        output = self.context.module.forward(*call.args, **call.kwargs)
        if meter is not None:
            meter.forward_done(output)
        return self.context.with_loss(output, call.targets), None

    def learn(self, plan: PlainPlan, step: StepBytes) -> None:
        plan.measured_bytes, plan.measured_timeline = step.peak_bytes, step.timeline
        if step.peak_bytes > plan.limit_bytes:
            self.context.warn("over", f"{step.peak_bytes} bytes were needed")


def figures(plan):
    return [["limit", str(plan.limit_bytes)], ["measured", str(plan.measured_bytes)]]


def test_an_engine_is_a_class_and_a_line_and_a_view(monkeypatch, tmp_path):
    monkeypatch.setitem(registry.ENGINES, "plain", lambda context: [PlainEngine(context)])
    view = plans.View("toy", figures, figures, "Toys")
    monkeypatch.setitem(plans.VIEWS, "toy", view)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8)
    chk = rotor.Checkpointable(model, mem_limit="1MB", engine="plain")
    chk(x).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), found, strict=True))
    assert 0 < chk.plan.measured_bytes <= chk.mem_limit
    assert str(chk.mem_limit) in chk.report(tmp_path / "page.html")
    assert f"<dt>limit</dt><dd>{chk.mem_limit}</dd>" in (tmp_path / "page.html").read_text()
    chk.report(tmp_path / "trace.json")
    assert "measured step" in (tmp_path / "trace.json").read_text()
    chk = rotor.Checkpointable(model, mem_limit=1, engine="plain")
    with pytest.warns(rotor.MemoryLimitWarning, match="bytes were needed"):
        chk(x).sum().backward()
    with pytest.raises(TypeError, match="unknown option 'effort'"):
        rotor.Checkpointable(model, engine="plain", effort="fast")


# -- a column: a word in the head of a function of `rotor.report.text`, and a value in each row


def test_a_column_of_a_table_is_in_text_and_page(monkeypatch, tmp_path):
    def wider(plan):
        head, *others = text.stage_rows(plan)
        return [[*head, "letters"], *([*row, str(len(row[0]))] for row in others)]

    monkeypatch.setitem(plans.VIEWS, "chain", plans.VIEWS["chain"]._replace(rows=wider))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    chk = rotor.Checkpointable(model, torch.ones(4, 8), "1MB")
    assert "letters" in chk.display()
    chk.report(tmp_path / "page.html")
    assert "letters" in (tmp_path / "page.html").read_text()


# -- a solver of captured graphs: a function, and a line in `rotor.rockmate`


def test_a_solver_of_graphs_is_a_function_and_a_line(monkeypatch):
    asked = []

    def all_kept(graph, budget, options, progress):
        asked.append(budget)
        return simulate(graph, range(len(graph)))

    class AllKept(Solver):
        algorithm = "kept"

    monkeypatch.setitem(rockmate.SOLVERS, "kept", all_kept)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8)
    planned = rotor.Rockmate(model, x, 1 << 20, top_solvers=[AllKept()])
    planned(x).sum().backward()
    assert asked
    assert planned.program.slowdown == 1


# -- an algorithm: rotor/algorithms/<name>.py, and a line in its registry


class Cautious(DynamicAlgorithm):
    """Recomputes nothing."""

    name = "cautious"

    def solve(self, chain, budget_bytes, *, mem_slots=None, progress=None) -> Sequence:
        return NoCheckpoint().solve(chain, budget_bytes)

    def curve(self, chain, *, progress=None):
        return NoCheckpoint().curve(chain)


def test_an_algorithm_is_a_file_and_a_line(monkeypatch):
    module = types.ModuleType("rotor.algorithms.cautious")
    module.Cautious = Cautious
    monkeypatch.setitem(sys.modules, "rotor.algorithms.cautious", module)
    monkeypatch.setitem(algorithms._REGISTRY, "cautious", "Cautious")
    assert "cautious" in algorithms.names()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    chk = rotor.Checkpointable(model, torch.ones(4, 8), "1MB")
    sequence = chk.compute_sequence(algo="cautious")
    assert max(sequence.count_forwards().values()) == 1


# -- an algorithm of a program: any object with `solve(chain, budget)`


class Bare:
    """Runs all again; knows nothing of slots, progress and curves."""

    def solve(self, chain, budget):
        return Sequence(RecomputeAll().solve(chain, budget).codes)


class Brief(DynamicAlgorithm):
    name = "brief"

    def __init__(self, scale=1.0):
        self.scale = scale

    def solve(self, chain, budget):
        return Persistent().solve(chain, max(int(self.scale * budget), 1))


class Excessive:
    def solve(self, chain, budget):
        return NoCheckpoint().solve(chain, 1 << 40)


def chain_of(stages):
    layers = [m for _ in range(stages) for m in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers), torch.ones(256, 32)


@pytest.mark.parametrize("algo", [Bare, Bare(), Brief, Brief(0.9)])
@pytest.mark.parametrize("engine", ["auto", "chain"])
def test_an_algorithm_of_ones_own_needs_solve_only(algo, engine):
    model, x = chain_of(6)
    chk = rotor.Checkpointable(model, x, "1MB", engine=engine)
    before = chk.get_expected_memory()
    sequence = chk.compute_sequence("450KB", mem_slots=100, algo=algo)
    assert chk.sequence == sequence
    assert chk.get_expected_memory() <= 450_000 < before
    assert sum(sequence.count_forwards().values()) > len(chk.chain)
    curve = chk.curve()
    assert curve.minimum_bytes <= 450_000
    assert len(curve.bytes) == 1 if chk.algorithm.__class__ is Bare else len(curve.bytes) > 5
    chk(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), found, strict=True))


def test_an_algorithm_of_ones_own_cannot_pass_the_limit():
    model, x = chain_of(6)
    chk = rotor.Checkpointable(model, x, "1MB", engine="chain")
    with pytest.raises(rotor.InfeasibleError, match="no schedule fits in a limit") as caught:
        chk.compute_sequence("450KB", algo=Excessive)
    assert chk.compute_sequence(caught.value.minimum_bytes, algo=Excessive) == chk.sequence


def test_an_algorithm_of_ones_own_takes_its_options():
    model, x = chain_of(4)
    chk = rotor.Checkpointable(model, x, "1MB", engine="chain")
    assert chk.compute_sequence("1MB", algo=Brief, scale=0.5) == chk.sequence
    assert chk.algorithm.scale == 0.5
    with pytest.raises(TypeError, match="scales"):
        chk.compute_sequence("1MB", algo=Bare(), scales=0.5)
    for wrong in (3, object, [Bare]):
        with pytest.raises(TypeError, match=r"solve\(chain, budget\)"):
            chk.compute_sequence("1MB", algo=wrong)
    with pytest.raises(TypeError, match="returned list, expected"):
        chk.compute_sequence("1MB", algo=types.SimpleNamespace(solve=lambda chain, budget: []))
    assert chk.algorithm.scale == 0.5


# -- a heuristic: a file with a function, and a line in `rotor.simrd.heuristics.WRITTEN`


def smallest(candidate) -> float:
    """Evict what is smallest."""
    return float(candidate.bytes)


def test_a_heuristic_is_a_function_and_a_line(monkeypatch):
    monkeypatch.setitem(heuristics.WRITTEN, "Smallest", smallest)
    assert "Smallest" in heuristics.names()
    assert heuristics.get("Smallest").description == "Evict what is smallest."
    log = simrd.networks.linear(12)
    named = simrd.simulate(log, "Smallest", ratio=0.6)
    assert named.heuristic == "Smallest"
    assert named.n_eval == simrd.simulate(log, smallest, ratio=0.6).n_eval > 0
