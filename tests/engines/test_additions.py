"""Gradients that exist, in the dynamic engine: added to where they lie, and never paid twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rotor
from rotor import memory

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "wide": (lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), (16, 256)),
    "deep": (
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.LayerNorm(96)) for _ in range(6))
        ),
        (64, 96),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(4))
        ),
        (4, 16, 16, 16),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True),
        (2, 16, 64),
    ),
}


def _with_gradients(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = MODELS[name][0]()
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    return net


def _bytes(net: nn.Module) -> tuple[int, int]:
    sizes = [parameter.nbytes for parameter in net.parameters()]
    return sum(sizes), max(sizes)


def _step(net: nn.Module, name: str, **limited: Any) -> tuple[int, Any]:
    model = rotor.Checkpointable(net, engine="dynamic", **limited) if limited else net
    x = torch.linspace(-1, 1, torch.Size(MODELS[name][1]).numel()).reshape(MODELS[name][1])
    model(x).square().mean().backward()
    if limited:
        return model.plan.last.stats.peak_bytes, model
    return 0, model


@pytest.mark.parametrize("verify", ["off", "first"])
@pytest.mark.parametrize("name", MODELS)
def test_existing_gradients_take_no_second_copy(name: str, verify: str):
    plain = _with_gradients(name)
    _step(plain, name)
    with memory.meter("cpu") as meter:
        _step(plain, name)
    total, largest = _bytes(plain)
    expected = [parameter.grad for parameter in plain.parameters()]
    # Without a limit that is short, plain PyTorch's peak; it too has one gradient at a time.
    limit = meter.peak_bytes + largest + 16_384
    assert total > 2 * largest
    net = _with_gradients(name)
    _, model = _step(net, name, mem_limit=limit, verify=verify)
    x = torch.linspace(-1, 1, torch.Size(MODELS[name][1]).numel()).reshape(MODELS[name][1])
    with memory.meter("cpu") as meter:
        model(x).square().mean().backward()
    assert meter.peak_bytes <= limit
    found = [parameter.grad for parameter in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_steps_that_are_not_proved_hold_one_gradient_at_a_time():
    plain = _with_gradients("wide")
    _step(plain, "wide")
    with memory.meter("cpu") as meter:
        _step(plain, "wide")
    peak, _ = _step(_with_gradients("wide"), "wide", mem_limit="64MiB", verify="off")
    assert peak <= meter.peak_bytes + 16_384 < _bytes(plain)[0]


def test_gradients_from_elsewhere_and_of_hooks_are_summed_as_without_a_limit():
    """Penalties, two forwards in one backward, hooks: autograd adds them up first."""

    def train(limit: str | None) -> list[torch.Tensor]:
        net = _with_gradients("wide")
        x = torch.linspace(-1, 1, 16 * 256).reshape(16, 256)
        model: Any = net
        if limit:
            model = rotor.Checkpointable(net, mem_limit=limit, engine="dynamic")
        parameters = list(net.parameters())
        heard: list[float] = []
        parameters[0].register_hook(lambda gradient: heard.append(float(gradient.sum())))
        parameters[1].register_hook(lambda gradient: gradient * 2)
        parameters[2].register_post_accumulate_grad_hook(
            lambda parameter: heard.append(float(parameter.grad.sum()))
        )
        loss = model(x).square().mean() + sum(p.square().sum() for p in parameters[4:6])
        loss.backward()
        with torch.no_grad():
            first = [parameter.grad.clone() for parameter in parameters]
        asked = torch.autograd.grad(model(x).sum(), parameters[3:5])
        unchanged = [parameter.grad.clone() for parameter in parameters]
        model(x).sum().backward(inputs=parameters[6:8])
        assert len(heard) == 2
        return [
            *first,
            *asked,
            *unchanged,
            *(p.grad for p in parameters),
            torch.tensor(sorted(heard)),
        ]

    expected, found = train(None), train("32MiB")
    same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    assert same == [True] * len(same)


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_two_forwards_in_one_backward_are_summed_first():
    def train(limit: str | None) -> list[torch.Tensor]:
        net = _with_gradients("wide")
        model: Any = net
        if limit:
            model = rotor.Checkpointable(net, mem_limit=limit, engine="dynamic")
        x = torch.linspace(-1, 1, 16 * 256).reshape(16, 256)
        (model(x).square().mean() + model(x * 3).square().mean()).backward()
        return [parameter.grad for parameter in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train("32MiB"), train(None), strict=True))
