"""Numbers among the arguments that change in every step: inputs of captured code, not constants."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rotor

STEPS = 6


class Net(nn.Module):
    def __init__(self, use) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.use = use

    def forward(self, x, value):
        return self.use(self.body(x), x, value)


USES = {
    "product": lambda y, x, v: y * v,
    "annealing": lambda y, x, v: v * y + (1 - v) * x,
    "power": lambda y, x, v: y * 0.99**v,
    "cosine": lambda y, x, v: y * (0.5 * (1 + math.cos(math.pi * float(v) / 20))),
    "tensor": lambda y, x, v: y + torch.tensor(float(v)) + torch.full_like(y, v),
    "bound": lambda y, x, v: y.clamp(-v / 9, v / 9),
    "branch": lambda y, x, v: y * v if v > 0.25 else y,
    "bfloat16": lambda y, x, v: ((y.bfloat16() * v) / (v + 1)).float(),
    "float64": lambda y, x, v: ((y.double() * 0.1) * (v * 0.3)).float(),
}


class Reversed(torch.autograd.Function):
    """Gradient reversal, by a factor that its backward reads."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x * (1 + value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.neg() * (2 * ctx.value), None


USES["function"] = lambda y, x, v: Reversed.apply(y, v)
VALUES = {
    "real": lambda i: 0.17 + 0.03 * i,
    "whole": lambda i: i + 2,
    "counter": lambda i: i,
    "NumPy": lambda i: np.float64(0.17 + 0.03 * i),
    "zero-dimensional": lambda i: torch.tensor(0.17 + 0.03 * i),
}


def wrapped(plain, **options):
    return rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="1 MB", verbosity=-1, planning="before", **options
    )


def compare(plain, model, steps, call=None):
    """Train both alike; return the number of captured graphs."""
    call = call or (lambda module, x, value: module(x, value).square().mean())
    for number, value in enumerate(steps):
        losses = []
        for module in (plain, model):
            module.zero_grad()
            torch.manual_seed(number)
            losses.append(call(module, torch.randn(5, 8), value))
            losses[-1].backward()
        assert torch.equal(*losses)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    return len(model.plans)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", VALUES)
def test_a_number_that_changes_is_an_input_at_its_second_value(use, kind):
    if use == "branch" and kind in ("NumPy", "zero-dimensional"):
        pytest.skip("captured code cannot branch on the value of a tensor")
    if use == "function" and kind == "NumPy":
        pytest.skip("captured code cannot hand such a number to the backward of a function")
    if kind == "zero-dimensional" and use in ("cosine", "tensor"):
        pytest.skip("captured code cannot read the value of a tensor")
    torch.manual_seed(0)
    plain = Net(USES[use])
    values = [VALUES[kind](i) for i in range(STEPS)]
    # Zero and one, the first values of the counter, are constants.
    assert compare(plain, wrapped(plain, engine="graph"), values) <= 2 + (kind == "counter")


@pytest.mark.parametrize("engine", ["auto", "graph"])
@pytest.mark.parametrize("place", ["dictionary", "list", "keyword", "target"])
def test_such_a_number_may_lie_anywhere_in_a_call(engine, place):
    class Batched(Net):
        def forward(self, batch, value=None):
            value = (
                batch["value"] if isinstance(batch, dict) else batch[1] if value is None else value
            )
            return super().forward(batch["x"] if isinstance(batch, dict) else batch[0], value)

    calls = {
        "dictionary": lambda module, x, v: module({"x": x, "value": v}).square().mean(),
        "list": lambda module, x, v: module([x, v]).square().mean(),
        "keyword": lambda module, x, v: module([x], value=v).square().mean(),
        "target": lambda module, x, v: (
            module([x, 0.5], targets=(v,))
            if isinstance(module, rotor.Checkpointable)
            else module([x, 0.5]).square().mean() * v
        ),
    }
    options = {"loss_fn": lambda y, v: y.square().mean() * v} if place == "target" else {}
    plain = Batched(USES["annealing"])
    model = wrapped(plain, engine=engine, **options)
    assert compare(plain, model, [0.17 + 0.03 * i for i in range(STEPS)], calls[place]) <= 2


def test_former_values_and_special_ones_are_right_too():
    plain = Net(USES["annealing"])
    values = [0.2, 0.3, 0.2, 1.0, 0.0, -0.0, 1e3, 0.4, math.pi]
    assert compare(plain, wrapped(plain, engine="graph"), values) <= 3


def test_a_number_that_is_a_size_is_a_constant():
    plain = Net(lambda y, x, v: y[:, :v])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        assert compare(plain, wrapped(plain, engine="graph"), [2, 3, 4, 5, 3]) == 4


def test_a_number_that_is_returned_is_right():
    plain = Net(lambda y, x, v: (y, v + 1))

    def call(module, x, value):
        output, number = module(x, value)
        assert type(number) is float
        return output.square().mean() * number

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        compare(plain, wrapped(plain, engine="graph"), [0.2, 0.3, 0.4, 0.5], call)


def test_numbers_that_stay_make_no_further_capture():
    plain = Net(USES["annealing"])
    assert compare(plain, wrapped(plain, engine="graph"), [0.3] * 4) == 1


def test_a_recomputed_operation_reads_the_number_of_its_step():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

        def forward(self, x, value):
            for layer in self.layers:
                x = torch.tanh(layer(x * value) + (1 - value))
            return x

    plain = Deep()
    model = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="700 KB", engine="graph", verbosity=-1, planning="before"
    )
    pending = []
    for module in (plain, model):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        for value in (0.5, 0.6, 0.7):
            module.zero_grad()
            output = module(x, value)
            output.square().mean().backward()
        pending.append([p.grad for p in module.parameters()])
    assert model.plan.recomputed > 0
    assert len(model.plans) == 2
    assert all(map(torch.equal, *pending))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_number_that_stays_a_constant_ends_the_captures():
    plain = Net(lambda y, x, v: nn.functional.dropout(y, v))
    model = wrapped(plain, engine="auto")
    assert compare(plain, model, [0.01 * i for i in range(1, 23)]) < 22
    assert model.plan.engine == "dynamic"
