"""Gradients that exist are added to where they lie, and are not paid again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo.models import Branching, Recurrent

import rotor
from rotor import memory
from rotor.engines.graph.planned import GraphPlan, build_graph
from rotor.engines.parts.pieced import PiecesPlan
from rotor.graph import planner
from rotor.graph.graph import Graph

pytestmark = pytest.mark.filterwarnings("ignore:no single graph of the model")


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ConvBlock(nn.Module):
    def __init__(self, channels, residual):
        super().__init__()
        self.residual = residual
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)))
        return x + y if self.residual else y


class ConvNet(nn.Module):
    def __init__(self, residual):
        super().__init__()
        self.blocks = nn.ModuleList(ConvBlock(96, residual) for _ in range(3))

    def forward(self, x):
        x = x.expand(-1, 96, -1, -1)
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Its head is its embedding."""

    def __init__(self, tied=False, vocabulary=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128)
        self.blocks = nn.ModuleList(Attention(128) for _ in range(2))
        self.head = nn.Linear(128, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2000, 64)
        self.linear = nn.Linear(64, 64)

    def forward(self, tokens):
        return self.linear(self.table(tokens).tanh().mean(1))


class HalfFrozen(MLP):
    def __init__(self):
        super().__init__()
        for layer in self.layers[::2]:
            layer.requires_grad_(False)


MODELS = {
    "mlp": (MLP, lambda: torch.randn(32, 256)),
    "resnet": (lambda: ConvNet(residual=True), lambda: torch.randn(2, 1, 8, 8)),
    "gpt": (GPT, lambda: torch.randint(64, (2, 16))),
    "rnn in parts": (Recurrent, lambda: torch.randn(4, 8, 96)),
    "tied weights": (lambda: GPT(tied=True), lambda: torch.randint(64, (2, 16))),
    "conv and norm": (lambda: ConvNet(residual=False), lambda: torch.randn(2, 1, 8, 8)),
    "embedding": (Bag, lambda: torch.randint(2000, (8, 16))),
    "half frozen": (HalfFrozen, lambda: torch.randn(32, 256)),
}


IN_PARTS = ("mlp", "rnn in parts")


def cases():
    for name in MODELS:
        if name != "rnn in parts":
            yield pytest.param(name, "graph", id=f"{name}, graph")
        marks = () if name in IN_PARTS else pytest.mark.slow
        yield pytest.param(name, "parts", id=f"{name}, parts", marks=marks)


def step(model, x):
    model(x).square().mean().backward()


def metered(model, x):
    with memory.meter("cpu") as meter:
        step(model, x)
    return meter.peak_bytes


def drop_gradients(model):
    for parameter in model.parameters():
        parameter.grad = None


def gradient_bytes(model):
    sizes = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
    return sum(sizes), max(sizes)


def made(name, engine="graph"):
    torch.manual_seed(0)
    build, sample = MODELS[name]
    model = build()
    if engine == "parts" and name != "rnn in parts":
        model = Branching(model)
    return model, sample()


def least_limit(chk):
    """The least limit for the step that was planned last."""
    before = chk.mem_limit
    with pytest.raises(rotor.InfeasibleError) as raised:
        chk.compute_sequence(mem_limit=1000)
    assert chk.mem_limit == before
    return raised.value.minimum_bytes


@pytest.mark.parametrize(("name", "engine"), list(cases()))
def test_existing_gradients_are_not_paid_again(name, engine):
    model, x = made(name, engine)
    plain = copy.deepcopy(model)
    eager_first, eager = metered(plain, x), metered(plain, x)
    chk = rotor.Checkpointable(model, mem_limit="1GiB", effort="fast")
    for _ in range(2):
        drop_gradients(model)
        step(chk, x)
    drop_gradients(model)
    first = metered(chk, x)
    least_first = least_limit(chk)
    total, largest = gradient_bytes(model)

    given = [p.grad for p in model.parameters()]
    step(chk, x)
    assert type(chk.plan) is (PiecesPlan if engine == "parts" else GraphPlan)
    peak = metered(chk, x)
    # As far from what plain PyTorch needs as without existing gradients, which that has right.
    assert peak - eager <= max(first - eager_first, 0) + 1024
    assert peak <= chk.plan.predicted_bytes
    if name == "rnn in parts":
        # The least that is known before a step is that of the largest part.
        assert least_limit(chk) < least_first - largest
    else:
        assert least_limit(chk) <= least_first - total + 2 * largest

    # The same tensors have the sum that plain PyTorch makes.
    step(plain, x)
    for a, b, gradient in zip(model.parameters(), plain.parameters(), given, strict=True):
        assert a.grad is gradient
        assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "rnn in parts"])
def test_a_graph_plans_as_if_existing_gradients_had_no_bytes(name):
    model, x = made(name)
    chk = rotor.Checkpointable(model, mem_limit="1GiB", engine="graph", effort="fast")
    measured = chk.measure(x)
    graph = build_graph(measured.lowered, measured.costs, 0)
    outputs = set(graph.operations[measured.lowered.loss].inputs)
    free = [0 if s.pinned and k not in outputs else s.bytes for k, s in enumerate(graph.storages)]
    without = Graph(free, [s.pinned for s in graph.storages], graph.operations)
    with pytest.raises(rotor.InfeasibleError) as raised:
        planner.plan(without, 1, effort="fast")
    floor = raised.value.minimum_bytes
    step(chk.module, x)
    _, largest = gradient_bytes(model)
    step(chk, x)
    # Beside these bytes only one gradient at a time, and the small ones that leave with it.
    assert least_limit(chk) <= floor + 1.25 * largest + chk.plan.executor_bytes
