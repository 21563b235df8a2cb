"""Operators whose gradients PyTorch computes in a loop: one operation each in a captured graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import rotor

WIDTH, ROWS = 12, 64


class Reflected(nn.Module):
    """Product of reflections, written out."""

    def __init__(self, multiply) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).tril(-1) / WIDTH)
        self.multiply = multiply

    def forward(self, x):
        tau = 2 / (1 + self.weight.square().sum(0))
        return x @ self.multiply(self.weight, tau)


class Stack(nn.Module):
    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wide():
    return [orthogonal(nn.Linear(a, b)) for a, b in ((WIDTH, 18), (18, WIDTH))]


def alike():
    return [orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="householder") for _ in range(5)]


def written(multiply):
    return lambda: [Reflected(multiply) for _ in range(2)]


MAKERS = [
    pytest.param(wide, id="rectangular"),
    pytest.param(alike, id="alike"),
    pytest.param(written(torch.linalg.householder_product), id="function"),
    pytest.param(written(torch.orgqr), id="older name"),
    pytest.param(written(lambda a, tau: a.orgqr(tau)), id="method"),
]


def train(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("make", MAKERS)
def test_a_loop_of_a_backward_is_one_operation_with_the_same_bits(make):
    torch.manual_seed(0)
    plain = Stack(make())
    model = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="1 MB", engine="graph", verbosity=-1, planning="before"
    )
    x = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        for ours, theirs in zip(train(model, x), train(plain, x), strict=True):
            assert torch.equal(ours, theirs)
    # The loop of one column alone has a dozen operations.
    assert len(model.graph) < 40 * len(plain.layers)


def test_a_gradient_of_such_a_gradient_is_right():
    torch.manual_seed(0)
    plain = Stack(wide())
    model = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="1 MB", engine="graph", verbosity=-1, planning="before"
    )
    x = torch.randn(ROWS, WIDTH)

    def penalised(module):
        loss = module(x).square().mean()
        made = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in made).backward()
        return [p.grad for p in module.parameters()]

    with pytest.warns(rotor.MemoryLimitWarning):
        found = penalised(model)
    for ours, theirs in zip(found, penalised(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


class WithoutReflections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.linalg.householder_product(x * self.scale, x.new_ones(0) * self.scale)


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
def test_a_product_of_no_reflections_has_no_gradients(engine):
    model = rotor.Checkpointable(WithoutReflections(), mem_limit="1 MB", engine=engine)
    model(torch.randn(5, 5)).square().mean().backward()
    assert model.scale.grad is None
