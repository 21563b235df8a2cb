"""Limits of steps whose gradients are differentiated, where no plan runs a forward again."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import Alone

import rotor
from rotor import memory
from rotor.units import exact_bytes

Loop = Callable[[Any, torch.Tensor], None]

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


def chain() -> nn.Module:
    blocks = [(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*(module for block in blocks for module in block), nn.Linear(32, 1))


def usual(model: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def penalty(model: Any, x: torch.Tensor) -> None:
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


def of_an_equation(model: Any, x: torch.Tensor) -> None:
    y = model(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    (first[:, 1] - 0.1 * second[:, 0]).square().mean().backward()


def product(model: Any, x: torch.Tensor) -> None:
    wanted = list(model.parameters())
    model(x).square().mean().backward(create_graph=True)
    first = [p.grad for p in wanted]
    torch.autograd.grad(first, wanted, [torch.ones_like(g) for g in first])
    model.zero_grad()


def adapted(model: Any, x: torch.Tensor) -> None:
    values = dict(model.named_parameters())
    loss = model(x).square().mean()
    made = torch.autograd.grad(loss, list(values.values()), create_graph=True)
    pairs = zip(values.items(), made, strict=True)
    nearer = {name: value - 0.1 * gradient for (name, value), gradient in pairs}
    torch.func.functional_call(model, nearer, (x,)).square().mean().backward()


LOOPS = [penalty, of_an_equation, product, adapted]


def peak_of(model: Any, loop: Loop) -> int:
    model.zero_grad()
    x = torch.randn(256, 32, requires_grad=True)
    with memory.meter("cpu") as meter:
        loop(model, x)
    return meter.peak_bytes


def train(model: Any, loops: list[Loop]) -> list[str]:
    """Return the warnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loop in loops:
            model.zero_grad()
            loop(model, torch.randn(256, 32, requires_grad=True))
    return [str(w.message) for w in caught if w.category is rotor.MemoryLimitWarning]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_chain_that_recomputes_nothing_says_what_the_whole_step_needed(loop: Loop) -> None:
    peak, least = peak_of(chain(), loop), peak_of(chain(), usual)
    model = rotor.Checkpointable(chain(), mem_limit=(peak + least) // 2, engine="chain")
    (text,) = train(model, [loop] * 5)
    assert f"(create_graph=True) needed {exact_bytes(peak)}" in text
    assert f"the limit is {exact_bytes(model.mem_limit)}" in text
    assert model.plan.measured_bytes == peak
    # What such a step needs is no reason to recompute in others.
    assert not model.plan.outdated
    assert model.plan.reserve_bytes == 0


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_nothing_is_said_where_the_whole_step_is_within_the_limit(loop: Loop) -> None:
    limit = 11 * peak_of(chain(), loop) // 10
    model = rotor.Checkpointable(chain(), mem_limit=limit, engine="chain")
    assert train(model, [loop] * 5) == []
    assert 0 < model.plan.measured_bytes <= limit


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_so_does_a_model_that_plain_pytorch_or_the_dynamic_engine_runs(loop: Loop) -> None:
    peak = peak_of(Alone(4, 0.1), loop)
    model = rotor.Checkpointable(Alone(4, 0.1), mem_limit=9 * peak // 10)
    told = train(model, [loop] * 5)
    assert any(exact_bytes(model.mem_limit) in text for text in told)
    assert any("create_graph=True" in text for text in told)


def test_usual_steps_beside_teach_the_plan() -> None:
    peak, least = peak_of(chain(), penalty), peak_of(chain(), usual)
    model = rotor.Checkpointable(chain(), mem_limit=(peak + least) // 2, engine="chain")
    (text,) = train(model, [penalty, usual])
    assert "(create_graph=True) needed" in text
    assert model.plan.measured_bytes == least
    assert train(model, [penalty, usual]) == []
    assert not model.plan.outdated


def test_a_step_without_a_last_backward_is_given_up() -> None:
    least = peak_of(chain(), usual)
    model = rotor.Checkpointable(chain(), mem_limit=2 * least, engine="chain")
    kept = []

    def open_ended(model: Any, x: torch.Tensor) -> None:
        kept.append(torch.autograd.grad(model(x).sum(), x, create_graph=True))

    assert train(model, [open_ended]) == []
    with pytest.raises(memory.MeterBusyError):
        memory.meter("cpu").start()
    for _ in range(70):
        model(torch.randn(4, 32))
    assert train(model, [usual]) == []
    assert model.plan.measured_bytes == least


def test_another_threads_backward_ends_no_step() -> None:
    peak = peak_of(chain(), penalty)
    model = rotor.Checkpointable(chain(), mem_limit=2 * peak, engine="chain")
    x = torch.randn(256, 32, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    other = torch.ones(4, requires_grad=True)
    thread = threading.Thread(target=lambda: other.sum().backward())
    thread.start()
    thread.join()
    assert model.plan.meterings == 0
    slope.square().sum().backward()
    assert model.plan.meterings == 1
