"""Attributes of a limited model: those that may be set are checked and used, others are refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from zoo.models import Function

import rotor
from rotor.algorithms import NoCheckpoint, RecomputeAll
from rotor.algorithms.sequence import Sequence

X = torch.rand(64, 32)


def stages(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(count)])


def whole() -> nn.Module:
    return Function(lambda self, x: self.body(x) * self.scale, body=stages(6), scale=1.0)


def trained(model, steps: int = 2):
    for _ in range(steps):
        model.zero_grad()
        model(X).square().mean().backward()
    return model


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
def test_a_limit_that_is_set_holds_from_the_next_step(engine):
    model = stages() if engine in ("auto", "chain") else whole()
    chk = rotor.Checkpointable(model, mem_limit="4 MiB", engine=engine, planning="before")
    trained(chk)
    assert chk.plan.limit_bytes == 4 << 20
    chk.mem_limit = "3 MiB"
    assert chk.mem_limit == 3 << 20
    assert trained(chk).plan.limit_bytes == 3 << 20


@pytest.mark.parametrize("wrong", [-5, 0, "8 foo", True, float("nan"), [1]])
def test_a_limit_that_is_none_is_refused_and_changes_nothing(wrong):
    chk = trained(rotor.Checkpointable(stages(), mem_limit="4 MiB"))
    plan = chk.plan
    with pytest.raises((ValueError, TypeError), match="mem_limit"):
        chk.mem_limit = wrong
    assert chk.mem_limit == 4 << 20
    assert trained(chk, 1).plan is plan


def test_a_limit_that_cannot_be_kept_raises_in_the_next_step():
    chk = trained(rotor.Checkpointable(stages(), mem_limit="4 MiB", engine="chain"))
    chk.mem_limit = 1000
    with pytest.raises(rotor.InfeasibleError):
        chk(X)
    chk.mem_limit = "4 MiB"
    trained(chk, 1)


def test_no_limit_stands_for_the_free_memory_again():
    chk = trained(rotor.Checkpointable(stages(), mem_limit="4 MiB"))
    chk.mem_limit = None
    trained(chk, 1)
    assert chk.mem_limit > 4 << 20
    assert chk.plan.limit_bytes == chk.mem_limit


def test_options_that_are_set_are_checked():
    chk = rotor.Checkpointable(stages(), mem_limit="4 MiB")
    for name, wrong in [("verify", "now"), ("planning", 3), ("mem_slots", -1)]:
        before = getattr(chk, name)
        with pytest.raises((ValueError, TypeError)):
            setattr(chk, name, wrong)
        assert getattr(chk, name) == before
    chk.verify = "always"
    assert chk.verify == "always"


@pytest.mark.parametrize("name", ["engine", "backend", "counts", "offload", "loss_fn"])
def test_options_that_cannot_be_changed_say_what_to_do(name):
    chk = rotor.Checkpointable(stages(), mem_limit="4 MiB")
    with pytest.raises(AttributeError, match=rf"wrap the model anew.*{name}="):
        setattr(chk, name, "chain")


def test_a_sequence_that_is_set_runs():
    chk = rotor.Checkpointable(stages(3), X, "1 GiB")
    chk.compute_sequence(algo=RecomputeAll)
    sequence = chk.sequence
    chk.compute_sequence()
    assert str(chk.sequence) != str(sequence)
    chk.sequence = sequence
    assert str(chk.sequence) == str(sequence)
    trained(chk, 1)
    assert chk.plan.schedule.recomputed
    with pytest.raises(ValueError, match="stages"):
        chk.sequence = rotor.Checkpointable(stages(2), X, "1 GiB").sequence
    assert str(chk.sequence) == str(sequence)
    assert isinstance(chk.sequence, Sequence)


@pytest.mark.parametrize(
    ("engine", "name"),
    [("chain", n) for n in ("chain", "functions", "names", "all_values", "inspection_values")]
    + [("auto", "program"), ("graph", "graph"), ("graph", "program")],
)
def test_other_published_attributes_are_read_only(engine, name):
    chk = trained(rotor.Checkpointable(stages(), mem_limit="4 MiB", engine=engine), 1)
    with pytest.raises(AttributeError, match=rf"{name} .*read-only.*load_plan"):
        setattr(chk, name, None)
    assert name not in vars(chk.module)


def test_attributes_of_the_model_itself_can_be_set():
    chk = trained(rotor.Checkpointable(whole(), mem_limit="4 MiB"), 1)
    chk.scale = 2.0
    chk.names = ["a"]
    assert chk.module.scale == 2.0
    assert chk.module.names == ["a"]


def test_an_algorithm_holds_up_to_the_next_call():
    chk = rotor.Checkpointable(stages(6), X, "1 GiB")
    usual = str(chk.sequence)
    again = str(chk.compute_sequence(algo=RecomputeAll))
    assert again != usual
    trained(chk)
    assert str(chk.sequence) == again
    assert str(chk.compute_sequence("1 GiB")) == usual
    chk.compute_sequence(algo="persistent", mem_slots=20)
    assert str(chk.compute_sequence(algo=NoCheckpoint())) == usual


def test_options_of_a_graph_hold_up_to_the_next_call():
    chk = rotor.Checkpointable(whole(), X, "4 MiB", engine="graph", seed=3)
    chk.compute_sequence(effort="fast", seed=5)
    assert chk.options == {"seed": 5, "effort": "fast"}
    chk.compute_sequence()
    assert chk.options == {"seed": 3}


def test_the_limit_of_a_budgeted_model_takes_the_place_of_its_budget():
    chk = rotor.Rockmate(whole(), X, "2 MiB")
    chk.mem_limit = "4 MiB"
    assert chk.budget is None
    assert trained(chk, 1).plan.limit_bytes == 4 << 20
    chk.budget = "3 MiB"
    trained(chk, 1)
    assert chk.budget == 3 << 20
    assert chk.plan.limit_bytes >= 3 << 20
    with pytest.raises(ValueError, match="budget"):
        chk.budget = -1


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
def test_dir_lists_the_names_of_both(engine):
    model = stages() if engine == "auto" else whole()
    chk = rotor.Checkpointable(model, mem_limit="4 MiB", engine=engine)
    names = {"measure", "compute_sequence", "report", "curve", "mem_limit", "load_plan", "plan"}
    names |= {"sequence"} if engine == "auto" else {"scale", "body"}
    assert names | {"module", "parameters", "forward"} <= set(dir(chk))


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
def test_a_limited_model_can_be_inspected(engine):
    model = stages() if engine in ("auto", "chain") else whole()
    plain_code = model.forward.__code__
    chk = rotor.Checkpointable(model, mem_limit="4 MiB", engine=engine, planning="before")
    for _ in range(2):
        assert dict(inspect.getmembers(chk))["mem_limit"] == 4 << 20
        assert not hasattr(chk, "graph") or engine == "graph"
        trained(chk)
    assert chk.forward.__code__ is plain_code
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(chk.eval(), X)(X), model(X))


def test_another_module_is_not_put_in_the_place_of_the_wrapped_one():
    chk = rotor.Checkpointable(stages(), mem_limit="4 MiB")
    module = chk.module
    with pytest.raises(AttributeError, match=r"stays the one that it is: wrap the other one"):
        chk.module = stages()
    assert chk.module is module
