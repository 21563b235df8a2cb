"""A wrapped model that is dropped gives its memory back at once, as a plain one does."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import rotor
from rotor import memory


class Net(nn.Module):
    """Two layers, between which the graph may break."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(64, 64), nn.Linear(64, 64), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.second(torch.tanh(x)))


def chain() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Sequential(*layers[:4]), *layers[4:])


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "chain": (chain, "chain", "700 KB"),
    "graph": (Net, "graph", "500 KB"),
    "parts": (lambda: Net(breaks=True), "auto", "600 KB"),
    "dynamic": (Net, "dynamic", "700 KB"),
}


def wrapped(name: str) -> tuple[rotor.Checkpointable, weakref.ref[nn.Parameter]]:
    make, engine, limit = MODELS[name]
    model = make()
    chk = rotor.Checkpointable(model, mem_limit=limit, engine=engine, verbosity=-1)
    return chk, weakref.ref(next(model.parameters()))


def train(chk: nn.Module, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        for _ in range(steps):
            chk(torch.randn(400, 64)).sum().backward()


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a model; nothing but references frees memory."""
    # The modules that a first capture imports keep its frames for a while.
    train(wrapped(request.param)[0], 1)
    gc.collect()
    gc.disable()
    yield request.param
    gc.enable()
    gc.collect()


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_dropped_model_leaves_no_parameters(name: str, steps: int) -> None:
    chk, parameter = wrapped(name)
    train(chk, steps)
    del chk
    assert parameter() is None


def test_a_dropped_copy_leaves_no_parameters(name: str) -> None:
    chk, _ = wrapped(name)
    twin = copy.deepcopy(chk)
    twin.load_state_dict(chk.state_dict())
    parameter = weakref.ref(next(twin.parameters()))
    del twin
    assert parameter() is None


@pytest.mark.parametrize("name", ["dynamic"], indirect=True)
def test_a_budget_leaves_no_parameters(name: str) -> None:
    model = MODELS[name][0]()
    parameter = weakref.ref(next(model.parameters()))
    with rotor.dtr.budget("700 KB"):
        model(torch.randn(400, 64)).sum().backward()
    del model
    assert parameter() is None


def test_a_forward_without_a_backward_leaves_nothing(name: str) -> None:
    def forward() -> None:
        loss = chk(torch.randn(400, 64)).sum()
        assert loss.isfinite()

    chk, _ = wrapped(name)
    train(chk, 4)
    device = torch.device("cpu")
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        forward()
        gc.collect()
        with memory.meter(device) as meter:
            for _ in range(3):
                forward()
            gc.collect()
    # One activation takes 100 KiB; the dynamic engine's lists go when the collector comes.
    assert meter.end_bytes < 50_000
