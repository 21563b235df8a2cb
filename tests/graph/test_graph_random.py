# ruff: noqa: NPY002
"""Random numbers that Python and NumPy draw in a forward are those of plain execution."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rotor

_elsewhere = random.Random(5)

DRAWS: dict[str, Callable[[Any], Any]] = {
    "own generator": lambda net: net.random.random(),
    "own generator, integers": lambda net: net.random.randint(1, 9),
    "generator of a module": lambda net: _elsewhere.random(),
    "Python": lambda net: random.random(),
    "Python, by another function": lambda net: random.gauss(0.0, 1.0),
    "NumPy": lambda net: torch.from_numpy(np.random.rand(16)).float(),
    "NumPy, a number": lambda net: np.random.uniform(0.5, 2.0),
    "own state of NumPy": lambda net: torch.as_tensor(net.state.normal(size=16)).float(),
    "own generator of NumPy": lambda net: torch.from_numpy(net.numpy.standard_normal(16)).float(),
}


class Noisy(nn.Module):
    """Model that multiplies by what it draws, before or within alike layers."""

    def __init__(self, draw: Callable[[Any], Any], *, breaks: bool, within: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(self, draw) if within else Layer() for _ in range(5))
        self.draw, self.breaks, self.within = draw, breaks, within
        self.random = random.Random(3)
        self.state, self.numpy = np.random.RandomState(4), np.random.default_rng(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.within:
            x = x * self.draw(self)
        for layer in self.layers:
            x = layer(x)
        if self.breaks and x.sum() > 1e9:
            return x * 2
        return x


class Layer(nn.Module):
    def __init__(self, net: Any = None, draw: Any = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.draw, self.random = draw, random.Random(7)
        self.state, self.numpy = np.random.RandomState(4), np.random.default_rng(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y if self.draw is None else y * self.draw(self)


def results(make: Callable[[], nn.Module], engine: str | None) -> list[Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    _elsewhere.seed(0)
    net = make()
    limit: dict[str, Any] = {"mem_limit": "1 MB", "engine": engine, "verbosity": 0}
    model = net if engine is None else rotor.Checkpointable(net, **limit)
    x, seen = torch.randn(32, 16), []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        seen += [loss.item(), *[gradient.sum().item() for gradient in gradients]]
    return [*seen, np.random.rand(), random.random(), torch.rand(()).item(), _elsewhere.random()]


@pytest.mark.parametrize("engine", ["auto", "graph"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_graph_draws_in_each_step(draw: str, engine: str) -> None:
    def make() -> nn.Module:
        return Noisy(DRAWS[draw], breaks=False, within=False)

    assert results(make, engine) == results(make, None)


@pytest.mark.parametrize("draw", ["own generator", "Python", "own state of NumPy"])
def test_alike_layers_draw_one_by_one(draw: str) -> None:
    def make() -> nn.Module:
        return Noisy(DRAWS[draw], breaks=False, within=True)

    assert results(make, "graph") == results(make, None)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("draw", ["own generator", "NumPy", "own generator of NumPy"])
def test_parts_draw_in_each_step(draw: str, within: bool) -> None:
    def make() -> nn.Module:
        return Noisy(DRAWS[draw], breaks=True, within=within)

    with pytest.warns(rotor.MemoryLimitWarning):
        limited = results(make, "auto")
    assert limited == results(make, None)


class Skipping(Noisy):
    """Model that leaves out layers by chance, and draws choices of other kinds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.random.sample(range(5), 3)
        for k, layer in enumerate(self.layers):
            if k in kept and self.random.random() < 0.9:
                x = layer(x)
        return x * self.random.choice([1.0, 2.0])


def arithmetic(net: Any) -> float:
    return 1 / (1 - net.random.uniform(0.1, 0.5))


@pytest.mark.parametrize("kind", [Skipping, Noisy])
def test_what_no_graph_repeats_is_not_captured_whole(kind: type[Noisy]) -> None:
    def make() -> nn.Module:
        return kind(arithmetic, breaks=False, within=False)

    with pytest.raises(rotor.CaptureError):
        results(make, "graph")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        limited = results(make, "auto")
    assert limited == results(make, None)


def test_a_generator_that_is_replaced_is_followed() -> None:
    def losses(engine: str | None) -> list[float]:
        torch.manual_seed(0)
        net = Noisy(DRAWS["own generator"], breaks=False, within=False)
        limit: dict[str, Any] = {"mem_limit": "1 MB", "engine": engine, "verbosity": 0}
        model = net if engine is None else rotor.Checkpointable(net, **limit)
        x, seen = torch.randn(32, 16), []
        for step in range(4):
            if step == 2:
                net.random = random.Random(11)
            loss = model(x).square().mean()
            loss.backward()
            seen.append(loss.item())
        return seen

    assert losses("graph") == losses(None)


WEIGHED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "a sum": lambda y, net: net.random.uniform(0.1, 0.9) * y.mean() + y,
    "a mixture": lambda y, net: y * (share := np.random.beta(0.4, 0.4)) + (1 - share) * y.max(),
    "a comparison": lambda y, net: torch.where(y.mean() > random.random() - 0.5, y, 2 * y),
    "a quotient of integers": lambda y, net: y * (random.randint(1, 9) / 7),
    "a power": lambda y, net: y.norm() ** random.random() * y,
}


class Weighing(Noisy):
    """Model that weighs a tensor without dimensions by what it draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.draw(x, self)  # type: ignore[call-arg, no-any-return]


SCALARS: dict[str, tuple[Any, Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "a scalar": (np.float64(0.3), lambda y, scale: scale * y.mean() + (1 - scale) * y.norm()),
    "a short scalar": (np.float32(0.3), lambda y, scale: scale * y.mean()),
    "a mean": (np.arange(3) / 7, lambda y, scale: scale.mean() * y.mean()),
    "a sum by NumPy": (np.arange(3) / 7, lambda y, scale: np.sum(scale) * y.mean()),
}


class Scaled(Weighing):
    """Model that weighs by an argument of NumPy's kind."""

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        self.scale = scale
        return super().forward(x)


@pytest.mark.parametrize("kind", SCALARS)
def test_scalars_of_numpy_promote_as_numbers_do(kind: str) -> None:
    scale, weigh = SCALARS[kind]

    def found(engine: str | None) -> list[Any]:
        torch.manual_seed(0)
        net = Scaled(lambda y, net: weigh(y, net.scale), breaks=False, within=False)  # type: ignore
        limit: dict[str, Any] = {"mem_limit": "1 MB", "engine": engine, "verbosity": 0}
        model = net if engine is None else rotor.Checkpointable(net, **limit)
        loss = model(torch.randn(32, 16), scale)
        loss.backward()
        return [loss.dtype, loss.item(), *[p.grad.sum().item() for p in net.parameters()]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        assert found("auto") == found(None)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("weigh", WEIGHED)
def test_drawn_numbers_promote_as_numbers_do(weigh: str, device: str | None) -> None:
    def make() -> nn.Module:
        return Weighing(WEIGHED[weigh], breaks=False, within=False)  # type: ignore[arg-type]

    torch.set_default_device(device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
            assert results(make, "auto") == results(make, None)
    finally:
        torch.set_default_device(None)
