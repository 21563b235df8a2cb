"""Groups of operators as operations: which there are, and what plans make of them."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from capture.test_graph_inductor import Attention, Planned, check, state_after
from eager_inductor import stand_in
from torch import nn
from torch.nn import functional as F

import rotor
from rotor._pytorch import inductor as _inductor
from rotor.engines.graph.tracing import fusing
from rotor.engines.graph.tracing.groups import groups_among

VIEWS = "getitem|permute|reshape|select|slice|split|squeeze|transpose|unbind|unsqueeze|view"


@pytest.fixture(autouse=True)
def compiled(monkeypatch, tmp_path):
    """The texts of the graphs that are compiled, which eager runs."""
    texts = []
    stand_in(monkeypatch, tmp_path, texts)
    return texts


def blocks(count, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(dropout) for _ in range(count)))


X = torch.linspace(-1, 1, 4 * 12 * 16).view(4, 12, 16)
TARGETS = {"targets": (torch.zeros(4, 12, 16),)}


def limited(model, limit="1GB", **options):
    return rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine="graph",
        backend="inductor",
        loss_fn=F.mse_loss,
        **options,
    )


def groups_of(model, x=X):
    lowered = Planned(model, (x,), {}).lowered
    return groups_among(task.node for task in lowered.tasks)


def half(model, share=0.75, **options):
    """The state after some steps without a limit, and a model under a share of what they need."""
    whole = limited(model, planning="before")
    expected = state_after(whole, X, 2, **TARGETS)
    return expected, limited(model, int(whole.plan.predicted_bytes * share), **options)


def equal(expected, found):
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_alike_layers_share_their_groups(dropout):
    shape = {"heads": 2, "width": 32, "context_length": 16, "dropout": dropout}
    x = torch.randint(64, (2, 16))
    few, more = (
        groups_of(rotor.gpt.gpt("mini", vocab_size=64, layers=layers, **shape), x)
        for layers in (3, 5)
    )
    assert {group.key for group in few} == {group.key for group in more}


def test_views_alone_are_no_groups():
    for group in groups_of(blocks(2)):
        names = re.findall(r"target=(?:torch\.ops\.aten\.|operator\.|_operator\.)(\w+)", group.text)
        assert not all(re.fullmatch(VIEWS, name) for name in names), group.text


def test_kernels_that_would_wait_for_one_another_are_parted(monkeypatch):
    parted, part = [], fusing._Grouping._part

    def noting(grouping, results):
        parted.extend(results)
        part(grouping, results)

    monkeypatch.setattr(fusing._Grouping, "_part", noting)
    check(2019)
    assert len(parted) > 1


def test_another_limit_and_another_model_compile_nothing(compiled):
    model = blocks(3)
    expected, small = half(model)
    count = len(compiled)
    assert count == len(set(compiled))
    assert equal(expected, state_after(small, X, 2, **TARGETS))
    small.compute_sequence(small.mem_limit + 4096)
    state_after(small, X, 1, **TARGETS)
    assert len(compiled) == count


def test_values_go_to_a_second_tier(tmp_path):
    expected, small = half(blocks(3), offload=f"disk:{tmp_path}")
    assert equal(expected, state_after(small, X, 2, **TARGETS))
    assert small.plan.measured_bytes <= small.mem_limit


def test_programs_improve_between_steps_and_are_loaded():
    expected, small = half(blocks(4), planning="background")
    assert equal(expected, state_after(small, X, 2, **TARGETS))
    small.wait_for_planning(30)
    assert equal(expected, state_after(small, X, 2, **TARGETS))
    once = state_after(small, X, 1, **TARGETS)
    other = limited(blocks(4))
    other.measure(X, **TARGETS)
    other.load_plan(small.plan.program.to_json())
    assert equal(once, state_after(other, X, 1, **TARGETS))
    assert other.plan.predicted_bytes <= small.mem_limit


class Inverse(nn.Module):
    """A product with an inverse, which PyTorch checks by an operation that returns nothing."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return torch.relu(x @ torch.linalg.inv(self.scale.diag() + x.mean((0, 1)) * 0))


def test_checks_stay():
    model = limited(Inverse())
    model(X, **TARGETS).backward()
    torch.testing.assert_close(
        model(X, **TARGETS), F.mse_loss(torch.relu(X), TARGETS["targets"][0])
    )
    with torch.no_grad():
        model.module.scale.zero_()
    with pytest.raises(RuntimeError, match="singular"):
        model(X, **TARGETS)


def test_where_inductor_fails_the_message_says_what_to_do(monkeypatch):
    def failing(module, values, mode):
        raise ValueError("no such instruction")

    monkeypatch.setattr(_inductor, "compile_graph", failing)
    with pytest.raises(rotor.CaptureError, match=r'backend="fx" needs no compiler') as found:
        limited(blocks(1))(X, **TARGETS)
    assert "ValueError: no such instruction" in str(found.value)
