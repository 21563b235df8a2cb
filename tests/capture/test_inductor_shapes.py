"""Kernels of Inductor for calls of any sizes: one capture, compiled once."""

from __future__ import annotations

import copy
import re
import time
import warnings

import pytest
import torch
from eager_inductor import rely_on_sizes, stand_in
from graph_modules import loss_of
from torch import nn
from torch.nn import functional as F
from training import gradients_of, same

import rotor
from rotor.engines.graph.tracing.groups import groups_among

WIDTH = 16
LENGTHS = (12, 20, 8, 33, 20)


class Attention(nn.Module):
    """A block of attention with a mask of its own, positions and dropout."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.positions, self.norm = nn.Embedding(64, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        x = x + self.positions(torch.arange(x.shape[1]))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.dropout(F.gelu(self.out(y)), self.dropout, self.training)


class Convolutions(nn.Module):
    """Convolutions, statistics of the batch, and a mean over the picture."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.tanh(self.second(x)).mean((2, 3)))


def planned(model, limit="1GB", backend="inductor", **options):
    return rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine="graph",
        backend=backend,
        effort="fast",
        **options,
    )


def step(model, x):
    """Gradients and buffers after one step."""
    model.zero_grad()
    torch.manual_seed(1)
    loss_of(model(x)).backward()
    return [*gradients_of(model), *(b.clone() for b in model.buffers())]


def groups_of(plan):
    return groups_among(task.node for task in plan.step.captured.lowered.tasks)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    found = []
    stand_in(monkeypatch, tmp_path, found)
    return found


def test_a_third_length_compiles_nothing(compiled):
    torch.manual_seed(0)
    model = planned(Attention())
    counts = []
    for length in LENGTHS:
        step(model, torch.randn(2, length, WIDTH))
        counts.append(len(compiled))
    assert counts[0] < counts[1] == counts[-1]
    assert "4 share 1 captured graph, 0 captured alone" in model.report()
    assert all(plan.step.captured is model.plan.step.captured for plan in model.plans.values())


@pytest.mark.parametrize("make", [Attention, Convolutions], ids=lambda make: make.__name__)
def test_lengths_give_what_plain_steps_give_within_the_predicted_bytes(compiled, make):
    torch.manual_seed(0)
    plain = make(0.0) if make is Attention else make()
    model = planned(plain)
    shape = (3, WIDTH, WIDTH) if make is Convolutions else (10, WIDTH)
    for count in (4, 6, 3, 6):
        x = torch.randn(count, *shape)
        for one, other in zip(step(model, x), step(plain, x), strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
        plan = model.plan
        if plan.measured_bytes:
            assert plan.measured_bytes <= plan.predicted_bytes <= plan.limit_bytes


def test_limited_lengths_equal_unlimited_ones_bit_for_bit(compiled):
    torch.manual_seed(0)
    net = nn.Sequential(*(Attention() for _ in range(3)))
    whole = planned(net)
    step(whole, torch.randn(2, 33, WIDTH))
    most = whole.plan.predicted_bytes
    whole, limited = planned(net), planned(net, int(most * 0.85))
    recomputed = 0
    for length in LENGTHS:
        x = torch.randn(2, length, WIDTH)
        assert same(step(whole, x), step(limited, x)), length
        recomputed += limited.plan.recomputed
    assert recomputed


def test_sizes_are_arguments_of_groups_and_read_no_tensor(compiled):
    model = planned(Attention(0.0))
    for length in LENGTHS[:2]:
        step(model, torch.randn(2, length, WIDTH))
    lowered = model.plan.step.captured.lowered
    assert set(lowered.symbols)
    groups = [task for task in lowered.tasks if groups_among([task.node])]
    assert any(isinstance(one.meta.get("val"), torch.SymInt)
               for task in groups for one in task.node.all_input_nodes)  # fmt: skip
    # Blocks that are alike have the same groups.
    twice = planned(nn.Sequential(*(Attention(0.0) for _ in range(3))))
    for length in LENGTHS[:2]:
        step(twice, torch.randn(2, length, WIDTH))
    calls = [task for task in twice.plan.step.captured.lowered.tasks if groups_among([task.node])]
    assert len(groups_of(twice.plan)) <= len(calls) - len(twice.module)


def test_kernels_that_take_sizes_for_constants_are_not_shared(compiled, monkeypatch):
    rely_on_sizes(monkeypatch)
    model = planned(Attention(0.0))
    for length in LENGTHS[:3]:
        step(model, torch.randn(2, length, WIDTH))
    told = model.report()
    assert re.search(
        "shape is captured alone: ValueError: a kernel holds only where s.* = 20", told
    )
    assert "0 share 0 captured graphs, 3 captured alone" in told


def test_sizes_at_which_kernels_do_not_hold_have_their_own(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path)
    model, plain = planned(Attention(0.0)), Attention(0.0)
    plain.load_state_dict(model.state_dict())
    for number, length in enumerate(LENGTHS):
        x = torch.randn(2, length, WIDTH)
        for one, other in zip(step(model, x), step(plain, x), strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)
        if number == 1:
            lowered = model.plan.step.captured.lowered
            (name,) = lowered.symbols
            for group in groups_of(model.plan):
                group.conditions = (f"{name} <= 20",)
    told = model.report()
    assert "3 share 1 captured graph, 1 captured alone" in told
    assert re.search("a graph of its own: kernels hold only where s[0-9]+ <= 20", told)


def test_auto_chooses_for_kernels_of_any_sizes(compiled, monkeypatch):
    from rotor.engines.graph import choosing
    from rotor.engines.graph.tracing.groups import Operators

    monkeypatch.setattr(choosing, "made_here", {})
    monkeypatch.setattr(choosing, "ratios_of", lambda graphs: [0.5])
    monkeypatch.setattr(choosing, "is_better", lambda parted, compiled: True)
    model, twin = planned(Attention(0.0), backend="auto"), planned(Attention(0.0), backend="auto")
    twin.load_state_dict(model.state_dict())
    for length in LENGTHS:
        x = torch.randn(2, length, WIDTH)
        assert same(step(model, x), step(twin, x))
    tasks = model.plan.step.captured.lowered.tasks
    assert any(isinstance(task.node.target, Operators) for task in tasks if task.node)
    assert "4 share 1 captured graph" in model.report()


@pytest.mark.slow
def test_kernels_rely_on_sizes_of_their_own_alone():
    """The length of the targets is that of the input: it is no symbol of the graph."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("table", torch.randn(40, WIDTH))

        def forward(self, x):
            return torch.tanh(self.inner(x) * self.table[: x.shape[1]])

    model = planned(Turned(), loss_fn=lambda output, target: (output * target).square().mean())
    for length in LENGTHS[:4]:
        given = torch.randn(2, length, WIDTH), torch.randn(2, length, WIDTH)
        model(given[0], targets=(given[1],)).backward()
    assert "4 share 1 captured graph" in model.report()


@pytest.mark.slow
def test_compiled_kernels_take_any_length():
    from torch._inductor import config

    torch.manual_seed(0)
    plain = Attention(0.0)
    model = planned(plain)
    with warnings.catch_warnings(), config.patch(compile_threads=1):
        warnings.simplefilter("ignore")
        for length in LENGTHS:
            x = torch.randn(2, length, WIDTH)
            begun = time.perf_counter()
            found = step(model, x)
            seconds = time.perf_counter() - begun
            for one, other in zip(found, step(plain, x), strict=True):
                assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)
            # A compilation takes longer.
            assert length in LENGTHS[:2] or seconds < 0.5
