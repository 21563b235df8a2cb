"""The choice between PyTorch's operators and Inductor's kernels, by measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eager_inductor import refuse_to_compile, stand_in
from torch import nn
from training import gradients_of, same

import rotor
from rotor.engines.contract import Settings
from rotor.engines.graph import choosing
from rotor.engines.graph.code.pricing import build_graph
from rotor.engines.graph.costs.glance import profile
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.tracing.groups import Group, Operators
from rotor.graph import Machine
from rotor.wrapper.setting import agree_to_share

WIDTH = 32


class Block(nn.Module):
    """A normalised layer with noise and a skip connection."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.noise = nn.Parameter(torch.ones(WIDTH)), noise

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        y = torch.tanh(self.inner(y)) * 1.5 + 0.5
        return x + self.outer(y + self.noise * torch.rand_like(y) if self.noise else y)


def model_of(noise=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(noise) for _ in range(3)))


BATCH = torch.linspace(-1, 1, 24 * WIDTH).reshape(24, WIDTH)


@pytest.fixture(autouse=True)
def _eager(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(choosing, "made_here", {})


def decide(monkeypatch, *ratios, parts=False):
    """Give the ratios of kernels' times; with parts, operators are faster than each kernel."""
    monkeypatch.setattr(choosing, "ratios_of", lambda graphs: list(ratios))
    monkeypatch.setattr(choosing, "is_better", lambda parted, compiled: parts)


def planned(model, limit="1GB", **options):
    return rotor.Checkpointable(
        model, mem_limit=limit, engine="graph", backend="auto", effort="fast", **options
    )


def step_of(model, x=BATCH):
    """The measured step of a model, once a step has run."""
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return model.plan.step


def targets_of(step, kind):
    return [t.node.target for t in step.lowered.tasks if t.node and isinstance(t.node.target, kind)]


def test_faster_kernels_are_taken_and_the_choice_is_kept(monkeypatch):
    decide(monkeypatch, 0.9, 0.95)
    model = planned(model_of())
    assert targets_of(step_of(model), Group)
    assert "took Inductor's kernels: kernels take 0.900 to 0.950 of" in model.report()
    # Another limit, another model and another process compare nothing.
    decide(monkeypatch)
    monkeypatch.setattr(choosing, "made_here", {})
    again = planned(model_of())
    assert targets_of(step_of(again), Group)
    assert "took Inductor's kernels: as kept on disk" in again.report()


@pytest.mark.parametrize("ratios", [(0.9, 1.02), (0.98, 0.99)], ids=["slower once", "little gain"])
def test_slower_kernels_are_left_and_not_compiled_again(monkeypatch, ratios):
    decide(monkeypatch, *ratios)
    model = planned(model_of())
    assert not targets_of(step_of(model), Group)
    assert "took PyTorch's operators: kernels take" in model.report()
    refuse_to_compile(monkeypatch)
    assert not targets_of(step_of(planned(model_of())), Group)


def test_operators_give_the_gradients_of_fx_and_share_a_capture_of_all_shapes(monkeypatch):
    decide(monkeypatch, 2.0)
    model = planned(model_of())
    plain = rotor.Checkpointable(model_of(), mem_limit="1GB", engine="graph")
    for x in (BATCH, BATCH[:16], BATCH[:8]):
        step_of(model, x)
        step_of(plain, x)
        assert same(gradients_of(model), gradients_of(plain))
    assert "3 share 1 captured graph" in model.report()


def test_a_choice_holds_for_all_sizes(monkeypatch):
    decide(monkeypatch, 0.5)
    model = planned(model_of())
    step_of(model)
    decide(monkeypatch, 2.0)
    assert targets_of(step_of(model, BATCH[:16]), Group)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_kernels_run_as_operators_where_these_are_faster(monkeypatch, noise):
    decide(monkeypatch, 0.9, parts=True)
    models = [planned(model_of(noise)) for _ in range(2)]
    step = step_of(models[0])
    parted, compiled = targets_of(step, Operators), targets_of(step, Group)
    assert parted
    # Eager's random numbers know no seed: their kernels stay.
    assert bool(compiled) == bool(noise)
    assert all("inductor_random" in "".join(group.operators) for group in compiled)
    assert f"{len(set(parted))} of them as their operators" in models[0].report()
    models[1].measure(BATCH)
    models[1].compute_sequence()
    models[1].compute_sequence(int(models[1].get_expected_memory() * 0.9))
    step_of(models[1])
    assert models[1].plan.recomputed > 0
    assert same(gradients_of(models[0]), gradients_of(models[1]))


def test_a_kernel_that_was_compiled_can_run_as_operators_later(monkeypatch):
    decide(monkeypatch, 0.9, parts=True)
    compiled = rotor.Checkpointable(model_of(), BATCH, "1GB", engine="graph", backend="inductor")
    assert not targets_of(step_of(compiled), Operators)
    assert targets_of(step_of(planned(model_of())), Operators)
    assert not targets_of(compiled.plan.step, Operators)


@pytest.mark.parametrize(
    ("ns", "workspace", "made", "flags", "expected"),
    [
        (90, 8, (64,), 1, True),
        (97, 8, (64,), 1, False),
        (90, 9, (64,), 1, False),
        (90, 8, (72,), 1, False),
        (90, 8, (64,), 5, False),
        (90, 8, (64,), 8, False),
    ],
)
def test_operators_must_be_faster_repeat_and_need_no_more(ns, workspace, made, flags, expected):
    kernel = Cost(100, 8, (64,), 1)
    assert choosing.is_better(Cost(ns, workspace, made, flags), kernel) == expected


def test_programs_are_compared_at_the_same_limits():
    step = rotor.Checkpointable(model_of(), BATCH, "1GB", engine="graph").plan.step
    graph = step.graph(0)
    assert choosing.ratios_of((graph, graph)) == [1.0] * choosing.POINTS
    slow = [replace(cost, ns=2 * cost.ns) for cost in step.costs]
    ratios = choosing.ratios_of((graph, build_graph(step.lowered, slow, 0)))
    assert all(1.9 < ratio < 2.1 for ratio in ratios)


def test_what_inductor_cannot_compile_runs_as_operators(monkeypatch):
    refuse_to_compile(monkeypatch)
    model = planned(model_of())
    assert not targets_of(step_of(model), Group)
    assert "has no kernels for them: ValueError: no such kernel" in model.report()
    # That is not kept: the compiler may be repaired.
    assert not choosing.made_here


def test_a_limit_below_that_of_kernels_names_the_other_backend(monkeypatch):
    decide(monkeypatch, 0.9)
    model = planned(model_of())
    model.measure(BATCH)
    with pytest.raises(
        rotor.InfeasibleError, match='kernels, which all limits keep to: backend="fx"'
    ):
        model.compute_sequence(1)


def test_measured_costs_decide(monkeypatch):
    """With nothing replaced, some choice is made, kept, and the same again."""
    model = planned(model_of())
    first = targets_of(step_of(model), Group | Operators)
    again = targets_of(step_of(planned(model_of())), Group | Operators)
    assert list(map(repr, first)) == list(map(repr, again))
    assert "as kept on disk" not in model.report()


def test_times_of_another_machine_are_refused():
    machine = Machine("another", 1e9, 1e9, 1e-6)
    with pytest.raises(ValueError, match="compares times that are measured here"):
        planned(model_of(), profile=machine)


def test_one_process_chooses_for_itself():
    settings = Settings(model_of(), engine="graph", backend="auto")

    class Alone:
        rank = 0

        def together(self, act):
            return [act()]

    with pytest.raises(ValueError, match='backend="auto" follows the times of one process'):
        agree_to_share(Alone(), settings, "graph")


def test_profiles_of_groups_are_known_by_how_they_run(monkeypatch):
    decide(monkeypatch, 0.9, parts=True)
    step = step_of(planned(model_of()))
    costs = profile(step.lowered, step.device)
    assert [cost.made_bytes for cost in costs] == [cost.made_bytes for cost in step.costs]
    assert all(repr(target).startswith("operators.") for target in targets_of(step, Operators))
