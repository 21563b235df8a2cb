"""Forwards with state of Python's, and values that leave by other ways, in the dynamic engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import check_equal
from versions import EXCHANGES
from zoo.models import Tanhs

import rotor
from rotor.errors import InfeasibleError


class Layers(Tanhs):
    def __init__(self) -> None:
        super().__init__(64, 8)


class Drawing(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * (1 + random.random()) + float(np.random.rand()))  # noqa: NPY002
        return x


class Counting(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.mean = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.steps += 1
            x = torch.tanh(layer(x) / self.steps)
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x + self.mean


class Auxiliary(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = torch.zeros(())
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.penalty = self.penalty + x.square().mean()
        return x


class Hooked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, torch.Tensor] = {}
        self.layers[2].register_forward_hook(self._keep)

    def _keep(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self.features["third"] = output


LOSSES: dict[type[Layers], Callable[[Any], Any]] = {
    Drawing: lambda net: 0,
    Counting: lambda net: net.mean.sum(),
    Auxiliary: lambda net: net.penalty,
    Hooked: lambda net: net.features["third"].square().mean(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_steps_equal_those_without_a_limit(kind: type[Layers]):
    evicted = []

    def loss_of(model: Any, k: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 256 * 64).reshape(256, 64) + k
        return model(x).square().mean() + LOSSES[kind](model)

    def state(model: Any) -> None:
        if isinstance(model, rotor.Checkpointable):
            evicted.append(model.plan.last.stats.rematerializations)

    limit = 620_000 if EXCHANGES else 700_000
    check_equal(kind, loss_of, 4, state=state, rate=0.1, mem_limit=limit, engine="dynamic")
    assert sum(evicted) > 0


CAUGHT: dict[str, torch.Tensor] = {}


def hook_and_reader(kind: str) -> tuple[Callable[..., None], Callable[[], torch.Tensor]]:
    """A forward hook that keeps an output outside of all modules, and what reads it there."""
    entries: dict[str, torch.Tensor] = {}
    items: list[torch.Tensor] = []
    variable = torch.zeros(())

    def to_dictionary(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        entries["feature"] = output

    def to_list(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        items[:] = [output]

    def to_variable(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal variable
        variable = output

    def to_global(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        CAUGHT["feature"] = output

    return {
        "dictionary": (to_dictionary, lambda: entries["feature"]),
        "list": (to_list, lambda: items[0]),
        "variable": (to_variable, lambda: variable),
        "global": (to_global, lambda: CAUGHT["feature"]),
    }[kind]


@pytest.mark.parametrize("kind", ["dictionary", "list", "variable", "global"])
def test_values_that_hooks_keep_elsewhere_have_gradients(kind: str) -> None:
    readers = []

    def make() -> nn.Module:
        net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())])
        hook, read = hook_and_reader(kind)
        net[3].register_forward_hook(hook)
        readers.append(read)
        return net

    def loss_of(model: Any, k: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 256 * 64).reshape(256, 64) + k
        return model(x).square().mean() + readers[-1]().abs().mean()

    model = check_equal(make, loss_of, mem_limit=620_000, engine="dynamic")
    assert sum(p.grad is not None for p in model.parameters()) == 12


class _Greedy(torch.autograd.Function):
    """The value itself, with a backward that takes more memory than any limit here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        return given[0] + given[0].new_ones(1 << 22).sum()


class OfItsOwn(Layers):
    """A forward with generators of its own, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.noise = random.Random(1), torch.Generator().manual_seed(1)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.seen.append(self.drawn.random())
            x = torch.tanh(layer(x) * self.seen[-1] + torch.rand(64, generator=self.noise))
        return x


def _state(net: nn.Module) -> list[Any]:
    own: list[Any] = [random.getstate(), str(np.random.get_state())]  # noqa: NPY002
    own += [getattr(net, name, None) for name in ("steps", "mean")]
    if isinstance(net, OfItsOwn):
        own += [net.drawn.getstate(), net.noise.get_state().tolist(), list(net.seen)]
    return own


@pytest.mark.parametrize("kind", [Drawing, Counting, OfItsOwn])
def test_a_backward_that_does_not_fit_leaves_the_state_before_its_forward(kind: type) -> None:
    net = kind()
    model = rotor.Checkpointable(net, mem_limit="2 MiB", engine="dynamic")
    x = torch.randn(64, 64)
    model(x).sum().backward()
    net.layers[3].register_forward_hook(lambda _, __, output: _Greedy.apply(output))
    before = _state(net)
    loss = model(x).sum()
    assert _state(net) != before
    with pytest.raises(InfeasibleError, match="the backward does not fit"):
        loss.backward()
    after = _state(net)
    assert all(a is b or a == b for a, b in zip(after, before, strict=True))
